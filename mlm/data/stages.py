"""What each step of a run reads, as a table of stages made once from the config.

A stage is a run of consecutive steps that read consecutive batches of one size. Batches are numbered from 1 in the
order of the data; those of data.skip_batches belong to no stage. PaLM skipped the batches around a loss spike, and the
spike did not recur (Chowdhery et al., 2022, 5.1).
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, Self

from ml_collections import ConfigDict

from mlm.config_rules import Range, parse_ranges
from mlm.errors import InputError

# of the steps, the first ones: they read rows of data.short_length, as BERT's did
SHORT_SHARE = 0.9
UNTIMED_STEPS = 1_000_000  # of a run of train.hours until mlm/training/hours.py has timed its step


class Stage(NamedTuple):
    """Consecutive steps, `first` to `last`, that read batches of one size."""

    first: int  # step, counted from 1
    last: float  # the last stage of a run has no end
    rows: int  # in a global batch
    length: int  # tokens in a row, as the model reads it
    batch: int  # number of the first step's batch
    rows_before: int  # in the batches before that one, skipped ones included

    @property
    def count(self) -> int | None:
        """Its number of steps; None without an end."""
        return None if self.last == math.inf else int(self.last) - self.first + 1

    def batch_of(self, step: int) -> int:
        """Returns the number of the batch that a step reads."""
        return self.batch + step - self.first

    def between(self, first: int, last: float) -> Self | None:
        """Returns the part of the stage in the steps `first` to `last`; None if it has none of them."""
        start = max(first, self.first)
        stop = min(last, self.last)
        if start > stop:
            return None
        rows_before = self.rows_before + (start - self.first) * self.rows
        return self._replace(
            first=start, last=stop, batch=self.batch_of(start), rows_before=rows_before
        )


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a run, without gaps, the last without an end."""

    table: Sequence[Stage]
    steps: int  # of the run
    start: int = 0  # the step after which a branch starts

    def stage_at(self, step: int) -> Stage:
        """Returns the stage of a step, counted from 1."""
        return next(stage for stage in self.table if step <= stage.last)

    def between(self, first: int, last: float = math.inf) -> Iterator[Stage]:
        """Yields the parts of the stages in the steps `first` to `last`."""
        return filter(None, (stage.between(first, last) for stage in self.table))

    def rows_read(self, step: int) -> int:
        """Returns the rows of the batches that the steps up to `step` read."""
        return sum(part.count * part.rows for part in self.between(1, step))

    def own_rows_read(self, step: int) -> int:
        """Returns the rows that the run itself has read up to a step: of a branch, those after its start."""
        return max(0, self.rows_read(step) - self.rows_read(self.start))

    def batches_between(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Returns (first, last, rows) of the batches that the steps read, in as few ranges as possible."""
        ranges: list[tuple[int, int, int]] = []
        for part in self.between(first, last):
            start = part.batch
            if ranges and ranges[-1][1:] == (start - 1, part.rows):
                start = ranges.pop()[0]
            ranges.append((start, part.batch_of(part.last), part.rows))
        return ranges

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Every (rows, length) that a step may read."""
        return sorted({(stage.rows, stage.length) for stage in self.table})


def make_stages(config: ConfigDict, records: int) -> Stages:
    """Returns the stages of a run on `records` training rows: batch sizes and short rows, without skipped batches."""
    steps = total_steps(config, records)
    skipped = parse_ranges(config.data.skip_batches)
    starts = [1, *(last + 1 for _, last in skipped)]
    stops = [*(first - 1 for first, _ in skipped), math.inf]
    lengths = [(config.shards.length, math.inf)]  # of rows, and the last step that reads such
    if config.data.short_length and (short_steps := round(SHORT_SHARE * steps)):
        lengths.insert(0, (config.data.short_length, short_steps))
    table: list[Stage] = []
    step = 1
    for size in batch_sizes(config):
        for start, stop in zip(starts, stops, strict=True):
            first = max(size.first, start)
            last = min(size.last, stop)
            for length, until in lengths:
                count = min(last - first, until - step) + 1
                if count > 0:
                    rows_before = size.rows_before + (first - size.first) * size.rows
                    table.append(
                        Stage(step, step + count - 1, size.rows, length, first, rows_before)
                    )
                    step += count
                    first += count
    return Stages(table, steps, branch_start(config))


def batch_sizes(config: ConfigDict) -> list[Stage]:
    """Returns the stages of data.batch_stages and of data.global_batch after them, as if no batch were skipped."""
    sizes: list[Stage] = []
    first = 1
    rows_before = 0
    stages = [*config.data.batch_stages, (config.data.global_batch, math.inf)]
    for rows, neighbours in itertools.groupby(stages, operator.itemgetter(0)):
        count = sum(steps for _, steps in neighbours)
        sizes.append(
            Stage(first, first + count - 1, rows, config.shards.length, first, rows_before)
        )
        first += count
        rows_before += count * rows
    return sizes


def total_steps(config: ConfigDict, records: int) -> int:
    """Returns the steps of a run on `records` training rows."""
    if config.train.steps:
        return config.train.steps
    if config.train.hours:
        return UNTIMED_STEPS
    rows = rows_of_epochs(config, records)
    size = max(size for size in batch_sizes(config) if size.rows_before < rows)
    return size.first - 1 + math.ceil((rows - size.rows_before) / size.rows)


def rows_of_epochs(config: ConfigDict, records: int) -> Fraction:
    """Returns the rows of train.epochs passes over `records`: 1.1 of 1,100 are 1,210, and not more, as in floats."""
    return Fraction(str(config.train.epochs)) * records


def branch_start(config: ConfigDict) -> int:
    """Returns the step after which a branch starts; 0 of other runs."""
    step = config.train.branch_from.rpartition("@")[2]
    return int(step) if step.isdecimal() else 0


def check_branch(config: ConfigDict, steps: int) -> None:
    """Raises InputError if a branch of `steps` would end before it starts."""
    start = branch_start(config)
    if steps <= start:
        what = f"the run would end after step {steps:,}, but the branch starts after step {start:,}"
        raise InputError(
            f"config.train.branch_from = {config.train.branch_from}: {what}; train longer."
        )


def check_skipped(
    saved: Iterable[str], new: Iterable[str], *, step: int, steps: Sequence[int], where: str
) -> None:
    """Raises InputError if a run can't resume from `where`/`step`: it skips batches `new`, and skipped `saved` so far.

    `steps` are those of all checkpoints.
    """
    old = parse_ranges(saved)
    ranges = parse_ranges(new)
    good = [past for past in steps if skipped_by(past, old) == skipped_by(past, ranges)]
    if step not in good:
        flags = " ".join(f"--skip-batches {first}:{last}" for first, last in old)
        raise InputError(
            f"config.data.skip_batches: the checkpoint {where}/{step} was made with {flags or 'none'}; give the same, "
            f"or remove by hand the checkpoints of {where} after step {max(good, default=0)}."
        )


def skipped_by(step: int, ranges: Iterable[Range]) -> list[Range]:
    """Returns which ranges of batches a run has left out when it has done a step."""
    batch = step
    skipped = []
    for first, last in ranges:
        if first > batch:
            break
        skipped.append((first, last))
        batch += last - first + 1
    return skipped
