"""Documents to keep out of training because they hold a stretch of words of a benchmark (corpus.keep_out)."""

import functools
import itertools

import numpy as np

from mlm.data import results
from mlm.data.corpus import Corpus, Part
from mlm.data.stretches import STRETCH, StretchIndex, stretches_of_texts
from mlm.engine.engine import Engine
from mlm.errors import InputError
from mlm.paths import UPath

BATCH = 1000  # texts hashed at once


def hash_part(base: str, part: Part, corpus: Corpus) -> int:
    """Writes {base}.stretches: the hashes of all stretches of a part of the texts to keep out; returns their number."""
    texts = (text for text, _ in corpus.read(part, texts=""))
    hashes = [np.zeros(0, np.uint64)]
    while batch := list(itertools.islice(texts, BATCH)):
        hashes.append(np.unique(stretches_of_texts(batch)[0]))
    stretches = np.unique(np.concatenate(hashes))
    results.save(UPath(f"{base}.stretches"), stretches)
    return len(stretches)


def hash_parts(engine: Engine, corpus: Corpus, folder: UPath) -> tuple[str, ...]:
    """Hashes the texts to keep out; returns how the names of the results begin."""
    parts = corpus.parts()
    items = ({"part": part} for part in parts)
    done = results.run(engine, hash_part, items, folder=folder, label="keep out", corpus=corpus)
    sources = {part.source for part, (_, count) in zip(parts, done, strict=True) if count}
    if empty := [source for source in corpus.sources if source not in sources]:
        raise InputError(f"config.corpus.keep_out: {empty[0]} has no text of {STRETCH} words.")
    return tuple(base for base, _ in done)


@functools.lru_cache(1)
def load_index(bases: tuple[str, ...]) -> StretchIndex:
    """Returns the index of the stretches in such results."""
    hashes = results.load_each(bases, "stretches", np.uint64)
    return StretchIndex(np.concatenate([np.zeros(0, np.uint64), *hashes]))
