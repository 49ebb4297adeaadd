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
    first = {}
    texts = [
        [f"text {draw.randint(0, 90)}" for _ in range(draw.choice([1, 20, 40]))] for _ in range(7)
    ]
    texts[3] = texts[3][:1] * 5
    sources = tuple(write_jsonl(tmp_path / f"{6 - part}.jsonl", texts[part]) for part in range(7))
    for part in range(7):
        for place, text in enumerate(texts[part]):
            first.setdefault(text, (part, place))
    made = write_shards(corpus_of(sources), tmp_path / "shards", tokenizer_folder, length=4)
    tables = [np.load(file) for file in pathlib.Path(made.folder, "documents").glob("*.npy")]
    kept = sorted(tuple(row) for table in tables for row in table[["part", "place"]].tolist())
    assert kept == sorted(first.values())
    assert (
        sum(split.duplicates for split in made.splits.values())
        == sum(map(len, texts)) - len(first)
        > 50
    )
