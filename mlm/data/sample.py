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


def sample_part(task: Sample) -> tuple[int, list[tuple[int, str]]]:
    """Returns the number of documents read, and (hash, text) of those that are picked."""
    picked, left, count = [], task.quota, 0
    documents = task.corpus.read(task.part, texts=task.texts, keep=True)
    for text, group in itertools.islice(documents, task.limit or None):
        count += 1
        number = text_hash(text)
        if number % 2**32 < task.share * 2**32 and task.corpus.split_of(task.part, group, number) == "train":
            text = text[:LONGEST]
            picked.append((number, text))
            left -= len(text.encode())
            if left <= 0:
                break
    return count, picked


def draw(corpus: Corpus, *, megabytes: float, engine: Engine, texts: str) -> list[str]:
    """Returns so many megabytes of training documents, or all, mixed; the same for any workers."""
    size, parts = megabytes * 1e6, [part for part in corpus.parts() if part.split != "test"]
    for margin in MARGINS:
        documents = _pick(corpus, parts, margin * size, engine=engine, texts=texts)
        ends = np.cumsum([len(text.encode()) for text in documents])
        if len(ends) and ends[-1] >= size:
            break
    return documents[: np.searchsorted(ends, size) + 1]


def _pick(corpus: Corpus, parts: list[Part], size: float, *, engine: Engine, texts: str) -> list[str]:
    """Returns about `size` bytes of training documents of all parts, in the order of their hashes."""
    total = sum(part.bytes for part in parts) if all(part.bytes for part in parts) else 0
    share = min(1.0, max(size / total if total else 0.0, LEAST_SHARE))
    samples: dict[tuple[Part, int], tuple[int, list[tuple[int, str]]]] = {}  # by part and limit

    def count_documents(limits: list[tuple[Part, int]]) -> list[int]:
        tasks = []
        for part, limit in limits:
            quota = size * (part.bytes / total if total else 1 / len(parts))
            if (part, limit) not in samples:
                tasks.append(Sample(part, limit, corpus, share, math.inf if limit else quota, texts))
        for index, sample in engine.each(sample_part, tasks, label="sample"):
            samples[tasks[index].part, tasks[index].limit] = sample
        return [samples[part_and_limit][0] for part_and_limit in limits]

    limits = corpus.limited(parts, count_documents, wave=engine.workers)
    picked = {document for part_and_limit in limits for document in samples[part_and_limit][1]}
    return [text for _, text in sorted(picked)]
