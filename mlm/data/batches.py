"""Shards -> this host's rows of every global batch, by tf.data.

The order is that of `order.py`: a pure function of manifest, seed, batch size and lanes. A shard is read whole, its
records parsed at once, and its rows gathered in the order of the visit; so to seek is to read one shard a lane.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Iterator

import numpy as np

from mlm.data.manifest import Manifest
from mlm.data.order import Lane, lanes_of
from mlm.errors import DamageError, InputError

Batch = dict[str, np.ndarray]


@functools.cache
def _tensorflow() -> types.ModuleType:
    """Imports TensorFlow, without the accelerators: they are jax's."""
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf


def _mapped(dataset, function):
    """Maps without autograph, which reads the source file again when a function is first used, hours into a run."""
    tf = _tensorflow()
    return dataset.map(tf.autograph.experimental.do_not_convert(function), num_parallel_calls=1)


def train_batches(
    manifest: Manifest, *, split: str, seed: int, global_batch: int, lanes: int, start_step: int, rows: tuple[int, int]
) -> Iterator[Batch]:
    """Yields this host's rows of the global batches `start_step`, `start_step` + 1, ..., without end.

    Args:
      manifest: of the shards.
      split: to read.
      seed: of the order.
      global_batch: rows of a batch over all hosts.
      lanes: virtual hosts, see `order.py`.
      start_step: batches consumed before.
      rows: [start, stop) of the global batch: whole lanes, or a part of one that hosts share.

    Returns:
      Of batches {"input_ids": int32 [rows, L], "attention_mask": int32 [rows, L], "record_id": uint32 [rows],
      "epoch": uint32 [rows]}; the record id counts through the shards of the split, the epoch is the lane's.

    Raises:
      InputError: fewer shards than lanes, or rows that lanes don't fit (`order.lanes_of`).
      DamageError: a record that can't be read, or a token id that the vocabulary doesn't have.
    """
    shards = manifest.splits[split].shards
    if len(shards) < lanes:
        raise InputError(f"config.data.lanes = {lanes}: {manifest.folder} has only {len(shards)} {split} shards.")
    own, per_lane = lanes_of(rows, global_batch=global_batch, lanes=lanes), global_batch // lanes
    start, stop = (row - own.start * per_lane for row in rows)
    records = tuple(shard.records for shard in shards)
    reader = _Reader(manifest, split)
    tf = _tensorflow()
    streams = [reader.lane(Lane(seed, records, lane, lanes), start_step * per_lane, per_lane) for lane in own]

    def join(*parts: dict) -> dict:
        return {key: tf.concat([part[key] for part in parts], 0)[start:stop] for key in parts[0]}

    return reader.run(_mapped(tf.data.Dataset.zip(tuple(streams)), join))


def eval_batches(manifest: Manifest, *, split: str, batch: int, rows: tuple[int, int]) -> Iterator[Batch]:
    """Yields this host's rows of the batches that hold every record of a split once, in the order of their ids.

    Args:
      manifest: of the shards.
      split: to read.
      batch: rows over all hosts; the last batch is filled up with copies of its first row.
      rows: [start, stop) of each batch.

    Returns:
      Of batches as in `train_batches`, and "valid": float32 [rows], 0 for what only fills the last one.

    Raises:
      InputError: the split is empty.
      DamageError: as in `train_batches`.
    """
    if split not in manifest.splits or not manifest.splits[split].records:
        raise InputError(f"{manifest.folder}: the {split} split is empty; there is nothing to evaluate on.")
    tf = _tensorflow()
    reader = _Reader(manifest, split)
    visits = tf.data.Dataset.range(len(manifest.splits[split].shards))
    whole = _mapped(visits, reader.in_order).rebatch(batch, drop_remainder=False)

    def fill(columns: dict) -> dict:
        index = tf.range(batch)
        valid = index < tf.shape(columns["record_id"])[0]
        picked = {key: tf.gather(column, tf.where(valid, index, 0)) for key, column in columns.items()}
        picked["valid"] = tf.cast(valid, tf.float32)
        return {key: column[rows[0] : rows[1]] for key, column in picked.items()}

    return reader.run(_mapped(whole, fill))


def in_memory(ids_BxL: np.ndarray) -> dict[str, np.ndarray]:
    """Returns rows of tokens, without padding and numbered from 0, as `train_batches` yields a batch."""
    return {
        "input_ids": ids_BxL.astype(np.int32),
        "attention_mask": np.ones(ids_BxL.shape, np.int32),
        "record_id": np.arange(len(ids_BxL), dtype=np.uint32),
        "epoch": np.zeros(len(ids_BxL), np.uint32),
    }


