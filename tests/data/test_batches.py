"""Shards -> batches: the rows that the order names, on any hosts, and a damaged shard by its name."""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mlm.data import batches
from mlm.data.manifest import load_manifest
from mlm.data.order import Lane, batch_rows
from mlm.errors import DamageError, InputError
from tests import ROOT
from tests.data.rows import (
    BATCH,
    LANES,
    all_rows,
    assert_same,
    damage,
    hosts_batches,
    shard_path,
    train,
)
from tests.support.corpora import LENGTH, in_epochs


def lanes_of(manifest, seed: int = 0) -> list[Lane]:
    records = tuple(shard.records for shard in manifest.splits["train"].shards)
    return [Lane(seed, records, lane, LANES) for lane in range(LANES)]


def test_batches_are_those_of_the_order(manifest):
    """Of any seed and over epochs: the rows of their record ids."""
    rows = all_rows(manifest, "train")
    for seed, steps in ((0, 3 * len(rows) // (2 * BATCH)), (1, 2)):
        found = in_epochs(train(manifest, seed=seed), steps)
        dtypes = {key: column.dtype for key, column in found.items()}
        assert dtypes == {
            "input_ids": "int32",
            "attention_mask": "int32",
            "record_id": "uint32",
            "epoch": "uint32",
        }
        ids, epochs = batch_rows(lanes_of(manifest, seed), rows_before=0, rows=BATCH, count=steps)
        np.testing.assert_array_equal(found["record_id"], ids.ravel())
        np.testing.assert_array_equal(found["epoch"], epochs.ravel())
        np.testing.assert_array_equal(found["input_ids"], rows[ids.ravel()])
        assert (
            found["attention_mask"].shape == (steps * BATCH, LENGTH)
            and found["attention_mask"].min() == 1
        )


@pytest.mark.standard
def test_a_program_that_has_not_read_all_batches_ends(manifest):
    """At its exit, threads of tf.data still ask Python for the next shards."""
    program = [sys.executable, "-m", "tests.programs.unread_batches", str(manifest.folder)]
    assert subprocess.run(program, cwd=ROOT, timeout=120).returncode == 7


def test_hosts_share_the_same_global_batches_from_any_step(manifest):
    """With a lane for two of them."""
    start = 77
    count = 5
    found = hosts_batches(train, manifest, hosts=6, batch=BATCH, start=start, count=count)
    whole = in_epochs(train(manifest, start=start), count)
    assert_same(found, whole)
    ids, _ = batch_rows(lanes_of(manifest), rows_before=start * BATCH, rows=BATCH, count=count)
    np.testing.assert_array_equal(whole["record_id"], ids.ravel())


def test_seeking_reads_one_shard_a_lane(manifest, copied):
    """The batch of a far step comes although all shards but those of its visits are gone."""
    step = 1000 * manifest.splits["train"].records // BATCH
    needed = {next(lane.visits(step * BATCH // LANES)).shard for lane in lanes_of(manifest)}
    for number in range(len(copied.splits["train"].shards)):
        if number not in needed:
            shard_path(copied, number).unlink()
    assert_same(next(train(copied, start=step)), next(train(manifest, start=step)))


@pytest.mark.parametrize("batch", [16, 10_000])
def test_evaluation_gives_every_record_once_in_order(manifest, batch):
    rows = all_rows(manifest, "validation")
    found = list(batches.eval_batches(manifest, split="validation", batch=batch, rows=(0, batch)))
    assert len(found) == -(-len(rows) // batch)
    assert {part["input_ids"].shape for part in found} == {(batch, LENGTH)}
    valid, ids, records = (
        np.concatenate([part[key] for part in found]) for key in ("valid", "input_ids", "record_id")
    )
    assert valid.dtype == np.float32
    np.testing.assert_array_equal(valid, np.arange(len(valid)) < len(rows))
    np.testing.assert_array_equal(ids[: len(rows)], rows)
    np.testing.assert_array_equal(
        ids[len(rows) :], np.broadcast_to(ids[-batch], ids[len(rows) :].shape)
    )
    np.testing.assert_array_equal(records[: len(rows)], np.arange(len(rows)))
    assert not np.concatenate([part["epoch"] for part in found]).any()
    of_host = batches.eval_batches(manifest, split="validation", batch=batch, rows=(4, 8))
    for part, columns in zip(found, of_host, strict=True):
        assert_same(columns, {key: column[4:8] for key, column in part.items()})


def write_records(path: pathlib.Path, ids: np.ndarray, masks: np.ndarray) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in zip(ids, masks, strict=True):
            values = [tf.train.Feature(int64_list=tf.train.Int64List(value=value)) for value in row]
            features = dict(zip(("input_ids", "attention_mask"), values, strict=True))
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
            )


def test_shards_as_the_tf_tpu_example_writes_them(tokenizer_folder, tmp_path):
    """Rows with padding: the attention mask is theirs."""
    rng = np.random.default_rng(0)
    expected = {}
    for split, counts in {"train": (20, 20, 7), "validation": (9,)}.items():
        (tmp_path / split).mkdir()
        expected[split] = []
        for number, count in enumerate(counts):
            ids = rng.integers(5, 600, (count, 24))
            masks = (np.arange(24) < rng.integers(1, 25, (count, 1))).astype(int)
            expected[split] += [*zip(ids.tolist(), masks.tolist(), strict=True)]
            write_records(tmp_path / split / f"dataset-{number}-{count}.tfrecord", ids, masks)
    found = load_manifest(str(tmp_path), tokenizer_folder=tokenizer_folder)
    assert found.length == 24
    for batch in itertools.islice(train(found), 8):
        for ids, mask, record in zip(
            batch["input_ids"], batch["attention_mask"], batch["record_id"], strict=True
        ):
            assert (ids.tolist(), mask.tolist()) == expected["train"][record]
    (batch,) = batches.eval_batches(found, split="validation", batch=9, rows=(0, 9))
    rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    assert list(rows) == expected["validation"]


def test_an_empty_evaluation_split_is_refused(manifest):
    with pytest.raises(InputError, match="the test split is empty"):
        next(batches.eval_batches(manifest, split="test", batch=4, rows=(0, 4)))


def refused(copied) -> str:
    """What the reading of shard 1 says."""
    with pytest.raises(DamageError) as error:
        list(batches.eval_batches(copied, split="train", batch=16, rows=(0, 16), shards=[1]))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("fault", ["cut between records", "bit flipped", "missing", "empty"])
def test_a_shard_damaged_after_the_start_is_named(copied, fault):
    """`verify` looks at every shard when a run starts; this is what reading them finds."""
    assert str(damage(copied, fault)) in refused(copied)


@pytest.mark.parametrize("token", [600, 2**32 + 7, -1])
def test_a_token_id_that_the_vocabulary_lacks_is_named(copied, token):
    """Too large, too large for 32 bits, and negative."""
    records = copied.splits["train"].shards[1].records
    ids = np.full((records, LENGTH), 9)
    ids[3, 5] = token
    write_records(shard_path(copied), ids, np.ones_like(ids))
    assert f"{shard_path(copied)}: record 4 has the token id {token}" in refused(copied)
    if token == 600:
        with pytest.raises(DamageError, match="record 4 has the token id 600"):
            in_epochs(train(copied), 500)
