"""Runs of train.hours instead of steps (Izsak et al., 2021): schedules follow the share of the training time used.

A step receives its share as an input, a whole number of UNITS, exact in float32. The "share" lines of timing.jsonl
record the shares of all steps: the first one, then differences. With train.replay, a run reads them back and repeats
the recorded run exactly.
"""

import itertools
import time
from typing import Any

import jax

from mlm import logs
from mlm.cluster import distributed
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.training.metrics import Log

UNITS = 2**24  # of a budget


class Budget:
    """The share of train.hours that is used: by process 0's clock, without pauses, or as another run recorded it."""

    def __init__(self, hours: float, replay: dict[int, int] | None, *, share: float, log: Log):
        """Continues with `share` already used; `replay` as `read_replay` returns it."""
        self.units, self._hours, self._log = round(share * UNITS), hours, log
        self._clock: float | None = None
        self._running: Any = None
        self._used = share * hours * 3600  # seconds
        self._taken: list[int] = []  # units of the steps since the last line: the first absolute, then differences
        self._replay = replay

    @property
    def share(self) -> float:
        """The share that was used when the last step started."""
        return self.units / UNITS

    def restart_clock(self) -> None:
        """Leaves out the time since the last step started: it went into opening the data and compiling."""
        self._clock = time.monotonic() - self._log.paused_seconds

    def start_step(self, step: int, metrics: Any) -> float:
        """Returns the share that is used as a step starts, the same on every host; 1 for the last step.

        Waits for the step before that of `metrics`: steps dispatched far ahead would all be given the same share.
        """
        self._running, before = metrics, self._running
        jax.block_until_ready(before)
        if self._replay is not None:
            units = self._replay[step]
        else:
            begin = self._clock
            self.restart_clock()
            self._used += 0.0 if begin is None else self._clock - begin
            units = distributed.share_of_primary(step, min(int(self._used / self._hours / 3600 * UNITS), UNITS))
        self._taken.append(units if not self._taken else units - self.units)
        self.units, self._step = units, step
        return self.share

    def record(self) -> None:
        """Logs the shares of the steps up to the last one that was started."""
        if self._taken:
            self._log.timing("share", self._step, {"share": round(self.share, 6), "units": self._taken})
            self._taken = []


def read_replay(replay: str, start: int) -> dict[int, int]:
    """Returns the units of each step after `start`; raises InputError if one is missing."""
    if not UPath(replay).is_file():
        raise InputError(f"config.train.replay = {replay}: is not a file; name the timing.jsonl of a finished run.")
    units_of: dict[int, int] = {}
    last = 0
    for line in logs.read(UPath(replay), "share"):
        first = line["step"] - len(line["units"]) + 1
        for stale in range(first, last + 1):  # made again after a restart
            units_of.pop(stale, None)
        last = line["step"]
        units_of |= zip(range(first, last + 1), itertools.accumulate(line["units"]), strict=True)
    ends = next((step for step, units in units_of.items() if units >= UNITS), 0)
    missing = next((step for step in range(start + 1, ends) if step not in units_of), None)
    if not ends or ends < start or missing:  # a finished replay that is started again does nothing
        what = f"lacks the share of step {missing}" if missing else "holds no finished run with train.hours"
        raise InputError(f"config.train.replay = {replay}: {what}; name the timing.jsonl of a finished run.")
    return units_of
