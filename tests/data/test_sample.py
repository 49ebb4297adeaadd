"""The tokenizer's sample: of all parts, of training documents alone, the same for any workers."""

import gzip
import json

import numpy as np
import pytest

from mlm.data import docstrings, sample, sources
from mlm.data.corpus import text_hash
from tests.support.corpora import (
    InProcess,
    corpus_of,
    numbered,
    read_documents,
    write_jsonl,
    write_shards,
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


def test_sizes_that_mislead(tmp_path, monkeypatch):
    """A compressed part has far more text than its size says; that of a streamed data set is not known."""
    monkeypatch.setattr(sources, "PART_BYTES", (20_000, 10**9))
    texts = numbered(5000)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    found = corpus_of((f"jsonl:{tmp_path}/a.jsonl.gz",))
    everything = sum(len(text.encode()) for text in texts)
    assert everything / 2 <= sum(len(text.encode()) for text in draw(found, everything / 2e6))
    train = {
        text for text in texts if found.split_of(found.parts()[0], "", text_hash(text)) == "train"
    }
    assert set(draw(found, 1000.0)) == train, "all that there is"
    (tmp_path / "z.jsonl").touch()
    assert all(part.bytes for part in corpus_of((f"jsonl:{tmp_path}/*",)).parts()), (
        "an empty file has no part"
    )
    parts = [part._replace(bytes=0) for part in found.parts()]
    monkeypatch.setattr(type(found), "parts", lambda _: parts)
    assert set(draw(found, 1000.0)) == train


def test_docstrings_are_read_once_for_tokenizer_and_shards(tokenizer_folder, tmp_path, monkeypatch):
    """Into the folder from which the shards take them; other text is read where it is needed."""
    some = [each for each in docstrings.parts() if 5000 < each.bytes < 60_000][:6]
    monkeypatch.setattr(docstrings, "parts", lambda: iter(some))
    read = []
    real = docstrings.read_docstrings
    monkeypatch.setattr(
        docstrings, "read_docstrings", lambda modules: read.append(modules) or real(modules)
    )
    folder = tmp_path / "shards"
    own = corpus_of(("docstrings",), group="document")
    texts = draw(own, 0.01, texts=f"{folder}.tmp/texts")
    assert sorted(read) == sorted(some) and len(texts) > 10
    made = write_shards(own, folder, tokenizer_folder, counts={"train": 2, "validation": 1})
    assert len(read) == len(some), "none is parsed again"
    everything = {text for each in some for _, text in real(each)}
    assert sum(split.documents for split in made.splits.values()) == len(everything)
