"""A look through the rows of shards for what comes twice: documents, and stretches of 13 tokens.

A document is what lies between cls and sep in one row. A stretch of 13 tokens that is in both splits is what GPT-3's
authors took for an overlap (Brown et al., 2020, appendix C). Tokens are hashed with sums that wrap at 2^64, so that a
document of the training split takes 32 bytes of memory, a token of a validation row as many, and the text none.

Dimensions: B rows, L tokens in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from mlm.data import batches
from mlm.data.manifest import Manifest

STRETCH = 13  # tokens
LEAST_STRETCHES = 8  # in a row that is judged: fewer are a line of boilerplate
SHORTEST = 8  # tokens of a document that is judged: shorter ones are often the same and mean nothing
BATCH = 500  # rows read at once
STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it can be divided by
INVERSE = np.uint64(pow(int(STEP), -1, 2**64))
BITS = 22  # of the table that tells most strange hashes in one look


def rows(manifest: Manifest, split: str, most: int) -> tuple[Iterator[batches.Batch], float]:
    """Returns (batches of about `most` rows, the share that they are): all of every n-th shard, which are fair samples.

    Their record ids are those of the whole split.
    """
    shards = manifest.splits[split].shards
    every = max(1, -(-manifest.splits[split].records // most))
    taken = range(0, len(shards), every)
    share = sum(shards[i].records for i in taken) / manifest.splits[split].records
    return _read(manifest, split, list(taken)), share


def row(manifest: Manifest, split: str, record: int) -> np.ndarray:
    """Returns the ids [L] of one record; reads its shard."""
    starts = np.cumsum([0, *(shard.records for shard in manifest.splits[split].shards)])
    shard = int(np.searchsorted(starts, record, side="right")) - 1
    for batch in _read(manifest, split, [shard]):
        found = batch["input_ids"][batch["record_id"] == record]
        if len(found):
            return found[0]
    raise IndexError(record)


def _read(manifest: Manifest, split: str, taken: list[int]) -> Iterator[batches.Batch]:
    """Yields the rows of some shards in order, with their record ids in the whole split."""
    shards = manifest.splits[split].shards
    starts = np.cumsum([0, *(shard.records for shard in shards)])
    part = dataclasses.replace(manifest.splits[split], shards=tuple(shards[index] for index in taken))
    firsts = np.cumsum([0, *(shard.records for shard in part.shards)])
    alone = dataclasses.replace(manifest, splits={split: part})
    for batch in batches.eval_batches(alone, split=split, batch=BATCH, rows=(0, BATCH)):
        valid = batch["valid"] > 0
        batch = {key: column[valid] for key, column in batch.items()}
        place = np.searchsorted(firsts, batch["record_id"], side="right") - 1
        yield batch | {"record_id": starts[np.asarray(taken)[place]] + batch["record_id"] - firsts[place]}


class Hasher:
    """Hashes of stretches of tokens in a batch of rows, the same wherever they stand."""

    def __init__(self, vocab_size: int, length: int):
        """Makes a random number for each token, and the powers for a batch of rows of `length`."""
        self._numbers_V = np.random.default_rng(0).integers(1, 2**63, vocab_size, np.uint64)
        ones = np.ones(BATCH * length, np.uint64)
        with np.errstate(over="ignore"):
            self._powers = np.cumprod(np.concatenate([ones[:1], ones * STEP]))
            self._inverse = np.cumprod(np.concatenate([ones[:1], ones * INVERSE]))

    def sums(self, ids_BxL: np.ndarray) -> np.ndarray:
        """Returns the sums up to each token of the rows put end to end: uint64 [B L + 1]."""
        flat = ids_BxL.ravel()
        with np.errstate(over="ignore"):
            terms = self._numbers_V[flat] * self._powers[: len(flat)]
            return np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])

    def hashes(self, sums: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the hash of each stretch of tokens."""
        with np.errstate(over="ignore"):
            return (sums[stops] - sums[starts]) * self._inverse[starts]


