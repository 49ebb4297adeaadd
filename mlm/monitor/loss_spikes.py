"""Loss spikes: logged losses that jump above those before. No jax, no files."""

from collections import deque
from statistics import median
from typing import Any, NamedTuple

HISTORY = 20  # lines that say what is usual: enough for a median, few enough to follow a falling loss
LEAST = 8  # of them before a jump counts: with fewer, the median deviation is luck
DEVIATIONS = 6.0  # standard deviations above the median: one line in 10^9, were the noise normal
NORMAL = 1.4826  # standard deviation of normal noise in units of its median absolute deviation (Hampel, 1974)
FLOOR = 0.1  # nats: a smaller jump costs the run nothing, however quiet it was before
LONGEST = 3  # consecutive lines; what stays up for longer is a new level, and the adviser's to judge


class Spike(NamedTuple):
    """A logged loss above the others, in nats: the mean over the steps `first` to `last`."""

    first: int
    last: int
    loss: float
    median: float  # of the lines before
    deviation: float  # their median absolute deviation
    begins: bool  # the line before was no spike


class Detector:
    """Takes the training lines of metrics.jsonl in order; a logged loss is the mean since the line before."""

    def __init__(self):
        self._step = 0
        self._usual: deque[float] = deque(maxlen=HISTORY)
        self._above: list[float] = []

    def add(self, line: dict[str, Any]) -> Spike | None:
        """Returns the spike of a line, if any. Medians ignore outliers, so that one spike does not hide the next."""
        step, loss, first = line["step"], line.get("loss"), self._step + 1
        self._step = step
        if loss is None:  # no step was finite; the nonfinite guard counts them
            return None
        if len(self._usual) >= LEAST:
            usual = median(self._usual)
            deviation = median(abs(past - usual) for past in self._usual)
            if loss > usual + max(DEVIATIONS * NORMAL * deviation, FLOOR):
                self._above.append(loss)
                if len(self._above) <= LONGEST:
                    return Spike(first, step, loss, usual, deviation, len(self._above) == 1)
                self._usual.clear()
                self._usual.extend(self._above[:-1])
        self._usual.append(loss)
        self._above = []
        return None
