"""Leave out documents that came before, in the order of parts and places.

{key}.duplicates   of some ranges of the hash: ENTRY of the documents to leave out, by part
{key}.pairs        of some ranges of the hash: near_duplicates.PAIR, by the part of the later document
{key}-{part}.rows  uint32 rows of the part's documents to leave out, in order, if there are any
{key}.near         of some parts: PAIR of some near duplicates
{key}.dropped      of some parts: DROPPED of each block that loses documents; written last
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mlm.data import near_duplicates, results
from mlm.data.map_part import BLOCK, DOCUMENT, ENTRY, RANGES
from mlm.paths import UPath

DOCUMENTS = 8 * 10**6  # of a task of `deduplicate`, which takes about 100 bytes for each
BANDS = 2 * 10**6  # of one of `join`, which takes up to 500 bytes for each
DECIDED = 5 * 10**5  # documents of one of `leave_out`
EXAMPLES = 10  # of near duplicates, of each task
WHY = ("duplicates", "near_duplicates")  # the counts of a Split
DROPPED = np.dtype([("part", "<u4"), ("block", "<u4"), ("why", "<u4"), ("documents", "<u4"), ("tokens", "<u8")])


class Ranges(NamedTuple):
    """A task of `deduplicate` or `join`: ranges `first` up to `stop` of the hashes of documents or bands."""

    maps: tuple[str, ...]  # the keys of all parts, in order
    first: int
    stop: int
    folder: str
    key: str


class LeaveOut(NamedTuple):
    """A task of `leave_out`: parts `first` up to `stop`."""

    maps: tuple[str, ...]  # the keys of these parts
    first: int
    stop: int
    parts: int  # in all
    duplicates: tuple[str, ...]  # keys of the results of `deduplicate`
    joined: tuple[str, ...]  # and of `join`
    near: float  # the similarity above which documents are near duplicates
    folder: str
    key: str

    def rows(self, part: int) -> str:
        """Returns the name of the file of a part's rows."""
        return f"{self.key}-{part}.rows"


def run(do: Callable[..., None], maps: tuple[str, ...], *, documents: int, near: float, folder: str) -> list[LeaveOut]:
    """Runs all tasks by `do`, unless their last file is there; returns those of `leave_out`.

    There are so many `documents` in all; those whose similarity is above `near`, if it is not 0, are near duplicates.
    """
    maps_key = results.key(maps)

    def run_ranges(function: Callable, last: str, first_and_stop: list[tuple[int, int]]) -> tuple[str, ...]:
        name, tasks = function.__name__, []
        for first, stop in first_and_stop:
            tasks.append(Ranges(maps, first, stop, folder, results.key(name, maps_key, [first, stop])))
        do(function, tasks, label=name, last=last)
        return tuple(task.key for task in tasks)

    duplicates, joined = run_ranges(deduplicate, ".duplicates", ranges(documents, DOCUMENTS, RANGES)), ()
    if near:
        joined = run_ranges(join, ".pairs", ranges(documents * near_duplicates.BANDS, BANDS, RANGES))
    tasks = []
    for first, stop in ranges(documents, DECIDED, len(maps)):
        key = results.key("leave out", maps_key, first, stop, near)
        tasks.append(LeaveOut(maps[first:stop], first, stop, len(maps), duplicates, joined, near, folder, key))
    do(leave_out, tasks, label="leave out", last=".dropped")
    return tasks


