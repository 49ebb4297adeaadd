"""The sample of a corpus that a tokenizer is trained on: a share of the training documents of every part, by hash."""

import itertools
import math
from typing import NamedTuple

import numpy as np

from mlm.cluster.engine import Engine
from mlm.data.corpus import Corpus, Part, text_hash

LONGEST = 100_000  # characters of a document that are used: a book must not be the whole sample
LEAST_SHARE = 1 / 8  # of the documents that are read: a part is read up to where it has given its quota
MARGINS = (1.5, 8.0, math.inf)  # of the size, tried one after the other: the sizes of texts are known roughly


class Sample(NamedTuple):
    """A task of `sample_part`."""

    part: Part
    limit: int  # documents to read; 0 for all
    corpus: Corpus
    share: float  # of the documents that are picked
    quota: float  # bytes of text after which no more are
    texts: str  # folder for the text of sources that are slow to read


def sample_part(task: Sample) -> list[tuple[int, str]]:
    """Returns (hash, text) of the documents that are picked."""
    picked, left = [], task.quota
    documents = task.corpus.read(task.part, texts=task.texts, keep=True)
    for text, group in itertools.islice(documents, task.limit or None):
        number = text_hash(text)
        if number % 2**32 < task.share * 2**32 and task.corpus.split_of(task.part, group, number) == "train":
            text = text[:LONGEST]
            picked.append((number, text))
            left -= len(text.encode())
            if left <= 0:
                break
    return picked


def draw(corpus: Corpus, *, megabytes: float, engine: Engine, texts: str) -> list[str]:
    """Returns so many megabytes of training documents, or all, mixed; the same for any workers."""
    size, parts = megabytes * 1e6, [part for part in corpus.parts() if part.split != "test"]
    limits = corpus.limited(parts, engine, texts=texts)
    total = sum(part.bytes for part in parts) if all(part.bytes for part in parts) else 0
    for margin in MARGINS:
        share = min(1.0, max(margin * size / total if total else 0.0, LEAST_SHARE))
        tasks = []
        for part, limit in limits:
            quota = margin * size * (part.bytes / total if total else 1 / len(parts))
            tasks.append(Sample(part, limit, corpus, share, math.inf if limit else quota, texts))
        picked = {document for _, in_part in engine.each(sample_part, tasks, label="sample") for document in in_part}
        documents = [text for _, text in sorted(picked)]
        ends = np.cumsum([len(text.encode()) for text in documents])
        if len(ends) and ends[-1] >= size:
            break
    return documents[: np.searchsorted(ends, size) + 1]
