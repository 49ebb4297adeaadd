"""The order of records: each once an epoch of its lane, from anywhere in a run, never another than the pinned one."""

import itertools

import pytest

from mlm.data.order import Lane, Visit, lanes_of
from mlm.errors import InputError

RECORDS = (5, 4, 7, 5, 1, 6, 6, 0, 3, 4)


def walk(lane: Lane, start: int, count: int) -> list[tuple[int, int, int]]:
    """(epoch, shard, row) of `count` records of a lane, from its record `start` on."""
    found = []
    stream = lane.visits(start)
    while len(found) < count:
        shard, epoch, rows = next(stream)
        assert len(rows), "no record is read only to be thrown away"
        found += [(epoch, shard, int(row)) for row in rows]
    return found[:count]


def visits(lane: Lane, count: int) -> list[Visit]:
    return list(itertools.islice(lane.visits(0), count))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_every_record_once_in_each_epoch_of_its_lane(lanes):
    found = []
    for number in range(lanes):
        lane = Lane(0, RECORDS, number, lanes)
        assert lane.size == sum(RECORDS[number::lanes])
        records = walk(lane, 0, 3 * lane.size)
        epochs = [epoch for epoch, _, _ in records]
        assert epochs == sorted(epochs) and len(set(records)) == 3 * lane.size
        found += records
    everything = {(shard, row) for shard, count in enumerate(RECORDS) for row in range(count)}
    assert set(found) == {(epoch, *record) for epoch in range(3) for record in everything}


def test_seek_equals_walk():
    lane = Lane(3, RECORDS, 1, 3)
    records = walk(lane, 0, 4 * lane.size)
    for position in range(3 * lane.size):
        assert walk(lane, position, lane.size) == records[position : position + lane.size]


def test_seed_epoch_shard_and_lane_change_the_order():
    lanes = [Lane(seed, (1000,) * 8, lane, 2) for seed in (0, 1) for lane in (0, 1)]
    orders = {tuple(visit.rows) for lane in lanes for visit in visits(lane, 8)}
    assert len(orders) == 4 * 8
    shards = [visit.shard for visit in visits(lanes[0], 24)]
    assert len({tuple(shards[epoch : epoch + 4]) for epoch in range(0, 24, 4)}) > 3


def test_the_order_is_pinned():
    """These numbers may change only if every run that was ever started may go on with other batches."""
    found = visits(Lane(7, RECORDS, 0, 2), 10)
    assert [visit.shard for visit in found] == [0, 2, 4, 8, 6, 0, 8, 6, 2, 4]
    assert found[8][:2] == (2, 1) and found[8].rows.tolist() == [5, 3, 4, 1, 0, 2, 6]


@pytest.mark.parametrize(
    ("rows", "lanes"),
    [((0, 24), range(6)), ((8, 16), range(2, 4)), ((20, 24), [5]), ((6, 8), [1]), ((23, 24), [5])],
)
def test_lanes_of_a_host(rows, lanes):
    """Of six lanes of four rows: all, some, one, a part of one."""
    assert list(lanes_of(rows, global_batch=24, lanes=6)) == list(lanes)


def test_rows_that_lanes_do_not_fit():
    for first, stop in ((0, 6), (2, 6), (3, 6), (6, 10)):
        words = f"lanes = 6: .* 4 of 24 rows, a host {stop - first},"
        with pytest.raises(InputError, match=words):
            lanes_of((first, stop), global_batch=24, lanes=6)
