"""The data baseline does what it stands for: its shards are ones that we read, and hold the same tokens."""

import concurrent.futures
import multiprocessing
from collections import Counter

import numpy as np
import pytest

from mlm.bench import tf_tpu_example
from mlm.data import manifest
from tests.support.corpora import COUNTS, LENGTH, shard_rows, write_shards


def documents_in(rows_NxL: np.ndarray) -> Counter:
    """The tokens from <s> to </s>, and how often each of them comes."""
    ids = rows_NxL.ravel()
    pieces = np.split(ids, np.flatnonzero(ids == 0)[1:])
    return Counter(tuple(piece.tolist()) for piece in pieces if piece[-1] == 2)


@pytest.mark.slow
def test_same_documents(texts, tokenizer_folder, tmp_path):
    """But for those where a shard of ours ends, or what a process of the example handled: less than a row is lost."""
    plain = [text for text in texts[:2400] if "<mask>" not in text and "<s>" not in text]
    train = [text for n, text in enumerate(plain) if n % 10]
    source = str(tmp_path / "documents")
    target = str(tmp_path / "shards")
    settings = {"tokenizer_folder": tokenizer_folder, "length": LENGTH}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        documents = {"train": train, "validation": plain[::10]}
        pool.submit(tf_tpu_example.prepare, documents, source).result()
        rows = pool.submit(tf_tpu_example.write_shards, source, target, **settings).result()
    found = manifest.load_manifest(target, tokenizer_folder=tokenizer_folder)
    manifest.verify(found)
    assert rows == sum(split.records for split in found.splits.values())
    written = write_shards(plain, tmp_path / "ours", tokenizer_folder)
    # of four processes, 1,000 documents at a time
    for split, parts in (("train", 7), ("validation", 3)):
        mine = sum((documents_in(rows) for rows in shard_rows(written, split)), Counter())
        theirs = documents_in(np.concatenate(shard_rows(found, split)))
        assert (theirs - mine).total() <= parts + COUNTS[split]
        lost = written.splits[split].documents - theirs.total()
        assert 0 <= lost <= parts * LENGTH
