"""Deduplicate: the documents whose hash is in a range, of all parts -> those that came before, in part and place.

    {key}.rows     uint64 [parts + 1], then uint32 rows of documents to leave out: those of part p are the items from
                   the p-th of the numbers up to the next, in order
    {key}.dropped  DROPPED of each block that loses documents; written last

Near duplicates are found in two steps: bands whose hash is in a range, of all parts -> {key}.pairs, PAIR of documents
by the part of the later one; and some parts -> files as above, and {key}.near, PAIR of some that are left out.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mlm.data import near_duplicates, results
from mlm.data.map_part import BLOCK, DOCUMENT, ENTRY, RANGES
from mlm.paths import UPath

DOCUMENTS = 8 * 10**6  # of a task, which takes about 100 bytes for each
BANDS = 2 * 10**6  # of a task, which takes up to 500 bytes for each
EXAMPLES = 10  # of near duplicates, of each task
DROPPED = np.dtype([("part", "<u4"), ("block", "<u4"), ("documents", "<u4"), ("tokens", "<u8")])


class Deduplicate(NamedTuple):
    """A task of `deduplicate`: hash ranges `first` up to `stop` of RANGES."""

    maps: tuple[str, ...]  # the keys of all parts, in order
    first: int
    stop: int
    folder: str
    key: str


def run(
    do: Callable[..., None], maps: tuple[str, ...], *, documents: int, near: float, folder: str
) -> dict[str, tuple[str, ...]]:
    """Runs all tasks; returns the keys of their results by why documents are left out, as fields of a Split.

    Args:
      do: runs tasks that are not done, by their last file.
      documents: of all parts.
      near: the similarity above which they are near duplicates; 0 for any.
    """
    tasks = []
    for first, stop in ranges(documents, DOCUMENTS, RANGES):
        tasks.append(Deduplicate(maps, first, stop, folder, results.key(maps, first)))
    do(deduplicate, tasks, label="deduplicate", last=".dropped")
    keys = {"duplicates": tuple(task.key for task in tasks)}
    if near:
        joins, tasks = [], []
        for first, stop in ranges(documents * near_duplicates.BANDS, BANDS, near_duplicates.RANGES):
            joins.append(Join(maps, first, stop, folder, results.key("join", maps, first)))
        do(join, joins, label="near duplicates", last=".pairs")
        joined = tuple(task.key for task in joins)
        for first, stop in ranges(len(maps), -(-len(maps) // RANGES), len(maps)):
            key = results.key("leave out", maps, first, near)
            tasks.append(LeaveOut(maps, joined, keys["duplicates"], first, stop, near, folder, key))
        do(leave_out, tasks, label="near duplicates", last=".dropped")
        keys["near_duplicates"] = tuple(task.key for task in tasks)
    return keys


def ranges(items: int, most: int, pieces: int) -> list[tuple[int, int]]:
    """Returns (first, stop) of the pieces of each task, for so many items in all and about so many in a task."""
    tasks = min(max(1, -(-items // most)), pieces)
    return list(itertools.pairwise(pieces * number // tasks for number in range(tasks + 1)))


def deduplicate(task: Deduplicate) -> None:
    """Writes the files of some hash ranges."""
    found = []
    for name in task.maps:
        file = UPath(f"{task.folder}/{name}.hashes")
        found.append(results.load_cut(file, ENTRY, RANGES, task.first, task.stop))
    parts = np.repeat(np.arange(len(found), dtype=np.uint32), [len(entries) for entries in found])
    entries = np.concatenate(found)
    order = np.argsort(entries["hash"], kind="stable")
    hashes = entries["hash"][order]
    again = order[1:][hashes[1:] == hashes[:-1]]
    again = again[np.lexsort((entries["row"][again], parts[again]))]
    save(f"{task.folder}/{task.key}", len(found), parts[again], entries[again])


def save(base: str, count: int, parts: np.ndarray, entries: np.ndarray) -> None:
    """Writes the files of documents to leave out, of `count` parts: their parts, in order, rows, blocks and tokens."""
    stops = np.searchsorted(parts, np.arange(1, count + 1))
    results.save_cut(UPath(f"{base}.rows"), entries["row"], stops)
    places, index = np.unique(np.stack([parts, entries["block"]]), axis=1, return_inverse=True)
    dropped = np.zeros(places.shape[1], DROPPED)
    dropped["part"], dropped["block"] = places
    dropped["documents"] = np.bincount(index, minlength=len(dropped))
    dropped["tokens"] = np.bincount(index, weights=entries["tokens"], minlength=len(dropped))
    results.save(UPath(f"{base}.dropped"), dropped)


class Join(NamedTuple):
    """A task of `join`: ranges `first` up to `stop` of the hashes of bands."""

    maps: tuple[str, ...]
    first: int
    stop: int
    folder: str
    key: str


def join(task: Join) -> None:
    """Writes the pairs of some ranges."""
    found = []
    for name in task.maps:
        file = UPath(f"{task.folder}/{name}.bands")
        found.append(results.load_cut(file, near_duplicates.BAND, near_duplicates.RANGES, task.first, task.stop))
    parts = np.repeat(np.arange(len(found), dtype=np.uint32), [len(bands) for bands in found])
    pairs = near_duplicates.join(np.concatenate(found), parts)
    stops = np.searchsorted(pairs["part"], np.arange(1, len(found) + 1))
    results.save_cut(UPath(f"{task.folder}/{task.key}.pairs"), pairs, stops)


class LeaveOut(NamedTuple):
    """A task of `leave_out`: parts `first` up to `stop`."""

    maps: tuple[str, ...]
    joined: tuple[str, ...]  # keys of all results of `join`
    deduplicated: tuple[str, ...]  # and of `deduplicate`
    first: int
    stop: int
    threshold: float
    folder: str
    key: str


def leave_out(task: LeaveOut) -> None:
    """Writes the files of some parts: the documents that are similar to an earlier one, and not the same."""
    near, entries, count = [np.zeros(0, near_duplicates.PAIR)], [np.zeros(0, ENTRY)], len(task.maps)
    for part in range(task.first, task.stop):
        files = (UPath(f"{task.folder}/{name}.pairs") for name in task.joined)
        found = [results.load_cut(file, near_duplicates.PAIR, count, part, part + 1) for file in files]
        pairs = near_duplicates.most_similar(np.concatenate(found), task.threshold)
        pairs = pairs[~np.isin(pairs["row"], left_out(task.folder, task.deduplicated, part, count))]
        base = f"{task.folder}/{task.maps[part]}"
        own = np.zeros(len(pairs), ENTRY)
        own["row"], own["tokens"] = (
            pairs["row"],
            results.load(UPath(f"{base}.documents"), DOCUMENT)["tokens"][pairs["row"]],
        )
        own["block"] = np.searchsorted(results.load(UPath(f"{base}.blocks"), BLOCK)["row"], pairs["row"], "right") - 1
        near.append(pairs)
        entries.append(own)
    near, entries = np.concatenate(near), np.concatenate(entries)
    results.save(UPath(f"{task.folder}/{task.key}.near"), near[:EXAMPLES])
    save(f"{task.folder}/{task.key}", count, near["part"], entries)


def listed(folder: str, keys: dict[str, tuple[str, ...]], names: Sequence[str]) -> dict[str, str]:
    """Returns what the manifest says of some near duplicates, from what `run` returns and the names of parts."""
    found = {}
    for key in keys.get("near_duplicates", ()):
        pairs = results.load(UPath(f"{folder}/{key}.near"), near_duplicates.PAIR)
        for pair, similarity in zip(pairs, near_duplicates.similarity(pairs), strict=True):
            other = f"{names[pair['first_part']]} {pair['first_place']}"
            found[f"{names[pair['part']]} {pair['place']}"] = f"{similarity:.2f} similar to {other}"
    return found


def left_out(folder: str, keys: tuple[str, ...], part: int, parts: int) -> np.ndarray:
    """Returns the rows of a part's documents to leave out, by all tasks."""
    files = (UPath(f"{folder}/{name}.rows") for name in keys)
    found = [results.load_cut(file, np.uint32, parts, part, part + 1) for file in files]
    return np.concatenate([np.zeros(0, np.uint32), *found])