def count_tokens(manifest: Manifest, *, split: str, records: int = 10_000) -> np.ndarray:
    """Returns how often each ordinary token occurs in the first records of a split: int64 [V], 0 for special tokens.

    The shards are dealt out like cards, so their beginnings are a fair sample of it.

    Raises:
      DamageError: as in `train_batches`.
    """
    rows = (0, 500)
    counts_V = np.zeros(manifest.vocab_size, np.int64)
    for batch in itertools.islice(eval_batches(manifest, split=split, batch=rows[1], rows=rows), records // rows[1]):
        real = (batch["attention_mask"] > 0) & (batch["valid"] > 0)[:, None]
        counts_V += np.bincount(batch["input_ids"][real], minlength=manifest.vocab_size)
    counts_V[list(manifest.all_special_ids)] = 0
    return counts_V


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads whole shards of one split into columns."""

    manifest: Manifest
    split: str
    requested: dict[int, None] = dataclasses.field(default_factory=dict)  # shards, the last one last

    @property
    def starts(self) -> np.ndarray:
        """Record id of the first record of each shard."""
        records = [shard.records for shard in self.manifest.splits[self.split].shards]
        return np.concatenate([[0], np.cumsum(records)[:-1]]).astype(np.int64)

    def lane(self, lane: Lane, position: int, rows: int):
        """Returns the tf.data stream of a lane from its record `position` on, in batches of `rows`."""
        tf = _tensorflow()
        first, skip = lane.seek(position)

        def plan(number: np.int64) -> tuple[np.int64, np.int64, np.ndarray]:
            visit = lane.visit(int(number))
            visit = dataclasses.replace(visit, skip=skip if number == first else 0)
            self.requested.pop(visit.shard, None)
            self.requested[visit.shard] = None
            return np.int64(visit.shard), np.int64(visit.epoch), lane.record_order(visit).astype(np.int64)

        def read(number):
            shard, epoch, order = tf.numpy_function(plan, [number], [tf.int64] * 3, stateful=False)
            shard.set_shape([]), epoch.set_shape([]), order.set_shape([None])
            return self.columns(shard, order, epoch)

        visits = tf.data.Dataset.range(first, np.iinfo(np.int64).max)
        return _mapped(visits, read).prefetch(1).rebatch(rows)

    def in_order(self, shard):
        """Returns the columns of a shard in the order of its records."""
        tf = _tensorflow()
        records = tf.constant([s.records for s in self.manifest.splits[self.split].shards], tf.int64)
        return self.columns(shard, tf.range(records[shard]), tf.constant(0, tf.int64))

    def columns(self, shard, order, epoch):
        """Returns {"input_ids", ...} of the rows `order` of a shard."""
        tf = _tensorflow()
        length, size = self.manifest.length, self.manifest.vocab_size
        shards = self.manifest.splits[self.split].shards
        paths = tf.constant([f"{self.manifest.folder}/{s.file}" for s in shards])
        records = tf.constant([s.records for s in shards], tf.int64)
        whole = tf.data.TFRecordDataset(paths[shard]).batch(max(s.records for s in shards) + 1)
        serialized = whole.get_single_element()
        count = tf.shape(serialized, tf.int64)[0]
        same = tf.debugging.assert_equal(count, records[shard])
        feature = tf.io.FixedLenFeature((length,), tf.int64)
        names = ["input_ids"] if self.manifest.full_rows else ["input_ids", "attention_mask"]
        with tf.control_dependencies([same]):
            parsed = tf.io.parse_example(serialized, dict.fromkeys(names, feature))
        largest = tf.reduce_max(tf.bitcast(parsed["input_ids"], tf.uint64))  # of which a negative id is the largest
        with tf.control_dependencies([tf.debugging.assert_less(largest, tf.constant(size, tf.uint64))]):
            ids = tf.gather(tf.cast(parsed["input_ids"], tf.int32), order)
        ones = tf.ones_like(ids)
        return {
            "input_ids": ids,
            "attention_mask": tf.gather(tf.cast(parsed["attention_mask"], tf.int32), order) if names[1:] else ones,
            "record_id": tf.cast(order + tf.constant(self.starts)[shard], tf.uint32),
            "epoch": tf.cast(tf.fill(tf.shape(order), epoch), tf.uint32),
        }

    def run(self, dataset) -> Iterator[Batch]:
        """Yields the batches of a tf.data pipeline as numpy arrays; what goes wrong in it is traced to its record."""
        tf = _tensorflow()
        failure = tf.errors.OpError  # looked up now: at the exit of Python the module is gone before the generator
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 2
        try:
            for columns in dataset.with_options(options).prefetch(4):
                yield {key: column.numpy() for key, column in columns.items()}
        except failure as error:
            raise DamageError(self.find_damage() or f"{self.manifest.folder}: {error.message}") from error

    def find_damage(self) -> str | None:
        """Reads shards record by record, those that were asked for last first; returns the first fault, or None."""
        tf = _tensorflow()
        length, size = self.manifest.length, self.manifest.vocab_size
        shards = self.manifest.splits[self.split].shards
        for index in list(self.requested)[::-1] or range(len(shards)):
            shard = shards[index]
            path, number = f"{self.manifest.folder}/{shard.file}", 0
            try:
                for number, record in enumerate(tf.data.TFRecordDataset(path), 1):
                    feature = {"input_ids": tf.io.FixedLenFeature((length,), tf.int64)}
                    ids = tf.io.parse_single_example(record, feature)["input_ids"].numpy()
                    wrong = ids[(ids < 0) | (ids >= size)]
                    if len(wrong):
                        return f"{path}: record {number} has the token id {wrong[0]}, the vocabulary {size} entries."
            except tf.errors.NotFoundError:
                return f"{path}: is missing."
            except tf.errors.DataLossError:
                return f"{path}: is damaged after record {number}; put a good copy in its place."
            except tf.errors.InvalidArgumentError:
                return f"{path}: record {number} holds no input_ids of {length} tokens."
            if number != shard.records:
                return f"{path}: holds {number} records where {shard.records} were written."
        return None
