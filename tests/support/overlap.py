"""How many rows of a validation split stand in training, too, counted one by one: shares no code with mlm.

    python -m tests.support.overlap RUN/shards RUN/tokenizer

A stretch is 13 tokens of a row, one after the other, none of them special. Nothing is hashed or sampled.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

STRETCH = 13


class Counts(NamedTuple):
    rows: int  # of the validation split
    half: int  # of these, with at least half of their tokens in stretches that training has
    none: int  # with no such stretch


def count(train: Iterable[np.ndarray], validation: Iterable[np.ndarray], special: set[int]) -> Counts:
    """Counts validation rows by how much of them is in training rows."""
    rows = list(validation)
    wanted = {
        stretch for row in rows for stretch in _stretches(row) if special.isdisjoint(np.frombuffer(stretch, "<u4"))
    }
    known = set()
    for row in train:
        known |= wanted.intersection(_stretches(row))
    shares = []
    for row in rows:
        covered = np.zeros(len(row), bool)
        for place, stretch in enumerate(_stretches(row)):
            covered[place : place + STRETCH] |= stretch in known
        shares.append(float(covered.mean()))
    return Counts(len(shares), sum(share >= 0.5 for share in shares), sum(share == 0 for share in shares))


def _stretches(row: np.ndarray) -> Iterator[bytes]:
    data = row.astype("<u4").tobytes()
    return (data[start : start + 4 * STRETCH] for start in range(0, len(data) - 4 * STRETCH + 1, 4))


def read_rows(shards: str, split: str) -> Iterator[np.ndarray]:
    """Yields the tokens of each record of a split."""
    import tensorflow as tf

    for file in sorted(Path(shards, split).glob("*.tfrecord")):
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            yield np.array(features["input_ids"].int64_list.value)


def special_ids(tokenizer: str) -> set[int]:
    """Returns the ids of the special tokens of a tokenizer's folder."""
    added = json.loads(Path(tokenizer, "tokenizer.json").read_text())["added_tokens"]
    return {token["id"] for token in added if token["special"]}


def count_run(shards: str, tokenizer: str) -> Counts:
    """Counts the validation rows of a folder of shards."""
    return count(read_rows(shards, "train"), read_rows(shards, "validation"), special_ids(tokenizer))


if __name__ == "__main__":
    print(count_run(*sys.argv[1:]))
