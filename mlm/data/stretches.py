"""Stretches of 13 words or tokens that two texts share, found by their hashes in one index.

That is the length of GPT-3's study of contamination (Brown et al., 2020, appendix C). Its words: in lower case
(case-folded), without punctuation (Unicode's categories P and S), split at white space.

Dimensions: N texts, U units (words or tokens), S stretches.
"""

import functools
import itertools
import sys
import unicodedata
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

STRETCH = 13  # units
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: nothing is lost by multiplying
BITS = 22  # of the table that rules out most hashes in one lookup


class StretchIndex:
    """The hashes of some stretches, to look others up in."""

    def __init__(self, hashes_S: np.ndarray):
        self.hashes = np.unique(hashes_S)
        self._table = np.zeros(1 << BITS, bool)
        self._table[self.hashes >> np.uint64(64 - BITS)] = True

    def find(self, hashes_S: np.ndarray) -> np.ndarray:
        """Returns the place of each hash in `hashes`, -1 where it is not there: int64 [S]."""
        places_S = np.full(len(hashes_S), -1)
        # Nearly all stretches of a corpus are in no benchmark: one lookup rules them out, the others are searched for.
        maybe = np.flatnonzero(self._table[hashes_S >> np.uint64(64 - BITS)])
        places = np.searchsorted(self.hashes, hashes_S[maybe])
        places = np.minimum(places, len(self.hashes) - 1)
        is_same = self.hashes[places] == hashes_S[maybe]
        places_S[maybe[is_same]] = places[is_same]
        return places_S

    def is_in_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Returns which texts have one of the stretches: bool [N]."""
        is_in_N = np.zeros(len(texts), bool)
        if len(self.hashes):
            hashes_S, text_S = stretches_of_texts(texts)
            is_in_N[text_S[self.find(hashes_S) >= 0]] = True
        return is_in_N


def stretches_of_texts(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of all stretches of words, and the number of the text of each, in order."""
    words_of_texts = [text.casefold().translate(_translation()).encode().split() for text in texts]
    counts = list(map(len, words_of_texts))
    words_U = itertools.chain.from_iterable(words_of_texts)
    hashes_U = np.fromiter(map(xxh3_64_intdigest, words_U), np.uint64, sum(counts))
    text_U = np.repeat(np.arange(len(texts)), counts)
    hashes_S, first_S = hash_stretches(hashes_U, text_U)
    return hashes_S, text_U[first_S]


def hash_stretches(hashes_U: np.ndarray, text_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of all stretches of units of the same text, and where each begins."""
    hashes_S = np.zeros(max(0, len(hashes_U) - STRETCH + 1), np.uint64)
    for place in range(STRETCH):
        hashes_S *= FACTOR
        hashes_S += hashes_U[place : place + len(hashes_S)]
    first_S = np.flatnonzero(text_U[: len(hashes_S)] == text_U[STRETCH - 1 :])
    return hashes_S[first_S], first_S


@functools.cache
def _translation() -> dict[int, str | None]:
    """Returns what becomes of the characters that are no part of words."""
    characters = [chr(code) for code in range(sys.maxunicode + 1)]
    spaces = {ord(character): " " for character in characters if character.isspace()}
    return spaces | {
        ord(character): None
        for character in characters
        if unicodedata.category(character)[0] in "PS"
    }
