"""The sample of a corpus that a tokenizer is trained on: a share of the training documents of every part, by hash."""

import functools
import itertools
import math

import numpy as np

from mlm.data.corpus import Corpus, Part, text_hash
from mlm.engine.engine import Engine

LONGEST = 100_000  # characters of a document that are used: a book must not be the whole sample
# Margins of the size, and least shares of the documents: tried in turn, as sizes are known roughly, or not at all.
# a part is read up to where it has given its quota
MARGINS = ((1.5, 1 / 8), (8.0, 1 / 8), (math.inf, 1.0))


def sample_part(
    part_limit_and_quota: tuple[Part, int, float], *, corpus: Corpus, share: float, texts: str
) -> list[tuple[int, str]]:
    """Returns (hash, text) of a share of a part's documents: of the first ones, up to a quota of bytes of text."""
    part, limit, left = part_limit_and_quota
    picked = []
    documents = corpus.read(part, texts=texts, keep=True)
    for text, group in itertools.islice(documents, limit or None):
        number = text_hash(text)
        if number % 2**32 < share * 2**32 and corpus.split_of(part, group, number) == "train":
            text = text[:LONGEST]
            picked.append((number, text))
            left -= len(text.encode())
            if left <= 0:
                break
    return picked


def draw(corpus: Corpus, *, megabytes: float, engine: Engine, texts: str) -> list[str]:
    """Returns so many megabytes of training documents, or all, mixed; the same for any workers."""
    size = megabytes * 1e6
    parts = [part for part in corpus.parts() if part.split != "test"]
    limits = corpus.limited(parts, texts=texts)
    total = sum(part.bytes for part in parts) if all(part.bytes for part in parts) else 0
    for margin, least_share in MARGINS:
        share = min(1.0, max(margin * size / total if total else 0.0, least_share))
        tasks = []
        for part, limit in limits:
            quota = margin * size * (part.bytes / total if total else 1 / len(parts))
            tasks.append((part, limit, math.inf if limit else quota))
        pick = functools.partial(sample_part, corpus=corpus, share=share, texts=texts)
        picked = {
            document
            for _, in_part in engine.each(pick, tasks, label="sample")
            for document in in_part
        }
        documents = [text for _, text in sorted(picked)]
        ends = np.cumsum([len(text.encode()) for text in documents])
        if len(ends) and ends[-1] >= size:
            break
    return documents[: np.searchsorted(ends, size) + 1]
