"""Searches the rows of shards for repeated documents, and for stretches of 13 tokens that held-out splits share.

A document is what lies between cls and sep in one row; 13 tokens are an overlap as in GPT-3's study of contamination
(Brown et al., 2020, appendix C). Only 64-bit hashes are kept.

Dimensions: B rows, L tokens in a row, T tokens one after the other.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from mlm.data import batches
from mlm.data.manifest import Manifest
from mlm.data.stretches import StretchIndex, hash_stretches

LEAST_STRETCHES = 8  # in a row that is compared: fewer are a line of boilerplate
# tokens of a document that is compared: shorter ones are often the same and mean nothing
SHORTEST = 8
BATCH = 500  # rows read at once


class Overlap(NamedTuple):
    """What a held-out split and training share."""

    rows: np.ndarray  # records that were compared
    overlapping: np.ndarray  # of these, records of which at least half is in training
    pair: tuple[int, int] | None  # (record of the split, training record) of the worst of these


@dataclasses.dataclass(frozen=True)
class Repeats:
    """What `find_repeats` found."""

    share: float  # of the training rows that were read
    documents: int  # whole documents in them
    repeated: int  # of these, copies of an earlier one
    example: int | None  # a training record with the most frequent one
    overlaps: dict[str, Overlap]  # of the held-out splits
    unknown: float  # share of unknown tokens among the ordinary ones of the training rows


def find_repeats(manifest: Manifest, *, max_rows: int, max_held_out: int = 5_000) -> Repeats:
    """Reads about `max_rows` rows of the training split and `max_held_out` of each other split."""
    overlaps = {}
    hashes = []
    records = []
    for split in manifest.splits.keys() - {"train"}:
        stream, _ = rows(manifest, split, max_held_out)
        stretches = [_stretches_of_rows(manifest, batch) for batch in stream]
        overlaps[split] = _Overlap(*map(np.concatenate, zip(*stretches, strict=True)))
    stream, share = rows(manifest, "train", max_rows)
    known = unknown = 0
    for batch in stream:
        stretches = _stretches_of_rows(manifest, batch)
        for overlap in overlaps.values():
            overlap.add(*stretches)
        ids_BxL = batch["input_ids"]
        unknown += int(np.sum(ids_BxL == manifest.special_ids.get("unk", -1)))
        known += int(np.sum(~np.isin(ids_BxL, manifest.all_special_ids)))
        starts, stops = _documents(
            ids_BxL, manifest.special_ids["cls"], manifest.special_ids["sep"]
        )
        flat = ids_BxL.ravel()
        digests = (
            xxh3_64_intdigest(flat[start:stop].tobytes())
            for start, stop in zip(starts, stops, strict=True)
        )
        hashes.append(np.fromiter(digests, np.uint64, len(starts)))
        records.append(batch["record_id"][starts // manifest.length])
    hashes = np.concatenate(hashes)
    unique, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    return Repeats(
        share=share,
        documents=len(hashes),
        repeated=len(hashes) - len(unique),
        example=int(np.concatenate(records)[first[np.argmax(counts)]]) if len(hashes) else None,
        overlaps={
            split: overlaps[split].summary() for split in manifest.splits if split in overlaps
        },
        unknown=unknown / max(known + unknown, 1),
    )


def find_held(
    manifest: Manifest, texts: Sequence[Sequence[int]], *, max_rows: int
) -> tuple[np.ndarray, float]:
    """Returns the share of each text's stretches that about `max_rows` training rows have, and the share of these rows.

    A text without a stretch has the share NaN.
    """
    numbers_T = np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])
    overlap = _Overlap(*_stretches(manifest, np.concatenate(texts).astype(np.int64), numbers_T))
    stream, share = rows(manifest, "train", max_rows)
    for batch in stream:
        overlap.add(*_stretches_of_rows(manifest, batch))
    held_N = np.full(len(texts), np.nan)
    numbers, _, shares = overlap.shares()
    held_N[numbers] = shares
    return held_N, share


def rows(manifest: Manifest, split: str, max_rows: int) -> tuple[Iterator[batches.Batch], float]:
    """Returns (batches of about `max_rows` rows with their record ids, their share of the split): every n-th shard."""
    records = [shard.records for shard in manifest.splits[split].shards]
    taken = range(0, len(records), max(1, -(-sum(records) // max_rows)))
    return _read(manifest, split, taken), sum(records[index] for index in taken) / sum(records)


def row(manifest: Manifest, split: str, record: int) -> np.ndarray:
    """Returns the ids [L] of one record; reads its shard."""
    stops = np.cumsum([shard.records for shard in manifest.splits[split].shards])
    shard = _read(manifest, split, [int(np.searchsorted(stops, record, side="right"))])
    return next(
        batch["input_ids"][batch["record_id"] == record][0]
        for batch in shard
        if record in batch["record_id"]
    )


def _read(manifest: Manifest, split: str, taken: Sequence[int]) -> Iterator[batches.Batch]:
    for batch in batches.eval_batches(
        manifest, split=split, batch=BATCH, rows=(0, BATCH), shards=taken
    ):
        valid = batch["valid"] > 0
        yield {key: column[valid] for key, column in batch.items()}


def _documents(ids_BxL: np.ndarray, cls: int, sep: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts, stops) of the tokens of each whole document, in the concatenated rows."""
    flat = ids_BxL.ravel()
    length = ids_BxL.shape[1]
    marks = np.flatnonzero((flat == cls) | (flat == sep))
    first = marks[:-1]
    last = marks[1:]
    whole = (flat[first] == cls) & (flat[last] == sep) & (first // length == last // length)
    whole &= last - first > SHORTEST
    return first[whole] + 1, last[whole]


def _stretches_of_rows(manifest: Manifest, batch: batches.Batch) -> tuple[np.ndarray, np.ndarray]:
    ids_BxL = batch["input_ids"]
    records_BxL = np.broadcast_to(batch["record_id"][:, None], ids_BxL.shape)
    return _stretches(manifest, ids_BxL.ravel(), records_BxL.ravel())


def _stretches(
    manifest: Manifest, ids_T: np.ndarray, records_T: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of all STRETCHes of tokens that are not special, and the record of each."""
    ordinary_T = ~np.isin(ids_T, manifest.all_special_ids)
    pieces_T = np.cumsum(~ordinary_T) + np.cumsum(np.diff(records_T, prepend=0) != 0)
    numbers_T = np.random.default_rng(0).integers(1, 2**63, manifest.vocab_size, np.uint64)[ids_T]
    hashes, first = hash_stretches(numbers_T[ordinary_T], pieces_T[ordinary_T])
    return hashes, records_T[ordinary_T][first]


class _Overlap:
    """Which stretches of some rows are in training, too."""

    def __init__(self, hashes: np.ndarray, records: np.ndarray):
        self._records = records
        self._index = StretchIndex(hashes)
        self._place = self._index.find(hashes)
        # a training record that has the stretch
        self._training = np.full(len(self._index.hashes), -1)

    def add(self, hashes: np.ndarray, records: np.ndarray) -> None:
        """Compares the stretches of training rows."""
        places = self._index.find(hashes)
        self._training[places[places >= 0]] = records[places >= 0]

    def shares(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the records, how many stretches each has, and the share of these in training."""
        records, index, count = np.unique(self._records, return_inverse=True, return_counts=True)
        return (
            records,
            count,
            np.bincount(index, weights=self._training[self._place] >= 0) / np.maximum(count, 1),
        )

    def summary(self) -> Overlap:
        """Returns what the rows share with training."""
        records, count, shares = self.shares()
        compared = count >= LEAST_STRETCHES
        shares = np.where(compared, shares, 0)
        if shares.max(initial=0) < 0.5:
            return Overlap(records[compared], records[:0], None)
        worst = records[np.argmax(shares)]
        matches = self._training[self._place][self._records == worst]
        pair = int(worst), int(np.bincount(matches[matches >= 0]).argmax())
        return Overlap(records[compared], records[shares >= 0.5], pair)
