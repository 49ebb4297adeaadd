"""Shards -> batches: the rows that the order names, on any hosts, and a damaged shard by its name."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from mlm.data import batches
from mlm.data.manifest import load_manifest
from mlm.data.order import Lane, batch_rows
from mlm.errors import DamageError
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
    write_records,
)
from tests.support.corpora import LENGTH, in_epochs


def lanes_of(manifest, seed: int = 0) -> list[Lane]:
    records = tuple(shard.records for shard in manifest.splits["train"].shards)
    return [Lane(seed, records, lane, LANES) for lane in range(LANES)]


@pytest.mark.standard
def test_a_program_that_has_not_read_all_batches_ends(manifest):
    """At its exit, threads of tf.data still ask Python for the next shards."""
    program = [sys.executable, "-m", "tests.programs.unread_batches", str(manifest.folder)]
    assert subprocess.run(program, cwd=ROOT, timeout=120).returncode == 7


@pytest.mark.parametrize(("seed", "start"), [(0, 77), (1, 0)])
def test_hosts_share_the_same_global_batches_from_any_step(manifest, seed, start):
    """Those of the order, over more than an epoch; with a lane for two hosts."""
    count = 3 * manifest.splits["train"].records // (2 * BATCH) if seed else 5
    whole = in_epochs(train(manifest, start=start, seed=seed), count)
    lanes = lanes_of(manifest, seed)
    order = batch_rows(lanes, rows_before=start * BATCH, rows=BATCH, count=count)
    ids, epochs = map(np.ravel, order)
    np.testing.assert_array_equal(whole["record_id"], ids)
    np.testing.assert_array_equal(whole["epoch"], epochs)
    np.testing.assert_array_equal(whole["input_ids"], all_rows(manifest, "train")[ids])
    assert whole["attention_mask"].shape == (count * BATCH, LENGTH)
    assert whole["attention_mask"].all()
    dtypes = [column.dtype for column in whole.values()]
    assert dtypes == ["int32", "int32", "uint32", "uint32"]
    if seed == 0:
        found = hosts_batches(manifest, hosts=6, start=start, count=count)
        assert_same(found, whole)


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
    def read(rows: tuple[int, int]) -> list[dict]:
        return list(batches.eval_batches(manifest, split="validation", batch=batch, rows=rows))

    rows = all_rows(manifest, "validation")
    whole = read((0, batch))
    ids = np.concatenate([columns["input_ids"] for columns in whole])
    assert ids.shape == (len(whole) * batch, LENGTH)
    np.testing.assert_array_equal(ids[: len(rows)], rows)
    # the last batch is filled up with its first row
    assert (ids[len(rows) :] == ids[-batch]).all()
    valid = np.concatenate([columns["valid"] for columns in whole])
    np.testing.assert_array_equal(valid, np.arange(len(ids)) < len(rows))
    records = np.concatenate([columns["record_id"] for columns in whole])
    np.testing.assert_array_equal(records[: len(rows)], np.arange(len(rows)))
    assert not any(columns["epoch"].any() for columns in whole)
    for columns, expected in zip(read((4, 8)), whole, strict=True):
        assert_same(columns, {key: column[4:8] for key, column in expected.items()})


def test_shards_as_the_tf_tpu_example_writes_them(tokenizer_folder, tmp_path):
    """Rows with padding: the attention mask is theirs."""
    rng = np.random.default_rng(0)
    expected = {"train": [], "validation": []}
    for split, counts in {"train": (20, 20, 7), "validation": (9,)}.items():
        (tmp_path / split).mkdir()
        for number, count in enumerate(counts):
            ids = rng.integers(5, 600, (count, 24))
            masks = (np.arange(24) < rng.integers(1, 25, (count, 1))).astype(int)
            expected[split] += zip(ids.tolist(), masks.tolist(), strict=True)
            write_records(tmp_path / split / f"dataset-{number}-{count}.tfrecord", ids, masks)
    found = load_manifest(str(tmp_path), tokenizer_folder=tokenizer_folder)
    assert found.length == 24
    validation = batches.eval_batches(found, split="validation", batch=9, rows=(0, 9))
    for split, stream in (("train", itertools.islice(train(found), 8)), ("validation", validation)):
        for batch in stream:
            columns = (batch[key] for key in ("input_ids", "attention_mask", "record_id"))
            for ids, mask, record in zip(*columns, strict=True):
                assert (ids.tolist(), mask.tolist()) == expected[split][record]


def refused(copied) -> str:
    """What the reading of shard 1 says."""
    with pytest.raises(DamageError) as error:
        list(batches.eval_batches(copied, split="train", batch=16, rows=(0, 16), shards=[1]))
    return str(error.value)


@pytest.mark.parametrize("fault", ["cut between records", "bit flipped", "missing"])
def test_a_shard_damaged_after_the_start_is_named(copied, fault):
    """`verify` looks at every shard when a run starts; this is what reading them finds."""
    assert str(damage(copied, fault)) in refused(copied)


@pytest.mark.parametrize("token", [600, -1])
def test_a_token_id_that_the_vocabulary_lacks_is_named(copied, token):
    before, records = (shard.records for shard in copied.splits["train"].shards[:2])
    ids = np.full((records, LENGTH), 9)
    ids[3, 5] = token
    write_records(shard_path(copied), ids, np.ones_like(ids))
    words = f"{shard_path(copied)}: record {before + 3} has the token id {token}"
    assert words in refused(copied)
    with pytest.raises(DamageError, match=words):
        in_epochs(train(copied), 500)
