"""Rows of batches to be compared, damage to shards, and parts of a corpus small enough for many."""

import pathlib

import numpy as np
import pytest

from mlm.data import batches, shards, sources
from mlm.data.manifest import Manifest
from tests.support.corpora import shard_rows

LANES = 3
BATCH = 12  # of six shards


def small_parts(patch: pytest.MonkeyPatch, part: int = 9000) -> None:
    """Parts and blocks of so many bytes, so that there are many."""
    patch.setattr(sources, "PART_BYTES", (part, 10**9))
    patch.setattr(shards, "BLOCK_BYTES", (1500, 10**9))


def train(manifest: Manifest, *, rows: tuple[int, int] = (0, BATCH), start: int = 0, **settings):
    settings = {"split": "train", "seed": 0, "global_batch": BATCH, "lanes": LANES, **settings}
    return batches.train_batches(
        manifest, start_row=start * settings["global_batch"], rows=rows, **settings
    )


def hosts_batches(
    manifest: Manifest, *, hosts: int, batch: int = BATCH, count: int, **settings
) -> dict[str, np.ndarray]:
    """The columns of `count` global batches, each put together from the rows that every host reads."""
    held = batch // hosts
    streams = [
        train(manifest, rows=(first, first + held), global_batch=batch, **settings)
        for first in range(0, batch, held)
    ]
    parts = [next(stream) for _ in range(count) for stream in streams]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def all_rows(manifest: Manifest, split: str) -> np.ndarray:
    """The rows of a split by record id: shard after shard."""
    return np.concatenate(shard_rows(manifest, split))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)


def write_records(path: pathlib.Path, ids: np.ndarray, masks: np.ndarray) -> None:
    """As prepare_tfrecord_shards.py does."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in zip(ids, masks, strict=True):
            values = [tf.train.Feature(int64_list=tf.train.Int64List(value=value)) for value in row]
            features = dict(zip(("input_ids", "attention_mask"), values, strict=True))
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString(deterministic=True))


def shard_path(copied: Manifest, number: int = 1) -> pathlib.Path:
    return pathlib.Path(copied.folder, copied.splits["train"].shards[number].file)


def record_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little") + 16


def damage(copied: Manifest, fault: str) -> pathlib.Path:
    """Damages a shard; returns the path that must be named."""
    path = shard_path(copied)
    data = path.read_bytes()
    if fault == "cut between records":
        offset = 0
        while (following := offset + record_size(data[offset:])) < len(data):
            offset = following
        path.write_bytes(data[:offset])
    elif fault == "bit flipped":
        path.write_bytes(data[:777] + bytes([data[777] ^ 4]) + data[778:])
    elif fault == "missing":
        path.unlink()
    elif fault == "extra":
        path = path.with_name("dataset-99-3.tfrecord")
        path.write_bytes(data)
    elif fault == "another shard's records":
        path.write_bytes(shard_path(copied, 2).read_bytes())
    return path
