"""Duplicates by ranges of the hash: the first in source, part and place stays, whatever the ranges are."""

import pathlib
import random

import numpy as np
import pytest

from mlm.data import deduplicate
from tests.support.corpora import corpus_of, write_jsonl, write_shards


@pytest.mark.parametrize("documents", [1024, 16])
def test_the_first_stays(small, tokenizer_folder, tmp_path, monkeypatch, documents):
    """Of texts of which most are in other parts, too: in one task, and in a task for a few documents."""
    monkeypatch.setattr(deduplicate, "DOCUMENTS", documents)
    draw = random.Random(0)
    texts = [
        [f"text {draw.randint(0, 90)}" for _ in range(size)] for size in (20, 1, 40, 20, 40, 40, 20)
    ]
    texts[3] = texts[3][:1] * 5
    sources = []
    first = {}
    for part, part_texts in enumerate(texts):
        sources.append(write_jsonl(tmp_path / f"{9 - part}.jsonl", part_texts))
        for place, text in enumerate(part_texts):
            first.setdefault(text, (part, place))
    corpus = corpus_of(tuple(sources))
    made = write_shards(corpus, tmp_path / "shards", tokenizer_folder, length=4)
    tables = [np.load(file) for file in pathlib.Path(made.folder, "documents").glob("*.npy")]
    kept = [tuple(row) for table in tables for row in table[["part", "place"]].tolist()]
    assert sorted(kept) == sorted(first.values())
    duplicates = sum(split.duplicates for split in made.splits.values())
    assert duplicates == sum(map(len, texts)) - len(first) > 50
