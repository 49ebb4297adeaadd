"""Searches the rows of shards for repeated documents, and for stretches of 13 tokens that both splits have.

A document is what lies between cls and sep in one row; 13 tokens are an overlap as in GPT-3's study of contamination
(Brown et al., 2020, appendix C). Only hashes are kept, sums that wrap at 2^64: 32 bytes per training document, and as
many per token of a validation row.

Dimensions: B rows, L tokens in a row.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from mlm.data import batches
from mlm.data.manifest import Manifest

STRETCH = 13  # tokens
LEAST_STRETCHES = 8  # in a row that is compared: fewer are a line of boilerplate
SHORTEST = 8  # tokens of a document that is compared: shorter ones are often the same and mean nothing
BATCH = 500  # rows read at once
STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it can be divided by
INVERSE = np.uint64(pow(int(STEP), -1, 2**64))
BITS = 22  # of the table that rules out most hashes in one lookup


@dataclasses.dataclass(frozen=True)
class Repeats:
    """What `find_repeats` found."""

    share: float  # of the training rows that were read
    documents: int  # whole documents in them
    repeated: int  # of these, copies of an earlier one
    example: tuple[int, int, tuple[int, int]] | None  # two records with the same document, its place in the first
    rows: np.ndarray  # validation records that were compared
    overlapping: np.ndarray  # of these, records of which at least half is in training
    pair: tuple[int, int] | None  # (validation record, training record) of the worst of these
    largest: tuple[int, str, int]  # (id, split, record) of the largest token id


def find_repeats(manifest: Manifest, *, max_rows: int, max_validation: int = 5_000) -> Repeats:
    """Reads about `max_rows` rows of the training split and `max_validation` of the validation split."""
    length = manifest.length
    hasher, largest = _Hasher(manifest), (-1, "validation", 0)
    stretches, hashes, spans = [], [], []
    for batch in rows(manifest, "validation", max_validation)[0]:
        stretches.append(hasher.stretches(batch, hasher.prefix_sums(batch["input_ids"])))
        largest = max(largest, _largest(batch, "validation"))
    overlap = _Overlap(*map(np.concatenate, zip(*stretches, strict=True)))
    stream, share = rows(manifest, "train", max_rows)
    for batch in stream:
        sums = hasher.prefix_sums(batch["input_ids"])
        overlap.add(*hasher.stretches(batch, sums))
        starts, stops = _documents(batch["input_ids"], manifest.special_ids["cls"], manifest.special_ids["sep"])
        hashes.append(hasher.hashes(sums, starts, stops))
        records = batch["record_id"][starts // length]
        spans.append(np.stack([records, starts % length, (stops - 1) % length + 1], 1))
        largest = max(largest, _largest(batch, "train"))
    hashes, spans = np.concatenate(hashes), np.concatenate(spans)
    unique, counts = np.unique(hashes, return_counts=True)
    example = None
    if len(unique) < len(hashes):
        one, other = np.flatnonzero(hashes == unique[np.argmax(counts)])[:2]
        record, start, stop = spans[one].tolist()
        example = record, int(spans[other][0]), (start, stop)
    return Repeats(share, len(hashes), len(hashes) - len(unique), example, *overlap.summary(), largest)


def find_held(manifest: Manifest, texts: Sequence[Sequence[int]], *, max_rows: int) -> tuple[np.ndarray, float]:
    """Returns the share of each text's stretches that training rows have, and the share of the rows that were read.

    Args:
      texts: their ids; those of less than STRETCH tokens have the share NaN.
      max_rows: about so many rows of the training split are read.
    """
    hasher, length, found = _Hasher(manifest), manifest.length, []
    cut = [(n, ids[at : at + length]) for n, ids in enumerate(texts) for at in range(0, len(ids), length - STRETCH + 1)]
    for first in range(0, len(cut), BATCH):
        numbers, pieces = zip(*cut[first : first + BATCH], strict=True)
        ids_BxL = np.zeros((len(pieces), length), np.int32)
        attention_BxL = np.arange(length) < np.array([len(piece) for piece in pieces])[:, None]
        ids_BxL[attention_BxL] = np.concatenate(pieces)
        batch = {"input_ids": ids_BxL, "attention_mask": attention_BxL, "record_id": np.array(numbers)}
        found.append(hasher.stretches(batch, hasher.prefix_sums(ids_BxL)))
    overlap = _Overlap(*map(np.concatenate, zip(*found, strict=True)))
    stream, share = rows(manifest, "train", max_rows)
    for batch in stream:
        overlap.add(*hasher.stretches(batch, hasher.prefix_sums(batch["input_ids"])))
    held_N = np.full(len(texts), np.nan)
    numbers, _, _, shares = overlap.shares()
    held_N[numbers] = shares
    return held_N, share


def rows(manifest: Manifest, split: str, most: int) -> tuple[Iterator[batches.Batch], float]:
    """Returns (batches of about `most` rows with their record ids, their share of the split): every n-th shard."""
    records = [shard.records for shard in manifest.splits[split].shards]
    taken = range(0, len(records), max(1, -(-sum(records) // most)))
    return _read(manifest, split, taken), sum(records[index] for index in taken) / sum(records)


def row(manifest: Manifest, split: str, record: int) -> np.ndarray:
    """Returns the ids [L] of one record; reads its shard."""
    stops = np.cumsum([shard.records for shard in manifest.splits[split].shards])
    shard = _read(manifest, split, [int(np.searchsorted(stops, record, side="right"))])
    return next(batch["input_ids"][batch["record_id"] == record][0] for batch in shard if record in batch["record_id"])


def _read(manifest: Manifest, split: str, taken: Sequence[int]) -> Iterator[batches.Batch]:
    for batch in batches.eval_batches(manifest, split=split, batch=BATCH, rows=(0, BATCH), shards=taken):
        valid = batch["valid"] > 0
        yield {key: column[valid] for key, column in batch.items()}


def _largest(batch: batches.Batch, split: str) -> tuple[int, str, int]:
    row_, column = np.unravel_index(np.argmax(batch["input_ids"]), batch["input_ids"].shape)
    return int(batch["input_ids"][row_, column]), split, int(batch["record_id"][row_])


def _documents(ids_BxL: np.ndarray, cls: int, sep: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts, stops) of the tokens of each whole document, in the concatenated rows."""
    flat, length = ids_BxL.ravel(), ids_BxL.shape[1]
    marks = np.flatnonzero((flat == cls) | (flat == sep))
    first, last = marks[:-1], marks[1:]
    whole = (flat[first] == cls) & (flat[last] == sep) & (first // length == last // length)
    whole &= last - first > SHORTEST
    return first[whole] + 1, last[whole]


class _Hasher:
    """Hashes of stretches of tokens, the same at any position: sums of random numbers times powers of STEP."""

    def __init__(self, manifest: Manifest):
        size, count = manifest.vocab_size, BATCH * manifest.length
        self._numbers_V = np.random.default_rng(0).integers(1, 2**63, size, np.uint64)
        self._special_V = np.isin(np.arange(size), manifest.all_special_ids)
        one = np.ones(1, np.uint64)
        self._powers, self._inverses = (np.cumprod(np.append(one, np.full(count, x))) for x in (STEP, INVERSE))

    def prefix_sums(self, ids_BxL: np.ndarray) -> np.ndarray:
        """Returns the sums up to each token of the concatenated rows: uint64 [B L + 1]."""
        terms = self._numbers_V[ids_BxL.ravel()] * self._powers[: ids_BxL.size]
        return np.append(np.zeros(1, np.uint64), np.cumsum(terms))

    def hashes(self, sums: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the hash of each stretch of tokens."""
        return (sums[stops] - sums[starts]) * self._inverses[starts]

    def stretches(self, batch: batches.Batch, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the hashes of all STRETCHes without special tokens, and the record of each."""
        ordinary_BxL = (batch["attention_mask"] > 0) & ~self._special_V[batch["input_ids"]]
        counts = np.pad(np.cumsum(ordinary_BxL, 1), ((0, 0), (1, 0)))
        row_, column = np.nonzero(counts[:, STRETCH:] - counts[:, :-STRETCH] == STRETCH)
        starts = row_ * ordinary_BxL.shape[1] + column
        return self.hashes(sums, starts, starts + STRETCH), batch["record_id"][row_]


class _Overlap:
    """Which stretches of the validation rows are in training, too."""

    def __init__(self, hashes: np.ndarray, records: np.ndarray):
        self._hashes, self._records = hashes, records
        self._sorted = np.unique(hashes)
        self._training = np.full(len(self._sorted), -1)  # a training record that has the stretch
        self._table = np.zeros(1 << BITS, bool)
        self._table[self._sorted >> np.uint64(64 - BITS)] = True

    def add(self, hashes: np.ndarray, records: np.ndarray) -> None:
        """Compares the stretches of training rows."""
        near = self._table[hashes >> np.uint64(64 - BITS)]
        hashes, records = hashes[near], records[near]
        index = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        same = self._sorted[index] == hashes
        self._training[index[same]] = records[same]

    def _found(self) -> np.ndarray:
        """Returns a training record that has each of the stretches, -1 if none has."""
        return self._training[np.searchsorted(self._sorted, self._hashes)]

    def shares(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns the records, how many stretches each has, which is each stretch's, and their share in training."""
        records, index, count = np.unique(self._records, return_inverse=True, return_counts=True)
        return records, count, index, np.bincount(index, weights=self._found() >= 0) / np.maximum(count, 1)

    def summary(self) -> tuple[np.ndarray, np.ndarray, tuple[int, int] | None]:
        """Returns (records compared, records that overlap, the worst pair)."""
        records, count, index, shares = self.shares()
        compared, training = count >= LEAST_STRETCHES, self._found()
        shares = np.where(compared, shares, 0)
        if shares.max(initial=0) < 0.5:
            return records[compared], records[:0], None
        worst = np.argmax(shares)
        matches = training[(index == worst) & (training >= 0)]
        pair = int(records[worst]), int(np.bincount(matches).argmax())
        return records[compared], records[shares >= 0.5], pair
