"""Documents of a corpus: their splits, duplicates, weights and order."""

import itertools
import json
import pathlib
from collections import Counter

import numpy as np
import pytest

from mlm.data import corpus
from tests.fixtures_data import documents, numbered


def write_jsonl(path: pathlib.Path, texts: list[str], field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts))
    return f"jsonl:{path}"


def split_of(stream) -> dict[str, str]:
    found = {}
    for document in stream:
        assert found.setdefault(document.text, document.split) == document.split
    return found


def test_validation_never_changes_as_the_corpus_grows(tmp_path):
    small = split_of(documents((write_jsonl(tmp_path / "a.jsonl", numbered(500)),)))
    large = split_of(documents((write_jsonl(tmp_path / "a.jsonl", numbered(5000)[::-1]),)))
    more = split_of(documents((write_jsonl(tmp_path / "a.jsonl", numbered(500)),), validation_fraction=0.2))
    assert small.items() <= large.items()
    assert {text for text in small if small[text] == "validation"} <= {t for t in more if more[t] == "validation"}
    assert corpus.text_hash(numbered(1)[0]) == 12415440598143898091, (
        "another hash would move the validation split of every corpus"
    )
    share = np.mean([split == "validation" for split in large.values()])
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / 5000) ** 0.5


def test_duplicates_are_dropped_and_counted_across_sources(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", numbered(6000) + numbered(50))
    b = write_jsonl(tmp_path / "b.jsonl", numbered(40, 5990))
    counts = Counter()
    found = split_of(documents((a, b), counts=counts))
    assert set(found) == set(numbered(6030))
    splits = Counter(found.values())
    assert counts["train documents"] == splits["train"]
    assert counts["validation documents"] == splits["validation"]
    repeated = numbered(50) + numbered(10, 5990)
    assert counts["train duplicates"] == sum(found[text] == "train" for text in repeated)
    assert counts["validation duplicates"] == sum(found[text] == "validation" for text in repeated)


def test_seen_is_a_set_in_eight_bytes_a_hash():
    rng = np.random.default_rng(0)
    seen, known = corpus.Seen(), set()
    for _ in range(60):
        hashes = rng.integers(0, 2000, rng.integers(1, 100)).astype(np.uint64)
        new = []
        for number in hashes.tolist():
            new.append(number not in known)
            known.add(number)
        np.testing.assert_array_equal(seen.add(hashes), new)
    assert sum(level.nbytes for level in seen._levels) == 8 * len(known)
    assert len(seen._levels) <= 12, "levels grow with the logarithm of the size"


def test_weights_are_copies_and_validation_comes_once(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", numbered(2000))
    b = write_jsonl(tmp_path / "b.jsonl", numbered(2000, 2000))
    counts = Counter()
    found = Counter(documents((a, b), weights=(2.25, 0.5), counts=counts))
    once = split_of(documents((a, b)))
    for text, split in once.items():
        copies = found[corpus.Document(text, split)]
        if split == "validation":
            assert copies == 1
        else:
            assert copies in ((2, 3) if text in numbered(2000) else (0, 1))
    train_a = [found[corpus.Document(text, "train")] for text in numbered(2000) if once[text] == "train"]
    train_b = [found[corpus.Document(text, "train")] for text in numbered(2000, 2000) if once[text] == "train"]
    assert abs(np.mean(train_a) - 2.25) < 4 * (0.25 * 0.75 / len(train_a)) ** 0.5
    assert abs(np.mean(train_b) - 0.5) < 4 * (0.5 * 0.5 / len(train_b)) ** 0.5
    assert counts["train documents"] == sum(train_a) + sum(train_b)


@pytest.mark.parametrize("spread", [0, 2000, 10**9])
def test_copies_lie_apart(tmp_path, monkeypatch, spread):
    """In one row, each copy would give away what is masked in the other."""
    monkeypatch.setattr(corpus, "SPREAD", spread)
    a = write_jsonl(tmp_path / "a.jsonl", numbered(500))
    found = [document.text for document in documents((a,), weights=(3.0,), validation_fraction=0.0)]
    assert Counter(found) == dict.fromkeys(numbered(500), 3)
    last, gaps = {}, []
    for place, text in enumerate(found):
        gaps += [place - last[text]] if text in last else []
        last[text] = place
    # the texts have about 40 characters; the last ones have less text after them than they should
    assert np.median(gaps) >= min(spread / 45, 500)


def test_max_documents_is_of_each_source_and_split(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", numbered(20))
    b = write_jsonl(tmp_path / "b.jsonl", numbered(20, 20))
    assert set(split_of(documents((a, b), max_documents=7))) == set(numbered(7) + numbered(7, 20))


def test_documents_are_streamed(monkeypatch):
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield f"text {number}"

    monkeypatch.setitem(corpus.READERS, "text", lambda *args, **kwargs: [("", endless())])
    stream = documents(("text:endless",))
    assert len(list(itertools.islice(stream, 10))) == 10
    assert len(read) <= 2 * corpus.CHUNK
