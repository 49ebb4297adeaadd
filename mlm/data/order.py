"""The order in which records are read: plain arithmetic on (seed, lane, epoch), without a library's random numbers.

A lane is a virtual host. Lane l of n owns shards l, l + n, l + 2n, ... (of one folder, in a mixture); in each epoch it
visits them in a new order, and each visit reads the shard's records in a new order. It supplies the l-th block of rows
of every global batch, so the batches depend on the lanes, never on the hosts that feed them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mlm.config_rules import lanes_of_shares
from mlm.data.manifest import Manifest
from mlm.errors import InputError

_SHARDS = 1
_RECORDS = 2  # keep the hashes for the two orders apart


class Visit(NamedTuple):
    """One reading of one shard: its index in the split, the lane's epoch, and the shard's rows in the order read."""

    shard: int
    epoch: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class Lane:
    """The order of one lane."""

    seed: int
    records: tuple[int, ...]  # in each shard of the split
    lane: int  # among those of its folder
    lanes: int
    # in a mixture, where its shards start and stop in the split
    folder: tuple[int, int | None] = (0, None)

    @property
    def shards(self) -> np.ndarray:
        """The shards that the lane owns."""
        return np.arange(len(self.records))[slice(*self.folder)][self.lane :: self.lanes]

    @property
    def size(self) -> int:
        """Records in an epoch of the lane."""
        return sum(self.records[shard] for shard in self.shards)

    def visits(self, start: int) -> Iterator[Visit]:
        """Yields all visits from the lane's record `start` on, without end; the first omits the rows before it."""
        first, skip = divmod(start, self.size)
        shards = self.shards
        for epoch in itertools.count(first):
            for shard in shards[hash_order(self.seed, _SHARDS, epoch, shards)].tolist():
                count = self.records[shard]
                if skip < count:
                    rows = hash_order(self.seed, _RECORDS, epoch, shard, np.arange(count))
                    yield Visit(shard, epoch, rows[skip:])
                skip = max(skip - count, 0)

    def records_from(self, start: int) -> Iterator[tuple[int, int]]:
        """Yields (record id in the split, epoch) of the lane's records from `start` on, without end."""
        starts = np.cumsum([0, *self.records])
        for shard, epoch, rows in self.visits(start):
            for record in (starts[shard] + rows).tolist():
                yield record, epoch


def make_lanes(manifest: Manifest, split: str, *, seed: int, lanes: int) -> list[Lane]:
    """Returns the lanes of a split; a folder's are spread over the batch, so that all hosts have some of them."""
    records = tuple(shard.records for shard in manifest.splits[split].shards)
    stop = 0
    placed = []
    counts = lanes_of_shares([part.share for part in manifest.parts], lanes)
    for part, count in zip(manifest.parts, counts, strict=True):
        start = stop
        stop = stop + len(part.manifest.splits[split].shards)
        folder_lanes = [Lane(seed, records, lane, count, (start, stop)) for lane in range(count)]
        placed += [((2 * lane.lane + 1) / count, lane) for lane in folder_lanes]
    return [lane for _, lane in sorted(placed, key=lambda place_and_lane: place_and_lane[0])]


def lanes_of(rows: tuple[int, int], *, global_batch: int, lanes: int) -> range:
    """Returns the lanes that supply a host's rows [start, stop), which must be whole lanes or an even part of one."""
    start = rows[0]
    held = rows[1] - rows[0]
    per_lane = global_batch // lanes
    unit = min(held, per_lane)
    if held % unit or per_lane % unit or start % unit:
        raise InputError(
            f"config.data.lanes = {lanes}: a lane has {per_lane} of {global_batch} rows, a host {held}, and neither is "
            f"a multiple of the other; set data.lanes to a multiple or a divisor of {global_batch // held}, the number "
            "of hosts that read different rows."
        )
    return range(start // per_lane, -(-rows[1] // per_lane))


def batch_rows(
    lanes: Sequence[Lane], *, rows_before: int, rows: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (record ids, epochs), int64 [count, rows], of `count` batches of `rows` rows after `rows_before` rows."""
    per_lane = rows // len(lanes)
    streams = (lane.records_from(rows_before // len(lanes)) for lane in lanes)
    pairs = np.array([list(itertools.islice(stream, count * per_lane)) for stream in streams])
    pairs = pairs.reshape(len(lanes), count, per_lane, 2).swapaxes(0, 1).reshape(count, rows, 2)
    return pairs[..., 0], pairs[..., 1]


def hash_order(*parts: int | np.ndarray) -> np.ndarray:
    """Returns the order of an array by hashes of it and the other parts (splitmix64, Steele et al., 2014)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = (state ^ np.asarray(part, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return np.argsort(state, kind="stable")
