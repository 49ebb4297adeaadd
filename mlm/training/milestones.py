"""The steps of checkpoint.milestones, which are evaluated, saved, and kept for good."""

import bisect
import sys

from ml_collections import ConfigDict

from mlm import cluster
from mlm.config_rules import parse_words
from mlm.errors import InputError
from mlm.training.task import Task


def find(config: ConfigDict, task: Task) -> set[int]:
    """Returns the steps of checkpoint.milestones; raises InputError for one past the end of the run."""
    milestones: set[int] = set()
    for text in map(str, config.checkpoint.milestones):
        kind, _, value = text.rpartition(":")
        if kind == "words":
            steps = _steps_of_words(task, parse_words(value))
        else:
            first, last = int(value), task.stages.steps if kind == "every" else int(value)
            steps = list(range(first, max(first, last) + 1, first))
        if max(steps) > task.stages.steps and not config.train.hours:
            where = f"config.checkpoint.milestones: {text} is reached at step {max(steps):,}"
            raise InputError(f"{where}, but the run ends after step {task.stages.steps:,}; remove it, or train longer.")
        milestones.update(steps)
    return milestones


def _steps_of_words(task: Task, counts: range) -> list[int]:
    """Returns the first step after which each number of words has been read, and prints them."""
    words_per_row = task.words_per_row()
    steps = [
        bisect.bisect_left(range(sys.maxsize), words / words_per_row, key=task.stages.rows_read) for words in counts
    ]
    if cluster.is_primary():
        reached = ", ".join(f"{words:,} at step {step:,}" for words, step in zip(counts, steps, strict=True))
        print(f"milestones, at {words_per_row:,.1f} words per row: {reached}", file=sys.stderr, flush=True)
    return steps
