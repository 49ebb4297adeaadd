"""Labelled texts as token ids in memory: their labels, their order, and batches padded to few lengths.

The order is that of `order.py`: a pure function of the data, the seed, the batch size and the lanes. Lane l of n owns
the rows l, l + n, ...; every row comes once in each epoch of its lane. A batch is padded to the longest row of the
whole global batch, rounded up: every host knows all lengths, so all have the same shape.

Dimensions: N rows of a split, B rows of a batch, L tokens in a row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator

import numpy as np

from mlm.data import labelled, tokenizer
from mlm.data.labelled import Table
from mlm.data.order import Lane, Visit
from mlm.errors import InputError

AT_ONCE = 4096  # texts that are tokenized together
SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Split:
    """Token ids and labels of a split, in the order of its source.

    Attributes:
      source: as in the config.
      tokens: int32, of all rows, one after the other.
      starts: int64 [N + 1], where each row begins.
      labels_N: int32 numbers of classes, or float32 targets.
      truncated: rows of which tokens were cut off.
    """

    source: str
    tokens: np.ndarray
    starts: np.ndarray
    labels_N: np.ndarray
    truncated: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.diff(self.starts)

    def batch(self, rows_B: np.ndarray, length: int, pad_id: int) -> dict[str, np.ndarray]:
        """Returns {"input_ids", "attention_mask": int32 [B, L], "label": [B], "record_id": uint32 [B]} of some rows."""
        real_BxL = np.arange(length) < self.lengths[rows_B][:, None]
        ids_BxL = np.full(real_BxL.shape, pad_id, np.int32)
        ids_BxL[real_BxL] = np.concatenate([self.tokens[self.starts[row] : self.starts[row + 1]] for row in rows_B])
        return {
            "input_ids": ids_BxL,
            "attention_mask": real_BxL.astype(np.int32),
            "label": self.labels_N[rows_B],
            "record_id": rows_B.astype(np.uint32),
        }


@dataclasses.dataclass(frozen=True)
class Examples:
    """All splits of a task.

    Attributes:
      splits: "train", "validation" and, if there is one, "test".
      labels: names of the classes, by their number; none for regression.
      length: of the longest row that there can be.
      multiple: rows are padded up to one of this, or to `length`.
      pad_id: of the tokenizer.
      vocab_size: its entries.
      tokenizer_fingerprint: of the tokenizer.
      fingerprint: of all token ids and labels.
    """

    splits: dict[str, Split]
    labels: tuple[str, ...]
    length: int
    multiple: int
    pad_id: int
    vocab_size: int
    tokenizer_fingerprint: str
    fingerprint: str

    def padded(self, longest: int) -> int:
        """Returns the length to which rows are padded of which the longest has `longest` tokens."""
        return min(-(-longest // self.multiple) * self.multiple, self.length)

    def lengths(self, split: str = "train") -> list[int]:
        """Returns every length that a batch of a split can have: how often a step is compiled at most."""
        lengths = self.splits[split].lengths
        return sorted({self.padded(length) for length in range(int(lengths.min()), int(lengths.max()) + 1)})


def read_tables(
    sources: dict[str, str], *, text: tuple[str, ...], label: str, kind: str, names: tuple[str, ...] | None = None
) -> tuple[dict[str, Table], tuple[str, ...]]:
    """Returns {split: its rows}, every label checked, and the names of the classes, none for regression.

    Args:
      sources: of each split.
      text, label, kind: keys of the config.
      names: of the classes by their number; None for those of the training split.

    Raises:
      InputError: of `labelled.read`; a label that is not among the names, or training rows of one label.
    """
    tables = {
        split: labelled.read(source, split=split, text=text, label=label, kind=kind)
        for split, source in sources.items()
    }
    if kind == "regression":
        return tables, ()
    if names is None:
        names = class_names(tables["train"])
    known = set(names)
    for split, table in tables.items():
        for row, value in enumerate(table.labels):
            if value not in known:
                raise InputError(
                    f"{table.where(row)}: its label {value!r} is not one of the {len(known)} of the training split; "
                    f"correct it, or take the row out of the {split} split."
                )
    return tables, names


def class_names(table: Table) -> tuple[str, ...]:
    """Returns the labels of a table: sorted, as numbers where all of them are whole numbers.

    Raises:
      InputError: there is only one.
    """
    names = set(table.labels)
    if len(names) < 2:
        raise InputError(f"{table.source}: all of its rows have the label {table.labels[0]!r}; two labels are needed.")
    numeric = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int if numeric else None))


def tokenize(
    tables: dict[str, Table], names: tuple[str, ...], *, tokenizer_folder: str, length: int, multiple: int
) -> Examples:
    """Returns the examples of some tables.

    Args:
      tables, names: of `read_tables`.
      tokenizer_folder: of the model.
      length, multiple: keys of the config; longer rows are truncated, the longer of two texts first.

    Raises:
      InputError: no tokenizer, or a text that holds its padding token.
    """
    tok = tokenizer.load(tokenizer_folder)
    tok.truncation_side = tok.padding_side = "right"
    numbers = {name: number for number, name in enumerate(names)}
    splits = {}
    for split, table in tables.items():
        rows, truncated = [], 0
        for first in range(0, len(table.texts), AT_ONCE):
            columns = [list(column) for column in zip(*table.texts[first : first + AT_ONCE], strict=True)]
            found = tok(*columns, truncation="longest_first", max_length=length)
            truncated += sum(bool(encoding.overflowing) for encoding in found.encodings)
            rows += [np.asarray(ids, np.int32) for ids in found["input_ids"]]
        for row, ids in enumerate(rows):
            if tok.pad_token_id in ids:
                raise InputError(f"{table.where(row)}: holds the padding token {tok.pad_token}, which no text can.")
        labels = [numbers[value] for value in table.labels] if names else table.labels
        labels_N = np.asarray(labels, np.int32 if names else np.float32)
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in rows])]).astype(np.int64)
        splits[split] = Split(table.source, np.concatenate(rows), starts, labels_N, truncated)
    mark = tokenizer.fingerprint(tokenizer_folder)
    rest = (names, length, multiple, tok.pad_token_id, len(tok))
    return Examples(splits, *rest, mark, _fingerprint(splits, names))


def _fingerprint(splits: dict[str, Split], names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(json.dumps([names, sorted(splits)]).encode())
    for _, split in sorted(splits.items()):
        for array in (split.tokens, split.starts, split.labels_N):
            digest.update(array.tobytes())
    return digest.hexdigest()


def train_batches(
    examples: Examples, *, seed: int, global_batch: int, lanes: int, start_step: int, rows: tuple[int, int]
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this host's rows of the global batches `start_step`, `start_step` + 1, ..., without end.

    Args:
      examples: whose training split is read.
      seed: of the order.
      global_batch: rows of a batch over all hosts.
      lanes: virtual hosts; lane l supplies the l-th block of rows.
      start_step: batches consumed before.
      rows: [start, stop) of the global batch.

    Returns:
      Of batches as in `Split.batch`, and "epoch": uint32 [rows], the lane's.

    Raises:
      InputError: fewer rows than lanes.
    """
    split, per_lane = examples.splits["train"], global_batch // lanes
    count = len(split.labels_N)
    if count < lanes:
        raise InputError(f"config.data.lanes = {lanes}: {split.source} has only {count} rows; lower it.")
    sizes = tuple(len(range(lane, count, lanes)) for lane in range(lanes))
    streams = [_Stream(Lane(seed, sizes, lane, lanes)) for lane in range(lanes)]
    for step in itertools.count(start_step):
        positions = np.arange(step * per_lane, (step + 1) * per_lane)
        found = [stream.rows(positions) for stream in streams]
        rows_B, epochs_B = (np.concatenate(column) for column in zip(*found, strict=True))
        length = examples.padded(int(split.lengths[rows_B].max()))
        batch = split.batch(rows_B[slice(*rows)], length, examples.pad_id)
        yield batch | {"epoch": epochs_B[slice(*rows)].astype(np.uint32)}


