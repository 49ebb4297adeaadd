"""Spikes of the loss: a stretch of updates whose logged loss jumps above what the stretches before it say.

Pure: no jax, no files. What is heard are lines of metrics.jsonl; what comes back is what spikes.jsonl will hold.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from typing import Any

HISTORY = 20  # lines that say what is usual: enough for a median, few enough to follow a falling loss
LEAST = 8  # of them before anything counts as a jump: the median deviation of fewer is luck
DEVIATIONS = 6.0  # standard deviations above the median: one line in 10^9, were the noise normal
NORMAL = 1.4826  # standard deviation of normal noise in units of its median absolute deviation (Hampel, 1974)
FLOOR = 0.1  # nats: less than that costs the run nothing, however quiet it was before
LONGEST = 3  # lines in a row: what stays up for longer is a new level, the adviser's to judge, and no spike


@dataclasses.dataclass(frozen=True)
class Spike:
    """A stretch of updates above the others.

    Attributes:
      first, last: updates, both included, over which the loss was averaged.
      loss: of the stretch, in nats.
      median, deviation: of the lines before, in nats; the deviation is the median absolute one.
      begins: the line before was none.
    """

    first: int
    last: int
    loss: float
    median: float
    deviation: float
    begins: bool


class Detector:
    """Hears the lines of training in order."""

    def __init__(self, log_every: int):
        """Starts; the logged loss is the mean over the updates since the last multiple of `log_every`."""
        self._every, self._step = log_every, 0
        self._usual: deque[float] = deque(maxlen=HISTORY)
        self._above: list[float] = []

    def hear(self, line: dict[str, Any]) -> Spike | None:
        """Returns the spike that a line of kind "train" tells of, or None.

        The median and the median absolute deviation do not see single outliers, so that one spike does not hide the
        next, and a spike is not added to what is usual unless it stays.
        """
        step, loss = line["step"], line.get("loss")
        first = max(self._step, (step - 1) // self._every * self._every) + 1
        self._step = step
        if loss is None:  # no update of the stretch was finite: skipped and counted elsewhere
            return None
        if len(self._usual) >= LEAST:
            median = statistics.median(self._usual)
            deviation = statistics.median(abs(each - median) for each in self._usual)
            if loss > median + max(DEVIATIONS * NORMAL * deviation, FLOOR):
                self._above.append(loss)
                if len(self._above) <= LONGEST:
                    return Spike(first, step, loss, median, deviation, len(self._above) == 1)
                self._usual.clear()
                self._usual.extend(self._above[:-1])
        self._usual.append(loss)
        self._above = []
        return None
