"""Batches that a run skips: which batch each step reads.

Batches are numbered from 1, and both ends of a range "A:B" are skipped; step s reads the s-th of the remaining batches.
PaLM skipped the batches around a loss spike, and the spike did not recur (Chowdhery et al., 2022, 5.1).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mlm.config_rules import Range, parse_ranges
from mlm.errors import InputError

Batch = TypeVar("Batch")


def batch_of(step: int, ranges: list[Range]) -> int:
    """Returns the number of the batch that a step reads; 0 for step 0, before the first."""
    batch = step
    for first, last in ranges:
        if first > batch:
            break
        batch += last - first + 1
    return batch


def spans(ranges: list[Range], first: int, last: int) -> list[Range]:
    """Returns the ranges of batches that the steps `first` to `last` read."""
    batches = dict.fromkeys(batch_of(step, ranges) for step in range(first, last + 1))
    starts, ends = ([batch for batch in batches if batch + by not in batches] for by in (-1, 1))
    return list(zip(starts, ends, strict=True))


def follow(open_at: Callable[[int], Iterator[Batch]], ranges: list[Range], done: int) -> Iterator[Batch]:
    """Returns the batches of the steps after `done`; `open_at(n)` returns all batches after the n-th."""

    def read(stream: Iterator[Batch], before: int) -> Iterator[Batch]:
        for first, last in ranges:
            if first > before:
                yield from itertools.islice(stream, first - 1 - before)
                stream, before = open_at(last), last
        yield from stream

    start = batch_of(done + 1, ranges) - 1
    return read(open_at(start), start)


def check_resume(saved: Iterable[str], new: Iterable[str], *, step: int, steps: list[int], where: str) -> None:
    """Raises InputError if a run with ranges `new` can't continue from `where`/`step`, which was made with `saved`."""
    old, ranges = parse_ranges(saved), parse_ranges(new)
    flags = " ".join(f"--skip-batches {a}:{b}" for a, b in old)
    for a, b in old:
        if (a, b) not in ranges:
            raise InputError(
                f"{where}/{step} was made without the batches {a}:{b}, which data.skip_batches no longer names; a run "
                f"can't read them afterwards: give {flags} as well, or use another --workdir."
            )
    read = batch_of(step, old)
    for a, b in ranges:
        if (a, b) not in old and a <= read:
            late = [str(each) for each in steps if batch_of(each, old) >= a]
            good = [each for each in steps if batch_of(each, old) < a]
            start = f"resumes from step {max(good)}" if good else "starts from the beginning"
            raise InputError(
                f"config.data.skip_batches = {a}:{b}: the checkpoint {where}/{step} has read the batches up to {read}; "
                f"remove the newer checkpoints by hand ({', '.join(late)} in {where}), then the run {start}."
            )
