"""How much of a validation split stands in training too, counted one by one: shares no code with mlm/doctor/scan.py.

    python -m tests.support.overlap RUN/shards RUN/tokenizer

A stretch is 13 tokens of a row, or 13 words of a document, one after the other. Stretches with a special token, which
every row has, don't count. Nothing is hashed or sampled.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

STRETCH = 13


class Overlap(NamedTuple):
    rows: int  # of the validation split
    half: int  # of these, with at least half of their tokens in stretches that training has
    none: int  # with no such stretch


def of_rows(train: Iterable[np.ndarray], validation: Iterable[np.ndarray], special: set[int]) -> Overlap:
    """Counts validation rows by how much of them is in training rows."""
    rows_BxL = list(validation)
    wanted = {
        stretch for row in rows_BxL for stretch in _stretches(row) if special.isdisjoint(np.frombuffer(stretch, "<u4"))
    }
    known = set()
    for row in train:
        known |= wanted.intersection(_stretches(row))
    shares = []
    for row in rows_BxL:
        covered = np.zeros(len(row), bool)
        for place, stretch in enumerate(_stretches(row)):
            covered[place : place + STRETCH] |= stretch in known
        shares.append(float(covered.mean()))
    return Overlap(len(shares), sum(share >= 0.5 for share in shares), sum(share == 0 for share in shares))


def _stretches(row: np.ndarray) -> Iterator[bytes]:
    data = row.astype("<u4").tobytes()
    return (data[start : start + 4 * STRETCH] for start in range(0, len(data) - 4 * STRETCH + 1, 4))


def of_words(train: Iterable[str], validation: Iterable[str]) -> tuple[int, int]:
    """Returns (stretches of words of the validation documents, how many of them are in training documents)."""
    own = [stretch for text in validation for stretch in _word_stretches(text)]
    wanted, known = set(own), set()
    for text in train:
        known |= wanted.intersection(_word_stretches(text))
    return len(own), sum(stretch in known for stretch in own)


def _word_stretches(text: str) -> Iterator[str]:
    words = text.split()
    return (" ".join(words[start : start + STRETCH]) for start in range(len(words) - STRETCH + 1))


def rows(shards: str, split: str) -> Iterator[np.ndarray]:
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


def main(shards: str, tokenizer: str) -> None:
    """Prints the counts."""
    found = of_rows(rows(shards, "train"), rows(shards, "validation"), special_ids(tokenizer))
    print(f"of {found.rows} validation rows, {found.half} ({found.half / found.rows:.1%}) have at least half of their")
    print(f"tokens in stretches of {STRETCH} that training has; {found.none} ({found.none / found.rows:.1%}) have none")


if __name__ == "__main__":
    main(*sys.argv[1:])
