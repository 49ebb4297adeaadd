"""A mixture of folders: exact shares, one order for any hosts, ids that are unique, and one manifest of it all."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest

from mlm.data.manifest import Manifest, join_folders, load_manifest
from mlm.data.order import batch_rows, make_lanes
from mlm.data.write_shard import find_documents
from tests.data.rows import all_rows, hosts_batches

LANES = 8
BATCH = 32
SHARES = (0.75, 0.25)


@pytest.fixture(scope="module")
def mixed(manifest, web) -> Manifest:
    return join_folders(list(zip(SHARES, (manifest, web), strict=True)))


def order_of(manifest: Manifest, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    lanes = make_lanes(manifest, "train", seed=0, lanes=LANES)
    return batch_rows(lanes, rows_before=start * BATCH, rows=BATCH, count=count)


@pytest.mark.parametrize("counts", [(6, 2), (3, 5), (5, 2, 1)])
def test_lanes_of_a_folder_are_spread_over_the_hosts(manifest, counts):
    """Of every half and quarter of the lanes, each folder has its part, to one lane."""
    folders = [dataclasses.replace(manifest, folder=f"gs://b/{n}") for n in range(len(counts))]
    shares = [count / 8 for count in counts]
    mixed = join_folders(list(zip(shares, folders, strict=True)))
    lanes = make_lanes(mixed, "train", seed=3, lanes=8)
    shards = len(manifest.splits["train"].shards)
    found = [lane.folder[0] // shards for lane in lanes]
    for size in (8, 4, 2):
        for start in range(0, 8, size):
            for folder, share in enumerate(shares):
                count = found[start : start + size].count(folder)
                assert abs(count - share * size) <= (size < 8)
    owned = np.concatenate([lane.shards for lane in lanes])
    assert sorted(owned.tolist()) == list(range(shards * len(counts))), "each belongs to one lane"


def test_the_order_holds_the_shares_and_each_folder_s_epochs(mixed, manifest, web):
    """In every batch exactly, on each of two hosts as well; ids count through the folders."""
    first = manifest.splits["train"].records
    steps = 3 * web.splits["train"].records // (BATCH // 4)
    ids, epochs = order_of(mixed, 0, steps)
    for host in range(2):
        assert ((ids[:, 16 * host : 16 * host + 16] < first).sum(axis=1) == 12).all()
    for start, folder in ((0, manifest), (first, web)):
        size = folder.splits["train"].records
        held = (ids >= start) & (ids < start + size)
        for epoch in range(int(held.sum() // size) - 1):
            assert sorted(ids[held & (epochs == epoch)].tolist()) == list(
                range(start, start + size)
            )


def test_batches_are_those_of_the_order(mixed, manifest, web, tokenizer_folder, tmp_path):
    """Of four hosts; with a folder of the TF-TPU example, which has no manifest, masks are read."""
    folder = pathlib.Path(shutil.copytree(web.folder, tmp_path / "web"))
    (folder / "manifest.json").unlink()
    foreign = load_manifest(str(folder), tokenizer_folder=tokenizer_folder)
    half = join_folders([(0.75, manifest), (0.25, foreign)])
    assert not half.full_rows and half.splits["train"].unigram_entropy is None, (
        "its attention_mask is read"
    )
    rows = np.concatenate([all_rows(manifest, "train"), all_rows(web, "train")])
    assert len(rows) == mixed.splits["train"].records
    ids, epochs = order_of(mixed, 89, 4)
    found = hosts_batches(half, hosts=4, batch=BATCH, lanes=LANES, start=89, count=4)
    np.testing.assert_array_equal(found["record_id"], ids.ravel())
    np.testing.assert_array_equal(found["epoch"], epochs.ravel())
    np.testing.assert_array_equal(found["input_ids"], rows[ids.ravel()])
    assert found["attention_mask"].all()


def test_the_document_of_a_record(mixed, manifest, web):
    first = manifest.splits["train"].records
    assert find_documents(mixed, "train", 0) == find_documents(manifest, "train", 0)
    assert find_documents(mixed, "train", first) == find_documents(web, "train", 0)


def test_the_fingerprint_covers_folders_shares_and_order(mixed, manifest, web, tmp_path):
    """And not where they are."""
    moved = load_manifest(str(shutil.copytree(web.folder, tmp_path / "moved")))
    assert join_folders([(0.75, manifest), (0.25, moved)]).fingerprint == mixed.fingerprint
    changed = [
        [(0.25, web), (0.75, manifest)],
        [(0.5, manifest), (0.5, web)],
        [(0.75, manifest), (0.25, dataclasses.replace(web, length=64))],
    ]
    found = {join_folders(folders).fingerprint for folders in changed}
    assert len(found | {mixed.fingerprint, manifest.fingerprint, web.fingerprint}) == 6
