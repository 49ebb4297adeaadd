"""Labelled texts as token ids in memory: their labels, their order, and batches padded to a few lengths.

The order is that of `order.py`, except that lane l of n owns the rows l, l + n, .... A batch is padded to the longest
row of the whole global batch, rounded up: every host knows all lengths, so all have the same shape.

Dimensions: N rows of a split, B rows of a batch, L tokens in a row, W words, T tokens of a split.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding

from mlm.data import labelled, tokenizer, tokenizer_checks
from mlm.data.labelled import Columns, Table
from mlm.data.order import Lane
from mlm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 4096  # texts that are tokenized together
MULTIPLE = 32  # tokens: batches are padded to a multiple of this, each compiled once
SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of a split with token labels, in the order of its source."""

    texts: list[str]
    row_W: np.ndarray  # int64, the row of each
    # int64, its first piece in the row; -1 where it has none, see `first_pieces`
    token_W: np.ndarray


@dataclasses.dataclass(frozen=True)
class LabelledSplit:
    """Token ids and labels of a split, in the order of its source."""

    tokens: np.ndarray  # int32, all rows, one after the other
    starts: np.ndarray  # int64 [N + 1], where each row begins
    # int32 class indices, or float32 targets; -1 or NaN where a row to predict has none; [W]
    labels_N: np.ndarray
    truncated: int  # number of truncated rows
    words: Words | None = None  # with token labels alone

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.diff(self.starts)

    @functools.cached_property
    def token_labels(self) -> np.ndarray:
        """The labels of words at their first pieces, int32; -1 at other tokens."""
        labels_T = np.full(len(self.tokens), -1, np.int32)
        is_read = self.words.token_W >= 0
        labels_T[self.starts[self.words.row_W[is_read]] + self.words.token_W[is_read]] = (
            self.labels_N[is_read]
        )
        return labels_T

    def batch(self, rows_B: np.ndarray, length: int, pad_id: int) -> dict[str, np.ndarray]:
        """Returns {"input_ids", "attention_mask": int32 [B, L], "label": [B], "record_id": uint32 [B]} of some rows.

        The labels of words are [B, L], and -1 at tokens that have none.
        """
        real_BxL = np.arange(length) < self.lengths[rows_B][:, None]

        def padded(values_T: np.ndarray, padding: int) -> np.ndarray:
            values_BxL = np.full(real_BxL.shape, padding, np.int32)
            values_BxL[real_BxL] = np.concatenate(
                [values_T[self.starts[row] : self.starts[row + 1]] for row in rows_B]
            )
            return values_BxL

        return {
            "input_ids": padded(self.tokens, pad_id),
            "attention_mask": real_BxL.astype(np.int32),
            "label": padded(self.token_labels, -1) if self.words else self.labels_N[rows_B],
            "record_id": rows_B.astype(np.uint32),
        }


