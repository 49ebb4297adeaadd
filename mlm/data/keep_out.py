"""Stretches of words that texts share, and documents to keep out because they hold one of a benchmark's.

Words are those of GPT-3's study of contamination (Brown et al., 2020, appendix C): in lower case (case-folded), without
punctuation (Unicode's categories P and S), split at white space.

Dimensions: N texts, W words, S stretches.
"""

import functools
import itertools
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from mlm.data import results
from mlm.data.corpus import Corpus, Part
from mlm.errors import InputError
from mlm.paths import UPath, sizes

STRETCH = 13  # words
LISTED = 1000  # documents in the manifest
BATCH = 1000  # texts hashed at once
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: nothing is lost by multiplying


class HashPart(NamedTuple):
    """A task of `hash_part`."""

    part: Part
    corpus: Corpus
    folder: str
    key: str


def hash_part(task: HashPart) -> None:
    """Writes {key}.stretches: the hashes of all stretches of a part of the texts to keep out."""
    texts, hashes = (text for text, _ in task.corpus.read(task.part, texts="")), [np.zeros(0, np.uint64)]
    while batch := list(itertools.islice(texts, BATCH)):
        hashes.append(np.unique(stretches(batch, STRETCH)[0]))
    results.save(UPath(f"{task.folder}/{task.key}.stretches"), np.unique(np.concatenate(hashes)))


def run(do: Callable[..., None], corpus: Corpus, folder: str) -> tuple[str, ...]:
    """Hashes the texts to keep out, and returns the keys of the results; `do` runs tasks that are not done."""
    tasks = [HashPart(part, corpus, folder, results.key("keep out", corpus.field, part)) for part in corpus.parts()]
    do(hash_part, tasks, label="keep out", last=".stretches")
    size_of_file = sizes(UPath(folder)) if tasks else {}
    for source in corpus.sources:
        if not any(size_of_file[f"{task.key}.stretches"] for task in tasks if task.part.source == source):
            raise InputError(f"config.corpus.keep_out: {source} has no text of {STRETCH} words.")
    return tuple(task.key for task in tasks)


def listed(places: Iterable[Sequence[int]], names: Sequence[str]) -> dict[str, str]:
    """Returns what the manifest says of the first documents that are kept out, from their places in all parts."""
    documents = (f"{name} {place}" for name, in_part in zip(names, places, strict=True) for place in in_part)
    return dict.fromkeys(itertools.islice(documents, LISTED), f"has {STRETCH} words of corpus.keep_out")


@functools.lru_cache(1)
def load(folder: str, keys: tuple[str, ...]) -> np.ndarray:
    """Returns the sorted hashes that such tasks have written: uint64 [S]."""
    files = (UPath(f"{folder}/{key}.stretches") for key in keys)
    hashes = results.at_once(lambda file: results.load(file, np.uint64), files)
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))


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
