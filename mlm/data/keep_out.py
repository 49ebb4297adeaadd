"""Stretches of words that texts share, and documents to keep out because they hold one of a benchmark's.

Words are those of GPT-3's study of contamination (Brown et al., 2020, appendix C): in lower case (case-folded), without
punctuation (Unicode's categories P and S), split at white space. Stretches are known by 64 bits.

Dimensions: N texts, W words, S stretches.
"""

import functools
import itertools
import sys
import unicodedata
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

STRETCH = 13  # words
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: nothing is lost by multiplying


def of_texts(texts: Sequence[str]) -> np.ndarray:
    """Returns the hashes of all stretches, sorted, once each: uint64 [S]."""
    return np.unique(stretches(texts, STRETCH)[0])


def holds(texts: Sequence[str], hashes_S: np.ndarray) -> np.ndarray:
    """Returns which texts have one of the sorted hashes: bool [N]."""
    found_N = np.zeros(len(texts), bool)
    if len(hashes_S):
        own, numbers = stretches(texts, STRETCH)
        index = np.minimum(np.searchsorted(hashes_S, own), len(hashes_S) - 1)
        found_N[numbers[hashes_S[index] == own]] = True
    return found_N


def stretches(texts: Sequence[str], words: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of all stretches of so many words, and the number of the text of each, in order."""
    split = [text.casefold().translate(_table()).encode().split() for text in texts]
    sizes = [len(own) for own in split]
    hashes_W = np.fromiter(map(xxh3_64_intdigest, itertools.chain.from_iterable(split)), np.uint64, sum(sizes))
    numbers_W = np.repeat(np.arange(len(texts)), sizes)
    hashes_S = np.zeros(max(0, len(hashes_W) - words + 1), np.uint64)
    for place in range(words):
        hashes_S = hashes_S * FACTOR + hashes_W[place : place + len(hashes_S)]
    numbers_S = numbers_W[: len(hashes_S)]
    whole = numbers_S == numbers_W[words - 1 :]
    return hashes_S[whole], numbers_S[whole]


@functools.cache
def _table() -> dict[int, str | None]:
    """Returns what becomes of the characters that are no part of words."""
    characters = [chr(code) for code in range(sys.maxunicode + 1)]
    spaces = {ord(character): " " for character in characters if character.isspace()}
    return spaces | {ord(character): None for character in characters if unicodedata.category(character)[0] in "PS"}