@dataclasses.dataclass(frozen=True)
class Examples:
    """All splits of a task: "train", "validation", if there is one "test", and those of classify.predict."""

    splits: dict[str, LabelledSplit]
    labels: tuple[str, ...]  # names of the classes by index; empty for regression
    length: int  # tokens in a row at most
    pad_id: int
    vocab_size: int
    tokenizer_fingerprint: str

    def fingerprint(self, *names: str) -> str:
        """Returns the SHA-256 of all token ids and labels of splits."""
        digest = hashlib.sha256(json.dumps([self.labels, sorted(names)]).encode())
        for split in map(self.splits.get, sorted(names)):
            for array in (
                split.tokens,
                split.starts,
                split.labels_N,
                *([split.words.token_W] if split.words else []),
            ):
                digest.update(array.tobytes())
        return digest.hexdigest()

    def padded(self, longest: int) -> int:
        """Returns the padded length of rows whose longest has `longest` tokens."""
        return min(-(-longest // MULTIPLE) * MULTIPLE, self.length)

    def lengths(self, split: str = "train") -> list[int]:
        """Returns every length that a batch of a split can have; a step compiles once for each."""
        lengths = self.splits[split].lengths
        return sorted(
            {self.padded(length) for length in range(int(lengths.min()), int(lengths.max()) + 1)}
        )


def read_tables(
    sources: dict[str, str],
    columns: Columns,
    *,
    names: tuple[str, ...] | None = None,
    require_labels: bool = True,
) -> tuple[dict[str, Table], tuple[str, ...]]:
    """Returns {split: its rows} and the names of the classes: `names`, or the labels in training; () if numbers."""
    tables = {}
    for split, source in sources.items():
        tables[split] = labelled.read_table(
            source, columns, split=split, require_labels=require_labels, classes=names or ()
        )
    if columns.kind == "regression":
        return tables, ()
    names = names or class_names(tables["train"])
    # of labels that are spelled alike, as 1 and 1.0, the first name
    class_of = {labelled.spelling(name): name for name in reversed(names)}
    class_of |= {name: name for name in names}
    for split, table in tables.items():
        for row, (labels, place) in enumerate(zip(table.labels, table.places, strict=True)):
            classes = []
            for label in _as_tuple(labels):
                name = label and class_of.get(label, class_of.get(labelled.spelling(label)))
                if label and not name:
                    raise InputError(
                        f"{place}: its label {label!r} is not one of the {len(names)} of the training split; correct "
                        f"it, or remove the row from the {split} split."
                    )
                classes.append(name)
            table.labels[row] = tuple(classes) if isinstance(labels, tuple) else classes[0]
    return tables, names


def _as_tuple(label: Any) -> tuple:
    """Returns the labels of a row: its only one, or those of its words."""
    return label if isinstance(label, tuple) else (label,)


def class_names(table: Table) -> tuple[str, ...]:
    """Returns the classes, at least two: in a library's order, else sorted, as numbers where all are numbers.

    Of labels that are one class, as 1 and 1.0, the shortest names it.
    """
    labels = {name for label in table.labels for name in _as_tuple(label) if name is not None}
    longest_first = sorted(labels, key=lambda label: (-len(label), label))
    names = {labelled.spelling(label): label for label in longest_first}.values()
    if len(names) < 2:
        raise InputError(
            f"{table.source}: all of its rows have the label {min(names)!r}; two labels are needed."
        )
    if table.names:
        return tuple(table.names)
    if all(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in names):
        return tuple(sorted(names, key=lambda name: (Decimal(name), name)))
    return tuple(sorted(names))


def tokenize(
    tables: dict[str, Table], names: tuple[str, ...], *, tokenizer_folder: str, length: int
) -> Examples:
    """Returns the examples of `read_tables`; rows are truncated to `length` tokens, the longer of two texts first."""
    tok = tokenizer.load(tokenizer_folder)
    tok.truncation_side = tok.padding_side = "right"
    splits = {}
    for split, table in tables.items():
        if not table.is_tokens and len(table.texts[0]) == 2:
            tokenizer_checks.check_pairs(
                tok.backend_tokenizer, sep_id=tok.sep_token_id, where=tokenizer_folder
            )
        splits[split] = _tokenize_table(table, names, tok, length)
    return Examples(
        splits=splits,
        labels=names,
        length=length,
        pad_id=tok.pad_token_id,
        vocab_size=tokenizer_checks.vocabulary_size(tok.backend_tokenizer),
        tokenizer_fingerprint=tokenizer.fingerprint(tokenizer_folder),
    )


def _tokenize_table(
    table: Table, names: tuple[str, ...], tok: PreTrainedTokenizerFast, length: int
) -> LabelledSplit:
    """Returns the tokens of a table's rows, and the indices of their labels in `names` or, without, the numbers."""
    rows = []
    pieces = []
    truncated = 0
    for first in range(0, len(table.texts), CHUNK):
        texts = table.texts[first : first + CHUNK]
        joined = [(" ".join(words),) for words in texts] if table.is_tokens else texts
        columns = map(list, zip(*joined, strict=True))
        encoded = tok(*columns, truncation="longest_first", max_length=length)
        truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
        rows += [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
        if table.is_tokens:
            pieces += map(first_pieces, encoded.encodings, texts)
    for ids, place in zip(rows, table.places, strict=True):
        if tok.pad_token_id in ids:
            raise InputError(f"{place}: holds the padding token {tok.pad_token}; remove it.")
    labels = table.labels
    words = None
    if table.is_tokens:
        labels = []
        for row_labels, row_words in zip(table.labels, table.texts, strict=True):
            labels += row_labels or [None] * len(row_words)
        words = Words(
            texts=list(itertools.chain.from_iterable(table.texts)),
            row_W=np.repeat(np.arange(len(rows)), list(map(len, table.texts))),
            token_W=np.concatenate(pieces),
        )
    if names:
        indices = {name: index for index, name in enumerate(names)}
        labels_N = np.array([indices.get(label, -1) for label in labels], np.int32)
    else:
        labels_N = np.asarray(labels, np.float32)
    starts = np.cumsum([0, *map(len, rows)])
    return LabelledSplit(np.concatenate(rows), starts, labels_N, truncated, words)


def first_pieces(encoding: Encoding, words: Sequence[str]) -> np.ndarray:
    """Returns the index of each word's first piece, int64 [W], in the encoding of " ".join(words); -1 if it has none.

    The space before a word belongs to it, as some tokenizers make it a piece.
    """
    starts_W = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])  # characters
    tokens_T = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
    offsets_T = np.array(encoding.offsets)[tokens_T, 0]
    first_W = np.full(len(words), -1)
    words_T = np.searchsorted(starts_W - 1, offsets_T, side="right") - 1
    first_W[words_T[::-1]] = tokens_T[::-1]  # the last one written is the first
    return first_W


def train_batches(
    examples: Examples,
    *,
    seed: int,
    global_batch: int,
    lanes: int,
    start_step: int,
    rows: tuple[int, int],
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows [start, stop) of the batches from `start_step` on, each `LabelledSplit.batch` and "epoch"."""
    split = examples.splits["train"]
    per_lane = global_batch // lanes
    owned = [np.arange(lane, len(split), lanes) for lane in range(lanes)]
    sizes = tuple(map(len, owned))
    row_of_record = np.concatenate(owned)
    streams = [
        Lane(seed, sizes, lane, lanes).records_from(start_step * per_lane) for lane in range(lanes)
    ]
    while True:
        pairs = [pair for stream in streams for pair in itertools.islice(stream, per_lane)]
        records_B, epochs_B = np.array(pairs).T
        rows_B = row_of_record[records_B]
        length = examples.padded(int(split.lengths[rows_B].max()))
        batch = split.batch(rows_B[slice(*rows)], length, examples.pad_id)
        yield batch | {"epoch": epochs_B[slice(*rows)].astype(np.uint32)}


def eval_batches(
    examples: Examples, *, split: str, batch: int, rows: tuple[int, int]
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows [start, stop) of batches in `eval_order`; the last one is filled up with its first row."""
    table = examples.splits[split]
    order = eval_order(examples, split)
    for first in range(0, len(order), batch):
        rows_B = order[first : first + batch]
        rows_B = np.concatenate([rows_B, np.full(batch - len(rows_B), rows_B[0])])
        length = examples.padded(int(table.lengths[rows_B].max()))
        yield table.batch(rows_B[slice(*rows)], length, examples.pad_id)


def eval_order(examples: Examples, split: str) -> np.ndarray:
    """Returns the rows of a split, shortest first, so that there is little padding."""
    return np.argsort(examples.splits[split].lengths, kind="stable")
