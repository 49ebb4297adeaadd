"""Deduplicate: the documents whose hash is in a range, of all parts -> those that came before, in part and place.

{key}.rows     uint64 [parts + 1], then uint32 rows of documents to leave out: those of part p are the items from
the p-th of the numbers up to the next, in order
{key}.dropped  DROPPED of each block that loses documents; written last
"""

import itertools
from typing import NamedTuple

import numpy as np

from mlm.data import results
from mlm.data.map_part import ENTRY, RANGES
from mlm.paths import UPath

DOCUMENTS = 8 * 10**6  # of a task, which takes about 100 bytes for each
DROPPED = np.dtype([("part", "<u4"), ("block", "<u4"), ("documents", "<u4"), ("tokens", "<u8")])


class Deduplicate(NamedTuple):
    """A task of `deduplicate`: hash ranges `first` up to `stop` of RANGES."""

    maps: tuple[str, ...]  # the keys of all parts, in order
    first: int
    stop: int
    folder: str
    key: str


def ranges(documents: int) -> list[tuple[int, int]]:
    """Returns (first, stop) of the hash ranges of each task, for so many documents in all."""
    tasks = min(max(1, -(-documents // DOCUMENTS)), RANGES)
    bounds = [RANGES * number // tasks for number in range(tasks + 1)]
    return list(itertools.pairwise(bounds))


def deduplicate(task: Deduplicate) -> None:
    """Writes the files of some hash ranges."""
    found = []
    for name in task.maps:
        file = UPath(f"{task.folder}/{name}.hashes")
        start, stop = results.load(file, np.uint64, task.first, task.stop - task.first + 1)[[0, -1]].tolist()
        found.append(results.load(file, ENTRY, start, stop - start, after=8 * (RANGES + 1)))
    parts = np.repeat(np.arange(len(found), dtype=np.uint32), [len(entries) for entries in found])
    entries = np.concatenate(found)
    order = np.argsort(entries["hash"], kind="stable")
    hashes = entries["hash"][order]
    again = order[1:][hashes[1:] == hashes[:-1]]
    again = again[np.lexsort((entries["row"][again], parts[again]))]
    parts, entries = parts[again], entries[again]
    starts = np.searchsorted(parts, np.arange(len(found) + 1)).astype(np.uint64)
    results.save(UPath(f"{task.folder}/{task.key}.rows"), starts, entries["row"])
    places, index = np.unique(np.stack([parts, entries["block"]]), axis=1, return_inverse=True)
    dropped = np.zeros(places.shape[1], DROPPED)
    dropped["part"], dropped["block"] = places
    dropped["documents"] = np.bincount(index, minlength=len(dropped))
    dropped["tokens"] = np.bincount(index, weights=entries["tokens"], minlength=len(dropped))
    results.save(UPath(f"{task.folder}/{task.key}.dropped"), dropped)


def left_out(folder: str, keys: tuple[str, ...], part: int, parts: int) -> np.ndarray:
    """Returns the rows of a part's documents to leave out, by all tasks."""
    found = [np.zeros(0, np.uint32)]
    for name in keys:
        file = UPath(f"{folder}/{name}.rows")
        start, stop = results.load(file, np.uint64, part, 2).tolist()
        found.append(results.load(file, np.uint32, start, stop - start, after=8 * (parts + 1)))
    return np.concatenate(found)
