"""Leave out documents that came before, in the order of parts and places.

{key}.duplicates   of some ranges of the hash: ENTRY of the documents to leave out, by part
{key}-{part}.rows  uint32 rows of the part's documents to leave out, in order, if there are any
{key}.dropped      of some parts: DROPPED of each block that loses documents; written last
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mlm.data import results
from mlm.data.map_part import ENTRY, RANGES
from mlm.paths import UPath

DOCUMENTS = 8 * 10**6  # of a task of `find_duplicates`, which takes about 100 bytes for each
DECIDED = 5 * 10**5  # documents of one of `leave_out`
DROPPED = np.dtype([("part", "<u4"), ("block", "<u4"), ("documents", "<u4"), ("tokens", "<u8")])


class DuplicatesTask(NamedTuple):
    """A task of `find_duplicates`: ranges `first` up to `stop` of the hashes of documents."""

    maps: tuple[str, ...]  # the keys of all parts, in order
    first: int
    stop: int
    folder: str
    key: str


class LeaveOutTask(NamedTuple):
    """A task of `leave_out`: parts `first` up to `stop`."""

    parts: int  # in all
    first: int
    stop: int
    duplicates: tuple[str, ...]  # keys of the results of `find_duplicates`
    folder: str
    key: str

    def rows(self, part: int) -> str:
        """Returns the name of the file of a part's rows."""
        return f"{self.key}-{part}.rows"


def deduplicate(
    do: Callable[..., None], maps: tuple[str, ...], *, documents: int, folder: str
) -> list[LeaveOutTask]:
    """Runs all tasks by `do`, unless their last file is there; returns those of `leave_out`.

    There are so many `documents` in all.
    """
    maps_key = results.key(maps)
    tasks = []
    for first, stop in ranges(documents, DOCUMENTS, RANGES):
        key = results.key("deduplicate", maps_key, [first, stop])
        tasks.append(DuplicatesTask(maps, first, stop, folder, key))
    do(find_duplicates, tasks, label="deduplicate", last=".duplicates")
    duplicates = tuple(task.key for task in tasks)
    leaving = []
    for first, stop in ranges(documents, DECIDED, len(maps)):
        key = results.key("leave out", maps_key, first, stop)
        leaving.append(LeaveOutTask(len(maps), first, stop, duplicates, folder, key))
    do(leave_out, leaving, label="leave out", last=".dropped")
    return leaving


def ranges(items: int, items_per_task: int, pieces: int) -> list[tuple[int, int]]:
    """Returns (first, stop) of the pieces of each task, for so many items in all and about so many in a task."""
    tasks = min(max(1, -(-items // items_per_task)), pieces)
    return list(itertools.pairwise(pieces * number // tasks for number in range(tasks + 1)))


def find_duplicates(task: DuplicatesTask) -> None:
    """Writes the duplicates of some ranges."""
    by_part = [np.concatenate(pieces) for pieces in _load(task, task.maps, "hashes", RANGES)]
    entries = np.concatenate(by_part)
    parts = np.repeat(np.arange(len(by_part), dtype=np.uint32), list(map(len, by_part)))
    # Stable, so that of equal hashes the first in the order of parts and places comes first: it stays.
    order = np.argsort(entries["hash"], kind="stable")
    hashes = entries["hash"][order]
    again = order[1:][hashes[1:] == hashes[:-1]]
    again = again[np.lexsort((entries["row"][again], parts[again]))]
    results.save_cut(
        UPath(f"{task.folder}/{task.key}.duplicates"), entries[again], parts[again], len(task.maps)
    )


def leave_out(task: LeaveOutTask) -> None:
    """Writes the files of some parts."""
    dropped = [np.zeros(0, DROPPED)]
    rows = {}
    duplicates_of_parts = zip(*_load(task, task.duplicates, "duplicates", task.parts), strict=True)
    for part, duplicates in enumerate(duplicates_of_parts, task.first):
        entries = np.concatenate(duplicates)
        blocks, block_of_entry = np.unique(entries["block"], return_inverse=True)
        table = np.zeros(len(blocks), DROPPED)
        table["part"] = part
        table["block"] = blocks
        table["documents"] = np.bincount(block_of_entry, minlength=len(blocks))
        table["tokens"] = np.bincount(
            block_of_entry, weights=entries["tokens"], minlength=len(blocks)
        )
        dropped.append(table)
        if len(entries):
            rows[UPath(f"{task.folder}/{task.rows(part)}")] = np.sort(entries["row"])
    list(results.at_once(lambda file: results.save(file, rows[file]), rows))
    results.save(UPath(f"{task.folder}/{task.key}.dropped"), np.concatenate(dropped))


def _load(
    task: DuplicatesTask | LeaveOutTask, keys: tuple[str, ...], kind: str, pieces: int
) -> Iterator[list[np.ndarray]]:
    """Yields the pieces `first` up to `stop` of each of some files of ENTRY, which have so many pieces."""
    load = functools.partial(
        results.load_cut, dtype=ENTRY, pieces=pieces, first=task.first, stop=task.stop
    )
    return results.at_once(load, (UPath(f"{task.folder}/{key}.{kind}") for key in keys))
