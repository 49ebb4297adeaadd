"""Near duplicates against exact similarities, on docstrings and copies of them with changed words."""

import random

import numpy as np
import pytest

from mlm.data import near_duplicates
from mlm.data.keep_out import stretches

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


@pytest.fixture(scope="module")
def entries(documents: list[str]) -> np.ndarray:
    """Of documents in PARTS parts."""
    size = len(documents) // PARTS
    parts = [near_duplicates.entries(documents[n * size : (n + 1) * size], part=n) for n in range(PARTS)]
    return np.concatenate(parts)


def numbers(pairs: np.ndarray, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    size = len(documents) // PARTS
    return pairs["part"] * size + pairs["row"], pairs["first_part"] * size + pairs["first_row"]


def test_estimates_are_near_the_exact_similarity(documents, entries):
    pairs = near_duplicates.join(entries)
    later, earlier = numbers(pairs, documents)
    assert (earlier < later).all()
    estimates = dict(
        zip(zip(earlier.tolist(), later.tolist(), strict=True), near_duplicates.similarity(pairs), strict=True)
    )
    half = len(documents) // 2
    exact = np.array([jaccard(documents[n], documents[half + n]) for n in range(half)])
    found = np.array([estimates.get((n, half + n), 0.0) for n in range(half)])
    close = exact > 0.7
    assert close.sum() > 200 and (exact < 0.7).sum() > 50
    assert np.sqrt(np.mean((found - exact)[close] ** 2)) < 0.05
    assert abs(np.mean((found - exact)[close])) < 0.01
    assert (found[exact > 0.87] > 0.8).mean() > 0.99 and (found[exact == 1] == 1).all()
    assert (found[exact < 0.7] > 0.8).mean() < 0.01
    for (one, other), estimate in estimates.items():
        assert estimate < 0.85 or jaccard(documents[one], documents[other]) > 0.7


@pytest.mark.parametrize("ranges", [1, 2, 7, 64])
def test_pairs_do_not_depend_on_the_number_of_ranges(entries, ranges):
    shuffled = np.random.default_rng(ranges).permutation(entries)
    of = shuffled["hash"] >> np.uint64(58)
    joined = [near_duplicates.join(shuffled[of * ranges // 64 == number]) for number in range(ranges)]
    np.testing.assert_array_equal(near_duplicates.total(np.concatenate(joined)), near_duplicates.join(entries))


def test_a_document_has_the_same_bands_beside_others(documents, entries):
    assert near_duplicates.entries(documents[3:4], row=3).tolist() == entries[entries["row"] == 3][:42].tolist()


def test_bands_are_the_same_everywhere():
    bands = near_duplicates.entries(["The quick brown fox jumps over the lazy dog."])
    assert bands["hash"][[0, 41]].tolist() == [13152095765766640498, 2548052083744060072], (
        "rensa may change this; the keys of tasks name its version"
    )


def test_documents_of_few_words_are_like_no_other():
    assert not len(near_duplicates.entries([])) and not len(near_duplicates.join(near_duplicates.entries([])))
    bands = near_duplicates.entries(["", "four words of text", "five words are a stretch", "four words of text"])
    assert np.unique(bands["row"]).tolist() == [2] and not len(near_duplicates.join(bands))


def test_of_many_that_are_the_same_the_first_stays():
    pairs = near_duplicates.join(near_duplicates.entries(["just the same words again"] * 1000))
    assert near_duplicates.similarity(pairs).min() == 1.0
    assert np.unique(pairs["row"]).tolist() == list(range(1, 1000))
    assert len(pairs) < 1000 * near_duplicates.EARLIEST
