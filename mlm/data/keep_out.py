"""Stretches of words that texts share, and documents to keep out because they hold one of a benchmark's.

Words are those of GPT-3's study of contamination (Brown et al., 2020, appendix C): in lower case (case-folded), without
punctuation (Unicode's categories P and S), split at white space.

Dimensions: N texts, W words, S stretches.
"""

import functools
import itertools
import sys
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from mlm.data import results
from mlm.data.corpus import Corpus
from mlm.errors import InputError
from mlm.paths import UPath, sizes

STRETCH = 13  # words
LISTED = 1000  # documents in the manifest
BATCH = 1000  # texts hashed at once
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: nothing is lost by multiplying


def write(corpus: Corpus, folder: str) -> str:
    """Writes {key}.stretches, the hashes of all stretches of the texts to keep out, and returns the key; "" of none."""
    parts, hashes = corpus.parts(), []
    key = results.key("keep out", corpus.field, parts) if parts else ""
    if not parts or f"{key}.stretches" in sizes(UPath(folder)):
        return key
    for source in corpus.sources:
        texts = (text for part in parts if part.source == source for text, _ in corpus.read(part, texts=""))
        hashes_of_source = []
        while batch := list(itertools.islice(texts, BATCH)):
            hashes_of_source.append(np.unique(stretches(batch, STRETCH)[0]))
        if not any(map(len, hashes_of_source)):
            raise InputError(f"config.corpus.keep_out: {source} has no text of {STRETCH} words.")
        hashes += hashes_of_source
    results.save(UPath(f"{folder}/{key}.stretches"), np.unique(np.concatenate(hashes)))
    return key


def listed(places: Iterable[Sequence[int]], names: Sequence[str]) -> dict[str, str]:
    """Returns what the manifest says of the first documents that are kept out, from their places in all parts."""
    documents = (f"{name} {place}" for name, in_part in zip(names, places, strict=True) for place in in_part)
    return dict.fromkeys(itertools.islice(documents, LISTED), f"has {STRETCH} words of corpus.keep_out")


@functools.lru_cache(1)
def load(folder: str, key: str) -> np.ndarray:
    """Returns the sorted hashes that `write` has written: uint64 [S]."""
    return results.load(UPath(f"{folder}/{key}.stretches"), np.uint64) if key else np.zeros(0, np.uint64)


def holds(texts: Sequence[str], hashes_S: np.ndarray) -> np.ndarray:
    """Returns which texts have one of the sorted hashes: bool [N]."""
    holds_N = np.zeros(len(texts), bool)
    if len(hashes_S):
        text_hashes, numbers = stretches(texts, STRETCH)
        index = np.minimum(np.searchsorted(hashes_S, text_hashes), len(hashes_S) - 1)
        holds_N[numbers[hashes_S[index] == text_hashes]] = True
    return holds_N


def stretches(texts: Sequence[str], words: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of all stretches of so many words, and the number of the text of each, in order."""
    words_of_texts = [text.casefold().translate(_table()).encode().split() for text in texts]
    counts = list(map(len, words_of_texts))
    words_W = itertools.chain.from_iterable(words_of_texts)
    hashes_W = np.fromiter(map(xxh3_64_intdigest, words_W), np.uint64, sum(counts))
    numbers_W = np.repeat(np.arange(len(texts)), counts)
    hashes_S, first_S = hash_stretches(hashes_W, numbers_W, words)
    return hashes_S, numbers_W[first_S]


def hash_stretches(hashes_W: np.ndarray, numbers_W: np.ndarray, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of all stretches of words with the same number, and where each begins."""
    hashes_S = np.zeros(max(0, len(hashes_W) - words + 1), np.uint64)
    for place in range(words):
        hashes_S *= FACTOR
        hashes_S += hashes_W[place : place + len(hashes_S)]
    first_S = np.flatnonzero(numbers_W[: len(hashes_S)] == numbers_W[words - 1 :])
    return hashes_S[first_S], first_S


@functools.cache
def _table() -> dict[int, str | None]:
    """Returns what becomes of the characters that are no part of words."""
    characters = [chr(code) for code in range(sys.maxunicode + 1)]
    spaces = {ord(character): " " for character in characters if character.isspace()}
    return spaces | {ord(character): None for character in characters if unicodedata.category(character)[0] in "PS"}