def ranges(items: int, items_per_task: int, pieces: int) -> list[tuple[int, int]]:
    """Returns (first, stop) of the pieces of each task, for so many items in all and about so many in a task."""
    tasks = min(max(1, -(-items // items_per_task)), pieces)
    return list(itertools.pairwise(pieces * number // tasks for number in range(tasks + 1)))


def deduplicate(task: Ranges) -> None:
    """Writes the duplicates of some ranges."""
    parts, entries = _of_ranges(task, "hashes", ENTRY)
    order = np.argsort(entries["hash"], kind="stable")
    hashes = entries["hash"][order]
    again = order[1:][hashes[1:] == hashes[:-1]]
    again = again[np.lexsort((entries["row"][again], parts[again]))]
    results.save_cut(UPath(f"{task.folder}/{task.key}.duplicates"), entries[again], parts[again], len(task.maps))


def join(task: Ranges) -> None:
    """Writes the pairs of some ranges."""
    parts, bands = _of_ranges(task, "bands", near_duplicates.BAND)
    pairs = near_duplicates.join(bands, parts)
    results.save_cut(UPath(f"{task.folder}/{task.key}.pairs"), pairs, pairs["part"], len(task.maps))


def _of_ranges(task: Ranges, kind: str, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the part of each item of a task's ranges, and the items, in the order of the parts."""
    by_part = [np.concatenate(pieces) for pieces in _load(task, task.maps, kind, dtype, RANGES)]
    return np.repeat(np.arange(len(by_part), dtype=np.uint32), list(map(len, by_part))), np.concatenate(by_part)


def _load(
    task: Ranges | LeaveOut, keys: tuple[str, ...], kind: str, dtype: np.dtype, pieces: int
) -> Iterator[list[np.ndarray]]:
    """Yields the pieces `first` up to `stop` of each of some files, which have so many pieces."""
    load = functools.partial(results.load_cut, dtype=dtype, pieces=pieces, first=task.first, stop=task.stop)
    return results.at_once(load, (UPath(f"{task.folder}/{key}.{kind}") for key in keys))


def leave_out(task: LeaveOut) -> None:
    """Writes the files of some parts: the duplicates, and what is similar to an earlier document and not the same."""
    near, dropped, rows = [np.zeros(0, near_duplicates.PAIR)], [np.zeros(0, DROPPED)], {}
    duplicates = zip(*_load(task, task.duplicates, "duplicates", ENTRY, task.parts), strict=True)
    pairs = zip(*_load(task, task.joined, "pairs", near_duplicates.PAIR, task.parts), strict=True)
    for part, name in enumerate(task.maps, task.first):
        entries = np.concatenate(next(duplicates))
        dropped.append(_dropped(part, "duplicates", entries["block"], entries["tokens"]))
        rows[part] = entries["row"]
        if task.joined:
            similar = near_duplicates.most_similar(np.concatenate(next(pairs)), task.near)
            similar = similar[~np.isin(similar["row"], rows[part])]
            near.append(similar)
            starts = results.load(UPath(f"{task.folder}/{name}.blocks"), BLOCK)["row"]
            blocks = np.searchsorted(starts, similar["row"], "right") - 1
            tokens = results.load(UPath(f"{task.folder}/{name}.documents"), DOCUMENT)["tokens"][similar["row"]]
            dropped.append(_dropped(part, "near_duplicates", blocks, tokens))
            rows[part] = np.concatenate([rows[part], similar["row"]])
    files = {UPath(f"{task.folder}/{task.rows(part)}"): np.sort(rows[part]) for part in rows if len(rows[part])}
    list(results.at_once(lambda file: results.save(file, files[file]), files))
    results.save(UPath(f"{task.folder}/{task.key}.near"), np.concatenate(near)[:EXAMPLES])
    results.save(UPath(f"{task.folder}/{task.key}.dropped"), np.concatenate(dropped))


def _dropped(part: int, why: str, blocks: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns DROPPED of documents of a part, from the block and the tokens of each."""
    blocks, index = np.unique(blocks, return_inverse=True)
    dropped = np.zeros(len(blocks), DROPPED)
    dropped["part"], dropped["why"], dropped["block"] = part, WHY.index(why), blocks
    dropped["documents"] = np.bincount(index, minlength=len(blocks))
    dropped["tokens"] = np.bincount(index, weights=tokens, minlength=len(blocks))
    return dropped


def listed(tasks: Sequence[LeaveOut], names: Sequence[str]) -> dict[str, str]:
    """Returns what the manifest says of some near duplicates, from what `run` returns and the names of parts."""
    reasons = {}
    for task in tasks:
        pairs = results.load(UPath(f"{task.folder}/{task.key}.near"), near_duplicates.PAIR) if task.joined else ()
        for pair in pairs:
            similar = f"{near_duplicates.similarity(pair):.2f} similar to {names[pair['first_part']]}"
            reasons[f"{names[pair['part']]} {pair['place']}"] = f"{similar} {pair['first_place']}"
    return reasons
