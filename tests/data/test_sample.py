"""The tokenizer's sample: of all parts, of training documents alone, the same for any workers."""

import numpy as np
import pytest

from mlm.data import sample, sources
from mlm.data.corpus import text_hash
from tests.support.corpora import (
    InProcess,
    corpus_of,
    numbered,
    read_documents,
    write_jsonl,
)


def draw(corpus, megabytes: float, engine=None, texts: str = "") -> list[str]:
    return sample.draw(corpus, megabytes=megabytes, engine=engine or InProcess(), texts=texts)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """1.2 MB of short texts in 40 parts of two sources."""
    monkeypatch.setattr(sources, "PART_BYTES", (30_000, 10**9))
    a = write_jsonl(tmp_path / "a.jsonl", numbered(14_000))
    return corpus_of((a, write_jsonl(tmp_path / "b.jsonl", numbered(6000, 14_000))))


def test_it_is_of_training_documents_of_all_parts(corpus):
    found = draw(corpus, 0.1)
    per_part = {}
    for part, (text, _) in read_documents(corpus):
        per_part.setdefault(part, set()).add(text)
    size = sum(len(text.encode()) for text in found)
    assert 100_000 <= size < 100_100 and len(set(found)) == len(found)
    parts = corpus.parts()
    assert {corpus.split_of(parts[0], "", text_hash(text)) for text in found} == {"train"}
    shares = [len(own.intersection(found)) / len(own) for own in per_part.values()]
    assert len(shares) > 30 and min(shares) > 0 and max(shares[:-1]) < 4 * np.mean(shares)
    order = [int(text.rpartition(" ")[2][:-1]) for text in found]
    assert abs(np.corrcoef(order, range(len(order)))[0, 1]) < 0.1, (
        "mixed: a tokenizer reads the beginning"
    )
