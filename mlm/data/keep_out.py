"""Documents to keep out of training because they hold a stretch of words of a benchmark (corpus.keep_out)."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mlm.data import results
from mlm.data.corpus import Corpus, Part
from mlm.data.stretches import STRETCH, StretchIndex, stretches_of_texts
from mlm.errors import InputError
from mlm.paths import UPath, sizes

LISTED = 1000  # documents in the manifest
BATCH = 1000  # texts hashed at once


class HashTask(NamedTuple):
    """A task of `hash_part`."""

    part: Part
    corpus: Corpus
    folder: str
    key: str


def hash_part(task: HashTask) -> None:
    """Writes {key}.stretches: the hashes of all stretches of a part of the texts to keep out."""
    texts = (text for text, _ in task.corpus.read(task.part, texts=""))
    hashes = [np.zeros(0, np.uint64)]
    while batch := list(itertools.islice(texts, BATCH)):
        hashes.append(np.unique(stretches_of_texts(batch)[0]))
    results.save(UPath(f"{task.folder}/{task.key}.stretches"), np.unique(np.concatenate(hashes)))


def hash_parts(do: Callable[..., None], corpus: Corpus, folder: str) -> tuple[str, ...]:
    """Hashes the texts to keep out, and returns the keys of the results; `do` runs tasks that are not done."""
    tasks = [
        HashTask(part, corpus, folder, results.key("keep out", corpus.field, part))
        for part in corpus.parts()
    ]
    do(hash_part, tasks, label="keep out", last=".stretches")
    size_of_file = sizes(UPath(folder)) if tasks else {}
    for source in corpus.sources:
        if not any(
            size_of_file[f"{task.key}.stretches"] for task in tasks if task.part.source == source
        ):
            raise InputError(f"config.corpus.keep_out: {source} has no text of {STRETCH} words.")
    return tuple(task.key for task in tasks)


def list_documents(places: Iterable[Sequence[int]], names: Sequence[str]) -> dict[str, str]:
    """Returns what the manifest says of the first documents that are kept out, from their places in all parts."""
    documents = (
        f"{name} {place}" for name, in_part in zip(names, places, strict=True) for place in in_part
    )
    return dict.fromkeys(
        itertools.islice(documents, LISTED), f"has {STRETCH} words of corpus.keep_out"
    )


@functools.lru_cache(1)
def load_index(folder: str, keys: tuple[str, ...]) -> StretchIndex:
    """Returns the index of the stretches that such tasks have written."""
    files = (UPath(f"{folder}/{key}.stretches") for key in keys)
    hashes = results.at_once(lambda file: results.load(file, np.uint64), files)
    return StretchIndex(np.concatenate([np.zeros(0, np.uint64), *hashes]))
