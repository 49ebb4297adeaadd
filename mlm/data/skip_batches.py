"""Batches that a run leaves out: which batch an update reads. Standard library only.

Batches are numbered from 1 as the order deals them (mlm/data/order.py), and both ends of a range "A:B" are left out;
update u reads the u-th batch of the rest. PaLM left out the batches around a spike of its loss, and the spike did not
come again (Chowdhery et al., 2022, 5.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mlm.config_rules import Range, parse_ranges
from mlm.errors import InputError

Batch = TypeVar("Batch")


def batch_of(update: int, ranges: list[Range]) -> int:
    """Returns the number of the batch that an update reads; 0 for update 0, before the first."""
    batch = update
    for first, last in ranges:
        if first > batch:
            break
        batch += last - first + 1
    return batch


def segments(ranges: list[Range], done: int) -> list[tuple[int, int | None]]:
    """Returns what is read after `done` updates: (batches before, how many on end; None for all)."""
    found, batch = [], batch_of(done, ranges)
    for first, last in ranges:
        if last > batch:
            found.append((batch, first - 1 - batch))
            batch = last
    return [(before, count) for before, count in found if count > 0] + [(batch, None)]


def spans(ranges: list[Range], first: int, last: int) -> list[Range]:
    """Returns the ranges of batches that the updates `first` to `last` read."""
    found, begin, end = [], batch_of(first, ranges), batch_of(last, ranges)
    for a, b in ranges:
        if begin <= a <= end:
            found.append((begin, a - 1))
            begin = b + 1
    return [(a, b) for a, b in [*found, (begin, end)] if a <= b]


def follow(open_at: Callable[[int], Iterator[Batch]], ranges: list[Range], done: int) -> Iterator[Batch]:
    """Returns the batches that the updates after `done` read.

    Args:
      open_at: returns all batches after as many; to open costs the same wherever it is.
      ranges: to leave out.
      done: updates made.
    """
    (before, count), *rest = segments(ranges, done)
    streams = itertools.chain([open_at(before)], (open_at(before) for before, _ in rest))
    counts = [count, *(count for _, count in rest)]
    return itertools.chain.from_iterable(map(itertools.islice, streams, counts))


def check_resume(saved: Iterable[str], new: Iterable[str], *, step: int, steps: list[int], where: str) -> None:
    """Raises InputError if a run can't go on with the ranges `new` from a checkpoint that was made with `saved`.

    Args:
      saved, new: values of data.skip_batches.
      step: of the checkpoint.
      steps: of all checkpoints.
      where: their folder.
    """
    old, ranges = parse_ranges(saved), parse_ranges(new)
    flags = " ".join(f"--skip-batches {a}:{b}" for a, b in old)
    for a, b in old:
        if (a, b) not in ranges:
            raise InputError(
                f"{where}/{step} was made without the batches {a}:{b}, which data.skip_batches no longer names; a run "
                f"can't take them back: give {flags} as well, or use another --workdir."
            )
    read = batch_of(step, old)
    for a, b in ranges:
        if (a, b) not in old and a <= read:
            late = [str(each) for each in steps if batch_of(each, old) >= a]
            good = [each for each in steps if batch_of(each, old) < a]
            start = f"goes on from update {max(good)}" if good else "starts from the beginning"
            raise InputError(
                f"config.data.skip_batches = {a}:{b}: the checkpoint {where}/{step} has read the batches up to {read}; "
                f"remove the newer checkpoints by hand ({', '.join(late)} in {where}), then the run {start}."
            )
