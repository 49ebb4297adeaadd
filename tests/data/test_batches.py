import itertools
import pathlib
import shutil
import time

import numpy as np
import pytest

from mlm.data import batches, tfrecord
from mlm.data.manifest import load_manifest
from mlm.data.order import Lane
from mlm.errors import DamageError, InputError
from tests.data.rows import BATCH, LANES, all_rows, assert_same, damage, shard_path, train
from tests.support.corpora import LENGTH, in_epochs, write_shards
from tests.support.tiny import slow

# Order ----------------------------------------------------------------------------------------------------------------


@pytest.mark.standard
def test_columns(manifest):
    batch = next(train(manifest))
    dtypes = {key: column.dtype for key, column in batch.items()}
    assert dtypes == {"input_ids": "int32", "attention_mask": "int32", "record_id": "uint32", "epoch": "uint32"}
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (BATCH, LENGTH)
    assert batch["record_id"].shape == batch["epoch"].shape == (BATCH,)


def test_rows_are_those_of_their_record_ids(manifest):
    rows = all_rows(manifest, "train")
    steps = 2 * len(rows) // BATCH
    found = in_epochs(train(manifest), steps)
    np.testing.assert_array_equal(found["input_ids"], rows[found["record_id"]])
    assert found["attention_mask"].min() == 1


def test_every_record_once_in_each_epoch_of_its_lane(manifest):
    shards = manifest.splits["train"].shards
    starts = np.cumsum([0, *(shard.records for shard in shards)])
    steps = 3 * manifest.splits["train"].records // BATCH
    found = in_epochs(train(manifest), steps)
    seen = []
    for lane in range(LANES):
        own = np.arange(steps * BATCH).reshape(steps, LANES, -1)[:, lane].reshape(-1)
        ids, epochs = found["record_id"][own], found["epoch"][own]
        expected = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in range(lane, len(shards), LANES)])
        assert (np.diff(epochs.astype(int)) >= 0).all()
        for epoch in range(2):
            np.testing.assert_array_equal(np.sort(ids[epochs == epoch]), expected)
            seen.append(ids[epochs == epoch])
        assert (seen[-1] != seen[-2]).any(), "each epoch has an order of its own"
        assert (np.diff(seen[-1].astype(int)) != 1).mean() > 0.8, "shuffled"
    assert len(np.unique(np.concatenate(seen))) == manifest.splits["train"].records


@pytest.mark.standard
@pytest.mark.parametrize("hosts", [slow(1), 3, slow(6), 12])  # with a lane for two or four of them, too
@pytest.mark.parametrize("start", [slow(0), slow(1), slow(17), 250])
def test_hosts_share_the_same_global_batches_from_any_step(manifest, hosts, start):
    walked = in_epochs(itertools.islice(train(manifest), start, None), 20)
    share = BATCH // hosts
    parts = [
        in_epochs(train(manifest, start=start, rows=(host * share, (host + 1) * share)), 20) for host in range(hosts)
    ]
    joined = {
        key: np.concatenate([part[key].reshape(20, share, *part[key].shape[1:]) for part in parts], 1).reshape(
            20 * BATCH, *parts[0][key].shape[1:]
        )
        for key in parts[0]
    }
    assert_same(joined, walked)


@pytest.mark.standard
def test_the_seed_decides_and_nothing_else(manifest):
    assert_same(next(train(manifest)), next(train(manifest)))
    assert (next(train(manifest, seed=1))["record_id"] != next(train(manifest))["record_id"]).any()


