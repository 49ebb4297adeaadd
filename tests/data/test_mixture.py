"""A mixture of folders: exact shares, one order for any hosts, ids that are unique, and one manifest of it all."""

import dataclasses
import itertools
import math
import pathlib
import shutil

import numpy as np
import pytest

from mlm.data import batches, mixture
from mlm.data.manifest import Manifest, load_manifest
from mlm.data.order import Lane, batch_rows
from mlm.data.write_shard import find_documents, find_parts
from mlm.errors import InputError
from mlm.paths import canonical, distinct_parts
from mlm.tasks.pretraining import dataset_info
from tests.data.rows import all_rows, assert_same
from tests.support.corpora import in_epochs, manifest_of
from tests.support.tiny import slow

LANES, BATCH = 8, 32
SHARES = (0.75, 0.25)


@pytest.fixture(scope="module")
def mixed(manifest, web) -> Manifest:
    return mixture.join(list(zip(SHARES, (manifest, web), strict=True)))


def train(manifest: Manifest, *, rows: tuple[int, int] = (0, BATCH), start: int = 0, lanes: int = LANES):
    order = {"split": "train", "seed": 0, "global_batch": BATCH, "lanes": lanes}
    return batches.train_batches(manifest, start_row=start * BATCH, rows=rows, **order)