class _Stream:
    """The rows of one lane by their position; the order of its last epoch is kept."""

    def __init__(self, lane: Lane):
        self._lane, self._epoch = lane, -1
        self._order = np.zeros(0, np.int64)

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rows of the split, epochs of the lane)."""
        epochs, places = np.divmod(positions, self._lane.size)
        found = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            if epoch != self._epoch:
                visit = Visit(self._lane.lane, int(epoch), 0)
                self._order = self._lane.record_order(visit) * self._lane.lanes + self._lane.lane
                self._epoch = epoch
            here = epochs == epoch
            found[here] = self._order[places[here]]
        return found, epochs


def eval_batches(
    examples: Examples, *, split: str, batch: int, rows: tuple[int, int]
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this host's rows of batches that hold every row of a split once, in the order of `eval_order`.

    Args:
      examples: whose rows are read.
      split: of the examples.
      batch: rows over all hosts; the last batch is filled up with copies of its first row.
      rows: [start, stop) of each batch.
    """
    own, order = examples.splits[split], eval_order(examples, split)
    for first in range(0, len(order), batch):
        rows_B = order[first : first + batch]
        rows_B = np.concatenate([rows_B, np.full(batch - len(rows_B), rows_B[0])])
        length = examples.padded(int(own.lengths[rows_B].max()))
        yield own.batch(rows_B[slice(*rows)], length, examples.pad_id)


def eval_order(examples: Examples, split: str) -> np.ndarray:
    """Returns the rows of a split, short ones first, so that little is padded."""
    return np.argsort(examples.splits[split].lengths, kind="stable")