def test_the_batches_are_pinned(manifest):
    """The ids may change only if every run that was ever started may go on with other batches."""
    big = manifest.splits["train"].records
    assert big > 500
    first = next(train(manifest))["record_id"]
    lane = Lane(0, tuple(s.records for s in manifest.splits["train"].shards), 0, LANES)
    visit = next(lane.visits(0))
    start = sum(s.records for s in manifest.splits["train"].shards[: visit.shard])
    np.testing.assert_array_equal(first[: BATCH // LANES], start + visit.rows[: BATCH // LANES])


def test_seeking_reads_one_shard_a_lane(manifest, tmp_path):
    """The batch of a far step comes although all shards but those of its visits are gone."""
    records = tuple(shard.records for shard in manifest.splits["train"].shards)
    per_lane = BATCH // LANES
    step = 1000 * sum(records) // BATCH
    lanes = [Lane(0, records, lane, LANES) for lane in range(LANES)]
    needed = {next(lane.visits(step * per_lane)).shard for lane in lanes}
    expected = next(train(manifest, start=step))
    shutil.copytree(manifest.folder, tmp_path / "few")
    few = load_manifest(str(tmp_path / "few"))
    for number, shard in enumerate(few.splits["train"].shards):
        if number not in needed:
            pathlib.Path(few.folder, shard.file).unlink()
    begin = time.monotonic()
    assert_same(next(train(few, start=step)), expected)
    assert time.monotonic() - begin < 5


def test_tensorflow_sees_no_accelerator(manifest):
    import tensorflow as tf

    next(train(manifest))
    assert tf.config.get_visible_devices("GPU") == []
    assert tf.config.get_visible_devices("TPU") == []


# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [7, 16, 64, 10_000])
def test_evaluation_gives_every_record_once_in_order(manifest, batch):
    rows = all_rows(manifest, "validation")
    found = list(batches.eval_batches(manifest, split="validation", batch=batch, rows=(0, batch)))
    assert len(found) == -(-len(rows) // batch)
    assert {part["input_ids"].shape for part in found} == {(batch, LENGTH)}
    valid = np.concatenate([part["valid"] for part in found])
    assert valid.dtype == np.float32
    np.testing.assert_array_equal(valid, np.arange(len(valid)) < len(rows))
    ids = np.concatenate([part["input_ids"] for part in found])
    np.testing.assert_array_equal(ids[: len(rows)], rows)
    np.testing.assert_array_equal(ids[len(rows) :], np.broadcast_to(ids[-batch], ids[len(rows) :].shape))
    np.testing.assert_array_equal(np.concatenate([p["record_id"] for p in found])[: len(rows)], np.arange(len(rows)))
    assert not np.concatenate([part["epoch"] for part in found]).any()


def test_evaluation_of_hosts_is_a_slice_of_the_whole(manifest):
    whole = list(batches.eval_batches(manifest, split="validation", batch=16, rows=(0, 16)))
    for host in range(4):
        part = list(batches.eval_batches(manifest, split="validation", batch=16, rows=(4 * host, 4 * host + 4)))
        for mine, all_ in zip(part, whole, strict=True):
            assert_same(mine, {key: column[4 * host : 4 * host + 4] for key, column in all_.items()})


# Shards of transformers' TF-TPU example -------------------------------------------------------------------------------


def test_shards_as_the_tf_tpu_example_writes_them(tokenizer_folder, tmp_path):
    """Rows with padding, written as prepare_tfrecord_shards.py does: the attention mask is theirs."""
    import tensorflow as tf

    rng, expected = np.random.default_rng(0), {}
    for split, counts in {"train": (20, 20, 7), "validation": (9,)}.items():
        (tmp_path / split).mkdir()
        expected[split] = []
        for number, count in enumerate(counts):
            ids = rng.integers(5, 600, (count, 24))
            mask = (np.arange(24) < rng.integers(1, 25, (count, 1))).astype(int)
            expected[split] += [*zip(ids.tolist(), mask.tolist(), strict=True)]
            with tf.io.TFRecordWriter(str(tmp_path / split / f"dataset-{number}-{count}.tfrecord")) as writer:
                for row in zip(ids, mask, strict=True):
                    values = [tf.train.Feature(int64_list=tf.train.Int64List(value=value)) for value in row]
                    features = dict(zip(("input_ids", "attention_mask"), values, strict=True))
                    writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    found = load_manifest(str(tmp_path), tokenizer_folder=tokenizer_folder)
    assert found.length == 24
    for batch in itertools.islice(train(found), 30):
        for ids, mask, record in zip(batch["input_ids"], batch["attention_mask"], batch["record_id"], strict=True):
            assert (ids.tolist(), mask.tolist()) == expected["train"][record]
    (batch,) = batches.eval_batches(found, split="validation", batch=9, rows=(0, 9))
    rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    assert list(rows) == expected["validation"]


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lanes": 7, "global_batch": 14, "rows": (0, 14)}, "lanes = 7.* 6 train shards"),
        ({"lanes": 5}, "lanes = 5"),
        ({"rows": (0, 6)}, "a lane has 4 of 12 rows, a host 6, .* a multiple or a divisor of 2,"),
        ({"rows": (2, 12)}, "a lane has 4 of 12 rows, a host 10,"),
    ],
)
def test_lanes_that_do_not_fit_are_refused(manifest, settings, message):
    with pytest.raises(InputError, match=message):
        train(manifest, **settings)


def test_an_empty_evaluation_split_is_refused(manifest):
    with pytest.raises(InputError, match="the test split is empty"):
        next(batches.eval_batches(manifest, split="test", batch=4, rows=(0, 4)))


FAULTS = ("cut between records", "cut inside a record", "bit flipped", "missing", "empty")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_shard_damaged_after_the_start_is_named(copied, fault):
    """`verify` looks at every shard when a run starts; this is what reading them finds."""
    path = damage(copied, fault)
    with pytest.raises(DamageError) as error:
        in_epochs(train(copied), 500)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.standard
@pytest.mark.parametrize("token", [600, slow(2**31 + 7), 2**32 + 7, slow(2**64 - 1)])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_token_id_that_the_vocabulary_lacks_is_named(copied, token, split):
    """Too large, too large for 32 bits, and -1."""
    path = shard_path(copied, split=split)
    ids = all_rows(copied, split)
    start = copied.splits[split].shards[0].records
    ids = ids[start : start + copied.splits[split].shards[1].records].astype(np.uint64)
    ids[3, 5] = token
    path.write_bytes(b"".join(_encode(row) for row in ids))
    with pytest.raises(DamageError) as error:
        if split == "train":
            in_epochs(train(copied), 500)
        else:
            list(batches.eval_batches(copied, split=split, batch=16, rows=(0, 16)))
    assert f"{path}: record 4 " in str(error.value)
    assert str(token if token < 2**63 else -1) in str(error.value)


def _encode(row: np.ndarray) -> bytes:
    import tensorflow as tf

    values = {"input_ids": row.astype(np.int64), "attention_mask": np.ones(len(row), np.int64)}
    features = {key: tf.train.Feature(int64_list=tf.train.Int64List(value=value)) for key, value in values.items()}
    record = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    return tfrecord._framed(record)


def test_rows_of_another_length_are_named(copied, texts, tokenizer_folder, tmp_path):
    others = write_shards(texts[:400], tmp_path / "others", tokenizer_folder, length=16)
    shutil.copy(pathlib.Path(others.folder, others.splits["train"].shards[1].file), shard_path(copied))
    with pytest.raises(DamageError, match="record 1 has no input_ids of 32 tokens"):
        in_epochs(train(copied), 500)
