"""The sample of a corpus that a tokenizer is trained on: a share of the training documents of every part, by hash."""

import itertools
import math
from typing import NamedTuple

import numpy as np

from mlm.cluster.engine import Engine
from mlm.data.corpus import Corpus, Part, text_hash

LONGEST = 100_000  # characters of a document that are used: a book must not be the whole sample
LEAST_SHARE = 1 / 8  # of the documents that are read: a part is read up to where it has given its quota
MARGINS = (1.5, 8.0, math.inf)  # of the quotas, tried one after the other: the sizes of texts are known roughly


class Sample(NamedTuple):
    """A task of `sample_part`."""

    part: Part
    most: int  # documents to read; 0 for all
    corpus: Corpus
    share: float  # of the documents that are picked
    quota: float  # bytes of text after which no more are
    texts: str  # folder for the text of sources that are slow to read


def sample_part(task: Sample) -> tuple[int, list[tuple[int, str]]]:
    """Returns the number of documents read, and (hash, text) of those that are picked."""
    picked, left, count = [], task.quota, 0
    documents = task.corpus.read(task.part, texts=task.texts, keep=True)
    for text, group in itertools.islice(documents, task.most or None):
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
    asked, parts = megabytes * 1e6, [part for part in corpus.parts() if part.split != "test"]
    total = sum(part.bytes for part in parts) if all(part.bytes for part in parts) else 0
    picked: list[tuple[int, str]] = []
    for margin in MARGINS:
        share = min(1.0, max(margin * asked / total if total else 0.0, LEAST_SHARE))
        found: dict[tuple[Part, int], tuple[int, list[tuple[int, str]]]] = {}

        def read(limited: list[tuple[Part, int]], share=share, margin=margin, found=found) -> list[int]:
            tasks = []
            for part, most in limited:
                quota = math.inf if most else margin * asked * (part.bytes / total if total else 1 / len(parts))
                if (part, most) not in found:
                    tasks.append(Sample(part, most, corpus, share, quota, texts))
            for index, result in engine.each(sample_part, tasks, label="sample"):
                found[tasks[index][:2]] = result
            return [found[each][0] for each in limited]

        limited = corpus.limited(parts, read, wave=engine.workers)
        picked = sorted({pair for each in limited for pair in found[each][1]})
        sizes = np.cumsum([len(text.encode()) for _, text in picked])
        if len(sizes) and sizes[-1] >= asked:
            break
    return [text for _, text in picked[: np.searchsorted(sizes, asked) + 1]]