# Order ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(6, 2), (1, 7), (4, 4), (5, 2, 1)])
def test_lanes_of_a_folder_are_spread_over_the_hosts(counts):
    """Of every half and quarter of the lanes, each folder has its part, to one lane."""
    folders = [manifest_of(32, train={"records": (10,) * 9}, validation={}) for _ in counts]
    folders = [dataclasses.replace(each, folder=f"gs://b/{n}") for n, each in enumerate(folders)]
    mixed = mixture.join([(count / 8, folder) for count, folder in zip(counts, folders, strict=True)])
    lanes = mixture.lanes(mixed, "train", seed=3, lanes=8)
    folders = [lane.folder[0] // 9 for lane in lanes]
    assert [folders.count(folder) for folder in range(len(counts))] == list(counts)
    for size in (4, 2):
        for start in range(0, 8, size):
            for folder, count in enumerate(counts):
                assert abs(folders[start : start + size].count(folder) - count * size / 8) <= 1
    owned = np.concatenate([lane.shards for lane in lanes])
    assert sorted(owned.tolist()) == list(range(9 * len(counts))), "each shard belongs to one lane"


def test_lanes_of_one_folder_are_those_without_a_mixture(manifest):
    records = tuple(shard.records for shard in manifest.splits["train"].shards)
    expected = [Lane(1, records, lane, 4, (0, 6)) for lane in range(4)]
    assert mixture.lanes(manifest, "train", seed=1, lanes=4) == expected
    assert list(itertools.islice(expected[1].read(3), 60)) == list(itertools.islice(Lane(1, records, 1, 4).read(3), 60))


def test_every_batch_holds_the_shares_exactly(mixed, manifest):
    first = manifest.splits["train"].records
    ids = in_epochs(train(mixed), 200)["record_id"].reshape(200, BATCH)
    assert ((ids < first).sum(1) == 24).all()
    for host in range(2):
        assert ((ids[:, 16 * host : 16 * host + 16] < first).sum(1) == 12).all(), "on each of two hosts as well"


@pytest.mark.standard
def test_ids_are_unique_and_those_of_their_rows_and_epochs_are_each_folders_own(mixed, manifest, web):
    rows = np.concatenate([all_rows(manifest, "train"), all_rows(web, "train")])
    assert len(rows) == mixed.splits["train"].records
    steps = 3 * web.splits["train"].records // (BATCH // 4)
    found = in_epochs(train(mixed), steps)
    np.testing.assert_array_equal(found["input_ids"], rows[found["record_id"]])
    first = manifest.splits["train"].records
    for shift, folder, share in ((0, manifest, 0.75), (first, web, 0.25)):
        size = folder.splits["train"].records
        own = (found["record_id"] >= shift) & (found["record_id"] < shift + size)
        assert own.sum() == steps * BATCH * share
        for epoch in range(int(own.sum() // size) - 1):
            ids = found["record_id"][own & (found["epoch"] == epoch)]
            assert sorted(ids.tolist()) == list(range(shift, shift + size)), f"epoch {epoch} of {folder.folder}"


@pytest.mark.standard
@pytest.mark.parametrize("hosts", [slow(1), slow(2), 4])
@pytest.mark.parametrize("start", [0, slow(7), 150])
def test_hosts_share_the_same_batches_from_any_step(mixed, hosts, start):
    walked = in_epochs(itertools.islice(train(mixed), start, None), 10)
    share = BATCH // hosts
    parts = [in_epochs(train(mixed, start=start, rows=(host * share, (host + 1) * share)), 10) for host in range(hosts)]
    shaped = [{key: part[key].reshape(10, share, *part[key].shape[1:]) for key in part} for part in parts]
    joined = {key: np.concatenate([part[key] for part in shaped], 1) for key in walked}
    assert_same({key: joined[key].reshape(walked[key].shape) for key in joined}, walked)


def test_rows_of_a_spike_are_those_of_its_batches(mixed):
    lanes = mixture.lanes(mixed, "train", seed=0, lanes=LANES)
    ids, epochs = batch_rows(lanes, rows_before=89 * BATCH, rows=BATCH, count=4)
    found = in_epochs(train(mixed, start=89), 4)
    np.testing.assert_array_equal(ids.ravel(), found["record_id"])
    np.testing.assert_array_equal(epochs.ravel(), found["epoch"])


def test_the_document_of_a_record(mixed, manifest, web):
    first = manifest.splits["train"].records
    for record in (0, first - 1):
        assert find_documents(mixed, "train", record) == find_documents(manifest, "train", record)
    for record in (0, web.splits["train"].records - 1):
        assert find_documents(mixed, "train", first + record) == find_documents(web, "train", record)
    names, part_of = find_parts(mixed, "train")
    for record in range(0, mixed.splits["train"].records, 100):
        assert names[part_of[record]] in [each[:2] for each in find_documents(mixed, "train", record)]
    with pytest.raises(InputError, match="has the records 0 to"):
        find_documents(mixed, "train", mixed.splits["train"].records)


def test_a_mixture_of_one_is_its_folder(manifest):
    one = mixture.join([(1.0, manifest)], {"own": manifest})
    assert one.parts and one.fingerprint == manifest.fingerprint
    for count in ("shards", "unigram_entropy"):
        assert getattr(one.splits["train"], count) == getattr(manifest.splits["train"], count)
    assert dataset_info(one) == dataset_info(manifest)
    assert_same(in_epochs(train(one, lanes=4), 5), in_epochs(train(manifest, lanes=4), 5))
    assert mixture.join([(1.0, manifest)]) is manifest


@pytest.mark.slow
def test_folders_of_the_tf_tpu_example_are_mixed(mixed, tokenizer_folder, tmp_path):
    """Without a manifest; attention_mask is read then, in all of them."""
    found = []
    for share, part in zip(SHARES, mixture.parts(mixed), strict=True):
        folder = pathlib.Path(shutil.copytree(part.manifest.folder, tmp_path / part.name))
        (folder / "manifest.json").unlink()
        found.append((share, load_manifest(str(folder), tokenizer_folder=tokenizer_folder)))
    foreign = mixture.join(found)
    assert not foreign.full_rows
    assert foreign.splits["train"].unigram_entropy is None
    assert_same(in_epochs(train(foreign, start=3), 3), in_epochs(train(mixed, start=3), 3))
    half = mixture.join([found[0], (0.25, mixed.parts[1].manifest)])
    assert_same(in_epochs(train(half, start=3), 3), in_epochs(train(mixed, start=3), 3))


def test_fewer_shards_than_lanes(mixed):
    with pytest.raises(InputError, match=r"data\.lanes = 12: .*/shards has only 6 train shards for its 9 lanes"):
        train(mixed, lanes=12)


# One manifest ---------------------------------------------------------------------------------------------------------


def test_the_fingerprint_covers_folders_shares_and_order(mixed, manifest, web, tmp_path):
    same = load_manifest(str(shutil.copytree(web.folder, tmp_path / "moved")))
    assert mixture.join([(0.75, manifest), (0.25, same)]).fingerprint == mixed.fingerprint, "a moved folder is the same"
    other = dataclasses.replace(web, length=64)
    changed = [
        [(0.25, web), (0.75, manifest)],
        [(0.5, manifest), (0.5, web)],
        [(0.75, web), (0.25, manifest)],
        [(0.75, manifest), (0.25, other)],
    ]
    found = [mixture.join(each).fingerprint for each in changed]
    assert len({mixed.fingerprint, manifest.fingerprint, web.fingerprint, *found}) == 7


def test_records_are_summed_and_entropies_averaged(mixed, manifest, web):
    for split in ("train", "validation"):
        both = [each.splits[split] for each in (manifest, web)]
        found = mixed.splits[split]
        assert found.records == sum(each.records for each in both)
        own = [each.unigram_entropy for each in both]
        assert found.unigram_entropy == pytest.approx(0.75 * own[0] + 0.25 * own[1])
    info = dataset_info(mixed)
    assert info.records == mixed.splits["train"].records
    assert [each["share"] for each in info.mixture] == [0.75, 0.25]
    assert [each["fingerprint"] for each in info.mixture] == [manifest.fingerprint, web.fingerprint]
    assert dataset_info(manifest).mixture == ()


@pytest.mark.parametrize("shares", [(0.75, 0.25), (0.5, 0.5)])
def test_tokens_are_counted_by_share(manifest, web, shares):
    """A folder has its share of the sample, not of the rows; the smallest for its share decides how large that is."""
    counts = batches.count_tokens(mixture.join(list(zip(shares, (manifest, web), strict=True))), split="train")
    rows = [all_rows(each, "train") for each in (manifest, web)]
    most = min(len(own) / share for own, share in zip(rows, shares, strict=True))
    assert most < 10_000
    sample = np.concatenate([own[: math.ceil(most * share)] for own, share in zip(rows, shares, strict=True)])
    expected = np.bincount(sample.ravel(), minlength=manifest.vocab_size)
    expected[list(manifest.all_special_ids)] = 0
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["gs://b/wiki/shards", "gs://b/web/shards"], ["wiki", "web"]),
        (["/a/one", "/b/two"], ["one", "two"]),
        (["gs://x/s", "gs://y/s"], ["x", "y"]),
        (["/a/my wiki/s", "b/s"], ["my-wiki", "b"]),
        (["a/x/s", "a/y/s", "b/x/s"], ["a-x-s", "a-y-s", "b-x-s"]),
    ],
)
def test_names_of_folders(folders, names):
    assert distinct_parts(folders) == names


def test_one_spelling_of_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert {canonical(path) for path in ("a", "./a/", "b/../a", str(tmp_path / "a"), "link")} == {str(tmp_path / "a")}
    spellings = ("gs://b/a", "gs://b//a/", "gs://b/c/../a", "gcs://b/a")
    assert {canonical(path) for path in spellings} == {"gs://b/a"}
