"""The steps of checkpoint.milestones: their checkpoints are kept for good."""

import math
import sys
from collections.abc import Callable, Iterable

from mlm import cluster
from mlm.config_rules import parse_words
from mlm.errors import InputError


def steps_of(milestones: Iterable[str | int], steps: int, words_per_step: Callable[[], float]) -> list[int]:
    """Returns the steps at which checkpoint.milestones are reached, sorted.

    Raises InputError for one that is reached after the last of `steps`. `words_per_step` is called if words are named.
    """
    found = set()
    for text in map(str, milestones):
        kind, _, value = text.rpartition(":")
        if kind == "words":
            rate = words_per_step()
            own = {words: math.ceil(words / rate) for words in parse_words(value)}
        else:
            first = int(value)
            own = {step: step for step in range(first, max(first, steps if kind else 0) + 1, first)}
        if (last := max(own.values())) > steps:
            where = f"config.checkpoint.milestones: {text} is reached at step {last:,}"
            raise InputError(f"{where}, but the run ends after step {steps:,}; remove it, or train longer.")
        if kind == "words" and cluster.is_primary():
            reached = ", ".join(f"{words:,} at step {step:,}" for words, step in own.items())
            print(f"milestones, of {rate:,.1f} words in a step: {reached}", file=sys.stderr, flush=True)
        found.update(own.values())
    return sorted(found)
