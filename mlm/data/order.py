"""The order in which records come: plain arithmetic on (seed, lane, epoch), of no library's random numbers.

A lane is a virtual host. Lane l of n owns shards l, l + n, l + 2n, ...; in each of its epochs it visits them in an
order of their own, and in each visit reads the shard's records in an order of its own. Lane l supplies the l-th block
of rows of every global batch. So the batches depend on the lanes, never on the hosts that carry them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mlm.errors import InputError

# Streams of hashes that must not coincide.
_SHARDS, _RECORDS = 1, 2


@dataclasses.dataclass(frozen=True)
class Visit:
    """One reading of one shard.

    Attributes:
      shard: index in the split.
      epoch: of the lane.
      skip: records of the shard's order that were read before (in an earlier life of the run).
    """

    shard: int
    epoch: int
    skip: int


@dataclasses.dataclass(frozen=True)
class Lane:
    """The order of one lane.

    Attributes:
      seed: of the order.
      records: of each shard of the split.
      lane, lanes: which one, of how many.
    """

    seed: int
    records: tuple[int, ...]
    lane: int
    lanes: int

    @property
    def shards(self) -> np.ndarray:
        """The shards that the lane owns."""
        return np.arange(self.lane, len(self.records), self.lanes)

    @property
    def size(self) -> int:
        """Records in an epoch of the lane."""
        return int(np.asarray(self.records)[self.shards].sum())

    def visit(self, number: int) -> Visit:
        """Returns the lane's visit of that number, counted from the start of the run."""
        epoch, place = divmod(number, len(self.shards))
        return Visit(int(self._shard_order(epoch)[place]), epoch, 0)

    def seek(self, position: int) -> tuple[int, int]:
        """Returns (number of the visit, records to skip in it) of the lane's record at `position`."""
        epoch, rest = divmod(position, self.size)
        ends = np.cumsum(np.asarray(self.records)[self._shard_order(epoch)])
        place = int(np.searchsorted(ends, rest, side="right"))
        return epoch * len(self.shards) + place, rest - int(ends[place - 1] if place else 0)

    def record_order(self, visit: Visit) -> np.ndarray:
        """Returns the rows of the shard in the order of the visit, without those to skip."""
        keys = _hash(self.seed, _RECORDS, visit.epoch, visit.shard, np.arange(self.records[visit.shard]))
        return np.argsort(keys, kind="stable")[visit.skip :]

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (record ids of the split, epochs), int64 [n], of the lane's records from `start` to before `stop`."""
        starts = np.cumsum([0, *self.records])
        number, skip = self.seek(start)
        ids, epochs, left = [], [], stop - start
        while left > 0:
            visit = dataclasses.replace(self.visit(number), skip=skip)
            rows = self.record_order(visit)[:left]
            ids.append(starts[visit.shard] + rows)
            epochs.append(np.full(len(rows), visit.epoch))
            number, skip, left = number + 1, 0, left - len(rows)
        return np.concatenate(ids), np.concatenate(epochs)

    def _shard_order(self, epoch: int) -> np.ndarray:
        return self.shards[np.argsort(_hash(self.seed, _SHARDS, epoch, self.shards), kind="stable")]


def lanes_of(rows: tuple[int, int], *, global_batch: int, lanes: int) -> range:
    """Returns the lanes that supply the rows [start, stop) of a host: whole ones, or one that hosts share evenly.

    Raises:
      InputError: the rows are neither whole lanes nor an even part of one.
    """
    start, held = rows[0], rows[1] - rows[0]
    per_lane, rest = divmod(global_batch, lanes)
    if rest:
        raise InputError(f"config.data.lanes = {lanes}: must divide data.global_batch = {global_batch}.")
    unit = min(held, per_lane)
    if held % unit or per_lane % unit or start % unit:
        raise InputError(
            f"config.data.lanes = {lanes}: a lane has {per_lane} of {global_batch} rows, a host {held}, and neither is "
            f"a multiple of the other; set data.lanes to a multiple or a divisor of {global_batch // held}, the number "
            "of hosts that read different rows."
        )
    return range(start // per_lane, -(-rows[1] // per_lane))


def batch_rows(
    *, seed: int, records: tuple[int, ...], lanes: int, global_batch: int, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (record ids, epochs), int64 [n, B], of the batches `first` to `last`, without reading one.

    Args:
      seed: of the order.
      records: of each shard of the split.
      lanes: virtual hosts.
      global_batch: B, rows of a batch.
      first, last: batches, counted from 1, both included.
    """
    each, count = global_batch // lanes, last - first + 1
    parts = [Lane(seed, records, lane, lanes).read((first - 1) * each, last * each) for lane in range(lanes)]
    ids, epochs = (np.concatenate([part[i].reshape(count, each) for part in parts], axis=1) for i in (0, 1))
    return ids, epochs


def _hash(*parts: int | np.ndarray) -> np.ndarray:
    """Returns 64 bits for each combination of the parts, mixed in in turn (splitmix64, Steele et al., 2014)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = (state ^ np.asarray(part, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
