"""Near duplicates against exact similarities, on docstrings and copies of them with changed words."""

import pathlib
import random
import re

import numpy as np
import pytest

from mlm.data import deduplicate, near_duplicates
from mlm.data.keep_out import stretches
from tests.support.corpora import corpus_of, write_shards

PARTS = 5


def jaccard(one: str, other: str) -> float:
    a, b = (set(stretches([text], near_duplicates.WORDS)[0].tolist()) for text in (one, other))
    return len(a & b) / len(a | b)


def changed(text: str, rng: random.Random) -> str:
    """The text with up to one word in 20 replaced."""
    own = text.split()
    for _ in range(rng.randint(0, max(1, len(own) // 20))):
        own[rng.randrange(len(own))] = f"word{rng.randrange(1000)}"
    return " ".join(own)


@pytest.fixture(scope="module")
def documents(texts: list[str]) -> list[str]:
    """Different docstrings, and as many copies of them in the same order."""
    rng = random.Random(0)
    long = [text for text in texts if 40 < len(text.split()) < 400]
    long = long[: len(long) // PARTS * PARTS]
    return long + [changed(text, rng) for text in long]


def bands(texts: list[str]) -> np.ndarray:
    return near_duplicates.bands(texts, np.arange(len(texts)), np.arange(len(texts)) + 5)


@pytest.fixture(scope="module")
def found(documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The bands of the documents in PARTS parts, and their parts."""
    size = len(documents) // PARTS
    made = [bands(documents[n * size : (n + 1) * size]) for n in range(PARTS)]
    return np.concatenate(made), np.repeat(np.arange(PARTS, dtype=np.uint32), [len(part) for part in made])


def test_estimates_are_near_the_exact_similarity(documents, found):
    pairs, size, half = near_duplicates.join(*found), len(documents) // PARTS, len(documents) // 2
    later = pairs["part"] * size + pairs["place"]
    earlier = pairs["first_part"] * size + pairs["first_place"]
    assert (earlier < later).all() and (pairs["row"] == pairs["place"] + 5).all()
    values = near_duplicates.similarity(pairs).tolist()
    estimates = dict(zip(zip(earlier.tolist(), later.tolist(), strict=True), values, strict=True))
    exact = np.array([jaccard(documents[n], documents[half + n]) for n in range(half)])
    estimated = np.array([estimates.get((n, half + n), 0.0) for n in range(half)])
    close = exact > 0.7
    assert close.sum() > 200 and (exact < 0.7).sum() > 50
    assert np.sqrt(np.mean((estimated - exact)[close] ** 2)) < 0.05
    assert abs(np.mean((estimated - exact)[close])) < 0.01
    assert (estimated[exact > 0.87] > 0.8).mean() > 0.99 and (estimated[exact == 1] == 1).all()
    assert (estimated[exact < 0.7] > 0.8).mean() < 0.01
    for (one, other), estimate in estimates.items():
        assert estimate < 0.85 or jaccard(documents[one], documents[other]) > 0.7


def test_bands_are_the_same_everywhere(documents):
    alone = bands(["The quick brown fox jumps over the lazy dog."])
    expected = [13152095765766640498, 2548052083744060072]
    assert alone["hash"][[0, 41]].tolist() == expected, "a new rensa may change them, but never in half of a corpus"
    among = bands([documents[0], "The quick brown fox jumps over the lazy dog."])
    assert among["hash"][42:].tolist() == alone["hash"].tolist()


def test_documents_of_few_words_are_like_no_other():
    assert not len(bands([])) and not len(near_duplicates.join(bands([]), np.zeros(0, np.uint32)))
    made = bands(["", "four words of text", "five words are a stretch", "four words of text"])
    assert np.unique(made["place"]).tolist() == [2]
    assert not len(near_duplicates.join(made, np.zeros(len(made), np.uint32)))


def test_of_many_that_are_the_same_the_first_stays():
    made = bands(["just the same words again"] * 1000)
    pairs = near_duplicates.join(made, np.zeros(len(made), np.uint32))
    assert near_duplicates.similarity(pairs).min() == 1.0
    assert len(pairs) < 1000 * near_duplicates.EARLIEST
    chosen = near_duplicates.most_similar(pairs, 0.8)
    assert chosen["place"].tolist() == list(range(1, 1000)) and not chosen["first_place"].any()
    assert not len(near_duplicates.most_similar(pairs, 1.0)), "above the threshold"


def test_shards_without_near_duplicates(documents, tokenizer_folder, tmp_path: pathlib.Path, monkeypatch):
    """The manifest counts and shows them, and the rows hold the other documents alone, for any number of tasks."""
    half = len(documents) // 2
    exact = np.array([jaccard(documents[n], documents[half + n]) for n in range(half)])
    lines = [" ".join(text.split()) for text in documents]
    for number in range(PARTS):
        part = lines[number * len(lines) // PARTS : (number + 1) * len(lines) // PARTS]
        (tmp_path / f"{number}.txt").write_text("".join(f"{line}\n" for line in part))
    corpus, manifests = corpus_of((f"text:{tmp_path}/*.txt",), near_duplicates=0.8), []
    for most in (10**6, 500):
        monkeypatch.setattr(deduplicate, "BANDS", most)
        monkeypatch.setattr(deduplicate, "DOCUMENTS", most)
        manifests.append(write_shards(corpus, tmp_path / str(most), tokenizer_folder))
    manifest, other = manifests
    assert manifest.splits == other.splits and manifest.left_out.items() <= other.left_out.items()
    dropped = sum(split.near_duplicates for split in manifest.splits.values())
    same = sum(split.duplicates for split in manifest.splits.values())
    assert abs(dropped + same - (exact > 0.8).sum()) < 0.1 * half
    assert (exact > 0.9).sum() < dropped + same < (exact > 0.7).sum() + 10
    kept = sum(split.documents for split in manifest.splits.values())
    assert kept + dropped + same == len(lines)
    assert 5 <= len(manifest.left_out) <= dropped
    name = re.compile(r"text:.*, .*, document (\d+)")
    for document, why in manifest.left_out.items():
        similarity, original = re.fullmatch(r"(0\.[89]\d|1\.00) similar to (.*)", why).groups()
        own, first = (lines[int(name.fullmatch(text)[1])] for text in (document, original))
        assert abs(jaccard(own, first) - float(similarity)) < 0.15
