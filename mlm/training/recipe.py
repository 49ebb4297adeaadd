"""Length and cost of a run, from a flattened config (`config.flatten`): of a new run, or as a checkpoint holds it."""

import bisect
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mlm import cluster
from mlm.config_rules import parse_ranges, parse_words
from mlm.data import skip_batches
from mlm.data.order import Stage, between
from mlm.errors import InputError
from mlm.model import flops

Run = Mapping[str, Any]
HOURS_STEPS = 1_000_000  # length of the schedules with train.hours: a step is a millionth of the time


def total_steps(run: Run, records: int) -> int:
    """Returns the steps of a run whose training split has `records` rows; with train.hours, those of its schedules."""
    if run.get("train.hours"):  # older runs lack the key
        return HOURS_STEPS
    if run["train.steps"]:
        return run["train.steps"]
    rows = run["train.epochs"] * records
    last = max(stage for stage in stages(run) if stage.before < rows)
    return last.first - 1 + math.ceil((rows - last.before) / last.rows)


def stages(run: Run) -> list[Stage]:
    """Returns the stages of data.batch_stages, and after them that of data.global_batch; equal neighbours are one."""
    found, first, before = [], 1, 0
    sizes = [*run.get("data.batch_stages", ()), (run["data.global_batch"], math.inf)]  # older runs lack the key
    for rows, own in itertools.groupby(sizes, operator.itemgetter(0)):
        count = sum(steps for _, steps in own)
        found.append(Stage(first, first + count - 1, rows, before))
        first, before = first + count, before + count * rows
    return found


def batches_read(run: Run, step: int) -> list[Stage]:
    """Returns the batches that the steps up to `step` read, without those of data.skip_batches."""
    ranges, own = parse_ranges(run.get("data.skip_batches", ())), stages(run)
    end = skip_batches.batch_of(step, ranges)
    starts, stops = [1, *(last + 1 for _, last in ranges)], [*(first - 1 for first, _ in ranges), end]
    return [part for span in zip(starts, stops, strict=True) for part in between(own, span[0], min(span[1], end))]


def rows_read(run: Run, step: int) -> int:
    """Returns the rows of the batches that the steps up to `step` read."""
    return sum((part.last - part.first + 1) * part.rows for part in batches_read(run, step))


def branch_start(run: Run) -> int:
    """Returns the step after which a branch starts; 0 of other runs."""
    step = str(run.get("train.branch_from", "")).rpartition("@")[2]  # older runs lack the key
    return int(step) if step.isdecimal() else 0


def check_branch(run: Run, steps: int) -> None:
    """Raises InputError if a branch of `steps` would end before it starts."""
    if steps <= (start := branch_start(run)) and not run.get("train.hours"):
        what = f"the run would end after step {steps:,}, but the branch starts after step {start:,}"
        raise InputError(f"config.train.branch_from = {run['train.branch_from']}: {what}; train longer.")


def own_rows_read(run: Run, step: int) -> int:
    """Returns the rows that the run's own steps up to `step` read: of a branch, those after its start."""
    start = branch_start(run)
    return rows_read(run, max(step, start)) - rows_read(run, start)


def warmup_steps(run: Run, steps: int) -> int:
    """Returns the warmup steps of a run of `steps`."""
    return run["schedule.warmup_steps"] or round(run["schedule.warmup_fraction"] * steps)


def check_schedule(run: Run, steps: int) -> None:
    """Raises InputError if a run of epochs, whose `steps` the data decides, is too short for warmup and decay."""
    if not run["train.epochs"]:
        return
    warmup = warmup_steps(run, steps)
    if warmup > steps:
        what = f"the run has {steps:,} steps (train.epochs = {run['train.epochs']:g})"
        raise InputError(f"config.schedule.warmup_steps = {warmup}: {what}; set it lower, or use warmup_fraction.")
    decay = run["schedule.decay_fraction"] * steps if run["schedule.name"] in ("wsd", "wsd_sqrt") else 0
    if warmup + decay > steps + 1:
        what = f"the run has {steps:,} steps, and a warmup of {warmup:,}"
        raise InputError(f"config.schedule.decay_fraction = {run['schedule.decay_fraction']:g}: {what}; lower either.")


def short_steps(run: Run, steps: int) -> int:
    """Returns the number of steps, at the start, that read rows of data.short_length."""
    return round(run["data.short_share"] * steps) if run["data.short_length"] else 0


def milestone_steps(run: Run, steps: int, words_per_row: Callable[[], float]) -> list[int]:
    """Returns the sorted steps of checkpoint.milestones; raises InputError for one past the end of the run.

    `words_per_row` is called only for milestones in words.
    """
    found = set()
    for text in map(str, run["checkpoint.milestones"]):
        kind, _, value = text.rpartition(":")
        if kind == "words":
            rate, endless = words_per_row(), range(sys.maxsize)
            rows = functools.partial(rows_read, run)
            own = {words: bisect.bisect_left(endless, words / rate, key=rows) for words in parse_words(value)}
        else:
            first = int(value)
            own = {step: step for step in range(first, max(first, steps if kind else 0) + 1, first)}
        if (last := max(own.values())) > steps and not run.get("train.hours"):
            where = f"config.checkpoint.milestones: {text} is reached at step {last:,}"
            raise InputError(f"{where}, but the run ends after step {steps:,}; remove it, or train longer.")
        if kind == "words" and cluster.is_primary():
            reached = ", ".join(f"{words:,} at step {step:,}" for words, step in own.items())
            print(f"milestones, at {rate:,.1f} words per row: {reached}", file=sys.stderr, flush=True)
        found.update(own.values())
    return sorted(found)


def mean_masking_rate(run: Run, progress: float = 1.0) -> float:
    """Returns the mean masking rate over the first `progress` (0 to 1) of a run (see `masking.rate_schedule`)."""
    rate = run["masking.rate"]
    return rate + ((run["masking.end_rate"] or rate) - rate) * progress / 2


def flops_per_token(run: Run, vocab_size: int, *, length: int, rate: float | None = None) -> float:
    """Returns the useful FLOPs of a step per token; `rate` is the masking rate, by default the run's mean."""
    is_modernbert, every = run.get("model.family") == "modernbert", run.get("model.global_every", 1)
    local = flops.mean_keys(length, run["model.local_attention"] // 2) if is_modernbert else length
    return flops.train_flops_per_token(
        hidden=run["model.hidden_size"],
        keys=[local if index % every else length for index in range(run["model.layers"])],
        intermediate=run["model.intermediate_size"],
        gated=is_modernbert,
        vocab_size=vocab_size,
        predicted_share=mean_masking_rate(run) if rate is None else rate,
    )


def useful_flops(run: Run, vocab_size: int, *, step: int, steps: int) -> float:
    """Returns the useful FLOPs of the run's own steps up to `step`, of a run of `steps` (see `own_rows_read`)."""
    ends = branch_start(run) + step - 1  # the first and the last of these steps, counted from 0
    rate, rows = mean_masking_rate(run, ends / max(steps - 1, 1)), own_rows_read(run, step)
    short = own_rows_read(run, min(step, short_steps(run, steps)))
    parts = ((short, run["data.short_length"]), (rows - short, run["shards.length"]))
    return sum(
        count * run["shards.length"] * flops_per_token(run, vocab_size, length=length, rate=rate)
        for count, length in parts
        if count
    )
