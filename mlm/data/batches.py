"""Shards -> this host's rows of every global batch, by tf.data in the order of `order.py`, a whole shard at a time."""

import functools
import itertools
import math
import types
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from mlm.data.manifest import Manifest, verify
from mlm.data.order import Visit, lanes_of, make_lanes
from mlm.errors import DamageError

SAMPLE = 10_000  # training rows whose tokens are counted
Batch = dict[str, np.ndarray]


@functools.cache
def import_tensorflow() -> types.ModuleType:
    """Imports TensorFlow without accelerators, which belong to jax."""
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf


def _without_autograph(function):
    """Returns a function for tf.data; autograph would read its source file again on first use, hours into a run."""
    return import_tensorflow().autograph.experimental.do_not_convert(function)


def train_batches(
    manifest: Manifest,
    *,
    split: str,
    seed: int,
    global_batch: int,
    lanes: int,
    start_row: int,
    rows: tuple[int, int],
) -> Iterator[Batch]:
    """Returns the rows [start, stop) of the global batches after those that hold `start_row` rows, without end.

    Batches are {"input_ids", "attention_mask": int32 [rows, L], "record_id", "epoch": uint32 [rows]}; record ids count
    through the shards of the split, the epoch is the lane's. DamageError names the shard of a record that can't
    be read.
    """
    reader = _Reader(manifest, split)
    all_lanes = make_lanes(manifest, split, seed=seed, lanes=lanes)
    host_lanes = lanes_of(rows, global_batch=global_batch, lanes=lanes)
    per_lane = global_batch // lanes
    start, stop = (row - host_lanes.start * per_lane for row in rows)
    visits = [all_lanes[lane].visits(start_row // lanes) for lane in host_lanes]

    def stream(lane):
        return reader.stream(visits, lane, count=np.iinfo(np.int64).max).rebatch(per_lane)

    lane_numbers = import_tensorflow().data.Dataset.range(len(visits))
    # traced once, however many lanes there are
    rows_by_lane = lane_numbers.interleave(_without_autograph(stream), cycle_length=len(visits))
    batches = reader.run(rows_by_lane.batch(len(visits)))
    return (
        {key: np.concatenate(parts)[start:stop] for key, parts in batch.items()}
        for batch in batches
    )


def eval_batches(
    manifest: Manifest,
    *,
    split: str,
    batch: int,
    rows: tuple[int, int],
    shards: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Yields the rows [start, stop) of batches that hold every record of a split, or of some shards, once, in order.

    Batches are as in `train_batches`, and "valid": float32 [rows], 0 for copies that fill up the last one.
    """
    reader = _Reader(manifest, split)
    shards = range(len(reader.shards)) if shards is None else shards
    visits = (Visit(shard, 0, np.arange(reader.records[shard])) for shard in shards)
    stream = reader.stream([visits], 0, count=len(shards)).rebatch(batch, drop_remainder=False)
    places = np.arange(*rows)
    for columns in reader.run(stream):
        valid = places < len(columns["record_id"])
        picked = np.where(valid, places, 0)
        yield {key: column[picked] for key, column in columns.items()} | {
            "valid": valid.astype(np.float32)
        }


def in_memory(ids_BxL: np.ndarray) -> Batch:
    """Returns a batch as `train_batches` yields it, of rows without padding, numbered from 0."""
    return {
        "input_ids": ids_BxL.astype(np.int32),
        "attention_mask": np.ones(ids_BxL.shape, np.int32),
        "record_id": np.arange(len(ids_BxL), dtype=np.uint32),
        "epoch": np.zeros(len(ids_BxL), np.uint32),
    }


def count_tokens(manifest: Manifest) -> np.ndarray:
    """Returns how often each ordinary token occurs in the first training rows, a fair sample: int64 [V], 0 if special.

    Of the folders of a mixture by their shares.
    """
    counts_V = np.zeros(manifest.vocab_size, np.int64)
    for folder, count in _sample_sizes(manifest):
        batches = eval_batches(folder, split="train", batch=500, rows=(0, 500))
        for batch in itertools.islice(batches, math.ceil(count / 500)):
            is_counted = (batch["valid"] > 0) & (batch["record_id"] < count)
            is_real = (batch["attention_mask"] > 0) & is_counted[:, None]
            counts_V += np.bincount(batch["input_ids"][is_real], minlength=manifest.vocab_size)
    counts_V[list(manifest.all_special_ids)] = 0
    return counts_V


def words_per_row(manifest: Manifest, words_V: np.ndarray) -> float:
    """Returns the mean of `tokenizer.counted_words` in a row of the training split, over `count_tokens`' sample."""
    return float(count_tokens(manifest) @ words_V) / sum(
        count for _, count in _sample_sizes(manifest)
    )


def _sample_sizes(manifest: Manifest) -> list[tuple[Manifest, int]]:
    """Returns the folders, and how many of the first training rows of each are in the sample."""
    parts = manifest.parts
    total = min([SAMPLE, *(part.manifest.splits["train"].records / part.share for part in parts)])
    return [(part.manifest, math.ceil(total * part.share)) for part in parts]


class _Reader:
    """Reads whole shards of one split."""

    def __init__(self, manifest: Manifest, split: str):
        self.manifest = manifest
        self.shards = manifest.splits[split].shards
        self.records = tuple(shard.records for shard in self.shards)
        self._paths = manifest.paths(split)

    def stream(self, visits: Sequence[Iterator[Visit]], lane, *, count: int):
        """Returns a tf.data stream of the rows of `count` of visits[lane], a visit an element; lane may be a tensor."""
        tf = import_tensorflow()

        def plan(number: np.int64) -> tuple[np.int64, np.int64, np.ndarray]:
            shard, epoch, rows = next(visits[number])
            return np.int64(shard), np.int64(epoch), rows

        names = ["input_ids"] if self.manifest.full_rows else ["input_ids", "attention_mask"]
        features = dict.fromkeys(names, tf.io.FixedLenFeature((self.manifest.length,), tf.int64))
        paths = tf.constant(self._paths)
        starts = tf.constant(np.cumsum([0, *self.records]))

        def read(_) -> dict:
            shard, epoch, order = tf.numpy_function(plan, [lane], [tf.int64] * 3)
            shard.set_shape([]), epoch.set_shape([]), order.set_shape([None])
            records = tf.data.TFRecordDataset(paths[shard]).batch(max(self.records) + 1)
            parsed = tf.io.parse_example(records.get_single_element(), features)
            columns = {
                name: tf.gather(tf.cast(column, tf.int32), order) for name, column in parsed.items()
            }
            return (
                {"attention_mask": tf.ones_like(columns["input_ids"])}
                | columns
                | {
                    "record_id": tf.cast(starts[shard] + order, tf.uint32),
                    "epoch": tf.cast(tf.fill(tf.shape(order), epoch), tf.uint32),
                }
            )

        return (
            tf.data.Dataset.range(count)
            .map(_without_autograph(read), num_parallel_calls=1)
            .prefetch(1)
        )

    def run(self, dataset) -> Iterator[Batch]:
        """Returns the batches of a tf.data pipeline as numpy arrays; an error in it is traced to its shard."""
        options = import_tensorflow().data.Options()
        options.deterministic = True
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 2
        pipeline = [iter(dataset.with_options(options).prefetch(4))]
        batches = self._read(pipeline)
        # at the exit of Python, too: its threads call Python, and a little later would wait for it forever
        weakref.finalize(batches, pipeline.clear)
        return batches

    def _read(self, pipeline: list) -> Iterator[Batch]:
        """Yields the batches of an iterator, which the list alone holds."""
        try:
            while columns := next(pipeline[0], None):
                batch = {key: column.numpy() for key, column in columns.items()}
                self._check_ids(batch)
                yield batch
        except import_tensorflow().errors.OpError as error:
            for folder in self.manifest.folders:
                verify(folder)  # names the shard, unless nobody knows what was written
            raise DamageError(f"{self.manifest.folder}: {error.message}") from error

    def _check_ids(self, batch: Batch) -> None:
        """Raises DamageError for a token id that the vocabulary lacks, as in shards of another tokenizer."""
        ids = batch["input_ids"]
        size = self.manifest.vocab_size
        outside = (ids < 0) | (ids >= size)
        if outside.any():
            record = batch["record_id"][outside.any(-1)][0]
            shard = np.searchsorted(np.cumsum(self.records), record, side="right")
            raise DamageError(
                f"{self._paths[shard]}: record {record} has the token id {ids[outside][0]}, the vocabulary {size} "
                "entries."
            )
