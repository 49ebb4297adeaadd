"""The data baseline does what it stands for: its shards are ones that we read, and hold the same tokens."""

import concurrent.futures
import multiprocessing
from collections import Counter

import numpy as np
import pytest

from mlm.bench import tf_tpu_example
from mlm.data import batches, manifest
from tests.support.corpora import COUNTS, LENGTH, shard_rows, write_shards


def rows_of(found: manifest.Manifest, split: str) -> np.ndarray:
    """Every row of a split [N, L], in the order of the files."""
    records = found.splits[split].records
    (batch,) = batches.eval_batches(found, split=split, batch=records, rows=(0, records))
    assert batch["attention_mask"].all()
    return batch["input_ids"]


@pytest.fixture(scope="module")
def both(texts, tokenizer_folder, tmp_path_factory):
    """(ours, the example's) of the same documents."""
    root = tmp_path_factory.mktemp("example")
    plain = [text for text in texts[:2400] if "<mask>" not in text and "<s>" not in text]
    documents = {
        "train": [text for n, text in enumerate(plain) if n % 10],
        "validation": plain[::10],
    }
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(tf_tpu_example.prepare, documents, str(root / "documents")).result()
        task = pool.submit(
            tf_tpu_example.write_shards,
            str(root / "documents"),
            str(root / "shards"),
            tokenizer_folder=tokenizer_folder,
            length=LENGTH,
        )
        rows = task.result()
    found = manifest.load_manifest(str(root / "shards"), tokenizer_folder=tokenizer_folder)
    manifest.verify(found)
    assert rows == sum(split.records for split in found.splits.values())
    return write_shards(plain, root / "ours", tokenizer_folder), found


def documents_in(rows_NxL: np.ndarray) -> Counter:
    """The tokens from <s> to </s>, and how often each of them comes."""
    ids = rows_NxL.ravel()
    pieces = np.split(ids, np.flatnonzero(ids == 0)[1:])
    return Counter(tuple(piece.tolist()) for piece in pieces if piece[-1] == 2)


@pytest.mark.slow
def test_same_documents(both):
    """But for those where a shard of ours ends, or what a process of the example handled: less than a row is lost."""
    # of four processes, 1,000 documents at a time
    for split, parts in (("train", 7), ("validation", 3)):
        ours, example = (found.splits[split] for found in both)
        mine = sum((documents_in(rows) for rows in shard_rows(both[0], split)), Counter())
        theirs = documents_in(rows_of(both[1], split))
        assert (theirs - mine).total() <= parts + COUNTS[split]
        assert 0 <= ours.documents - theirs.total() <= parts * LENGTH
        assert 0.9 * ours.records < example.records <= ours.records + COUNTS[split]
    sizes = [shard.records for shard in both[1].splits["train"].shards]
    assert len(sizes) > 1 and set(sizes[:-1]) == {1000} and 0 < sizes[-1] <= 1000