def documents(ids_BxL: np.ndarray, cls: int, sep: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts, stops) of the tokens of each whole document, in the rows put end to end."""
    flat, length = ids_BxL.ravel(), ids_BxL.shape[1]
    marks = np.flatnonzero((flat == cls) | (flat == sep))
    first, last = marks[:-1], marks[1:]
    whole = (flat[first] == cls) & (flat[last] == sep) & (first // length == last // length)
    whole &= last - first > SHORTEST
    return first[whole] + 1, last[whole]


def stretches(ordinary_BxL: np.ndarray) -> np.ndarray:
    """Returns the starts of all stretches without a special token, in the rows put end to end."""
    rows_, length = ordinary_BxL.shape
    counts = np.concatenate([np.zeros((rows_, 1), np.int64), np.cumsum(ordinary_BxL, 1)], 1)
    row_, place = np.nonzero(counts[:, STRETCH:] - counts[:, :-STRETCH] == STRETCH)
    return row_ * length + place


@dataclasses.dataclass(frozen=True)
class Found:
    """What a look through the rows has found.

    Attributes:
      share: of the training rows that were looked at.
      documents, repeated: whole documents in them, and those of them that had come before.
      example: records of the training split that hold the same document, and where it lies in the first; None if none.
      rows, overlapping: validation rows that were judged, and those of them of which at least half is in training.
      pair: (validation record, training record) of the worst of these; None if none.
      largest: (id, split, record) of the largest token id.
    """

    share: float
    documents: int
    repeated: int
    example: tuple[int, int, tuple[int, int]] | None
    rows: int
    overlapping: int
    pair: tuple[int, int] | None
    largest: tuple[int, str, int]


class _Validation:
    """The stretches of the validation rows, and which of them training has."""

    def __init__(self, manifest: Manifest, hasher: Hasher, special_V: np.ndarray, most: int):
        hashes, owners = [], []
        self.largest = (-1, "validation", 0)
        for batch in rows(manifest, "validation", most)[0]:
            ids_BxL = batch["input_ids"]
            starts = stretches((batch["attention_mask"] > 0) & ~special_V[ids_BxL])
            hashes.append(hasher.hashes(hasher.sums(ids_BxL), starts, starts + STRETCH))
            owners.append(batch["record_id"][starts // ids_BxL.shape[1]])
            self.largest = max(self.largest, _largest(batch, "validation"))
        self._hashes, self._owner = np.concatenate(hashes), np.concatenate(owners)
        self._sorted = np.unique(self._hashes)
        self._where = np.full(len(self._sorted), -1)  # a training record that has the stretch
        self._table = np.zeros(1 << BITS, bool)
        self._table[self._sorted >> np.uint64(64 - BITS)] = True

    def meet(self, hashes: np.ndarray, records: np.ndarray) -> None:
        """Notes the stretches of training rows."""
        near = self._table[hashes >> np.uint64(64 - BITS)]
        if near.any() and len(self._sorted):
            hashes, records = hashes[near], records[near]
            place = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
            same = self._sorted[place] == hashes
            self._where[place[same]] = records[same]

    def judge(self) -> tuple[int, int, tuple[int, int] | None]:
        """Returns (rows judged, rows that overlap, the worst pair)."""
        where = self._where[np.searchsorted(self._sorted, self._hashes)] if len(self._hashes) else self._hashes
        owners, index = np.unique(self._owner, return_inverse=True)
        count, met = np.bincount(index), np.bincount(index, weights=where >= 0)
        judged = count >= LEAST_STRETCHES
        shares = np.where(judged, met / np.maximum(count, 1), 0)
        if not judged.any() or shares.max() < 0.5:
            return int(judged.sum()), 0, None
        worst = int(np.argmax(shares))
        records = where[(index == worst) & (where >= 0)]
        pair = int(owners[worst]), int(np.bincount(records).argmax())
        return int(judged.sum()), int((shares >= 0.5).sum()), pair


def look(manifest: Manifest, special_ids: tuple[int, ...], most: int, most_validation: int = 5_000) -> Found:
    """Reads about `most` rows of the training split and about `most_validation` of the validation split.

    Raises:
      DamageError: as `batches.eval_batches`.
    """
    length, size = manifest.length, manifest.vocab_size
    special_V = np.zeros(size, bool)
    special_V[[each for each in special_ids if each < size]] = True
    hasher = Hasher(size, length)
    validation = _Validation(manifest, hasher, special_V, most_validation)
    largest, hashes, places = validation.largest, [], []
    stream, share = rows(manifest, "train", most)
    for batch in stream:
        ids_BxL, records = batch["input_ids"], batch["record_id"]
        sums = hasher.sums(ids_BxL)
        starts = stretches((batch["attention_mask"] > 0) & ~special_V[ids_BxL])
        validation.meet(hasher.hashes(sums, starts, starts + STRETCH), records[starts // length])
        starts, stops = documents(ids_BxL, manifest.special_ids["cls"], manifest.special_ids["sep"])
        hashes.append(hasher.hashes(sums, starts, stops))
        places.append(np.stack([records[starts // length], starts % length, (stops - 1) % length + 1], 1))
        largest = max(largest, _largest(batch, "train"))
    hashes, places = np.concatenate(hashes), np.concatenate(places)
    unique, counts = np.unique(hashes, return_counts=True)
    example = None
    if len(unique) < len(hashes):
        most_often = int(np.argmax(counts))
        one, other = np.flatnonzero(hashes == unique[most_often])[:2]
        record, start, stop = places[one].tolist()
        example = record, int(places[other][0]), (start, stop)
    judged = validation.judge()
    return Found(share, len(hashes), len(hashes) - len(unique), example, *judged, largest)


def _largest(batch: batches.Batch, split: str) -> tuple[int, str, int]:
    place = int(np.argmax(batch["input_ids"]))
    return int(batch["input_ids"].flat[place]), split, int(batch["record_id"][place // batch["input_ids"].shape[1]])
