"""Loss spikes: logged losses that jump above those before, with the records that their steps read. Without jax."""

import itertools
import sys
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mlm import logs
from mlm.data.manifest import Manifest
from mlm.data.order import batch_rows, make_lanes
from mlm.data.stages import Stages
from mlm.workdir import Workdir

# lines that say what is usual: enough for a median, few enough to follow a falling loss
HISTORY = 20
LEAST = 8  # of them before a jump counts: with fewer, the median deviation is luck
DEVIATIONS = 6.0  # standard deviations above the median: one line in 10^9, were the noise normal
# standard deviation of normal noise in units of its median absolute deviation (Hampel, 1974)
NORMAL = 1.4826
FLOOR = 0.1  # nats: a smaller jump costs the run nothing, however quiet it was before
LONGEST = 3  # consecutive lines; what stays up for longer is a new level


class MetricsHook:
    """Called with what a run logs, on the first host; does nothing by itself. All hooks of a run get the same."""

    def on_metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Takes the finite numbers of a line of a log.

        Look at `kind` first: "train" and "eval" are of metrics.jsonl, "timing/..." of timing.jsonl; norms.jsonl has a
        call for each norm.
        """

    def flush(self) -> None:
        """Saves what must survive a kill; called before each checkpoint and at the end."""

    def close(self) -> None:
        """Called at the end, after `flush`."""


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

    def add(self, step: int, loss: float | None) -> Spike | None:
        """Returns the spike of a line, if any. Medians ignore outliers, so that one spike does not hide the next."""
        first = self._step + 1
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


class LossSpikes(MetricsHook):
    """Prints loss spikes, and appends them to spikes.jsonl: each once, over all restarts.

    A restart reads metrics.jsonl again: what spikes.jsonl holds was printed, and what a kill kept back is printed then.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Workdir,
        manifest: Manifest,
        notify: Callable[[str], None],
        *,
        stages: Stages,
    ):
        self._config = config
        self._manifest = manifest
        self._notify = notify
        self._stages = stages
        self._detector = Detector()
        logs.cut(workdir.spikes, sys.maxsize)  # only a line torn by a kill
        self._noted = {_spike_id(line) for line in logs.read(workdir.spikes)}
        self._lines = logs.Lines(workdir.spikes)
        for line in logs.read(workdir.metrics):
            self.on_metrics(line["kind"], line["step"], line)

    def on_metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Gives a training line to the detector, and notes the spike that it finds."""
        if kind == "train" and (spike := self._detector.add(step, values.get("loss"))):
            self._note(spike)

    def _note(self, spike: Spike) -> None:
        batches = [
            f"{first}:{last}"
            for first, last, _ in self._stages.batches_between(spike.first, spike.last)
        ]
        line = {
            "step": spike.last,
            "kind": "spike",
            "first_update": spike.first,
            "last_update": spike.last,
            "batches": batches,
            "loss": spike.loss,
            "median": spike.median,
            "deviation": spike.deviation,
        }
        if _spike_id(line) in self._noted:
            return
        self._noted.add(_spike_id(line))
        self._lines.append(line | {"rows": self._rows_read(spike)})
        if spike.begins:
            flags = " ".join(f"--skip-batches {numbers}" for numbers in batches)
            self._notify(
                f"step {spike.last}: the loss of the steps {spike.first} to {spike.last} jumped to {spike.loss:.2f} "
                f"nats from {spike.median:.2f} (batches {', '.join(batches)}, their records in spikes.jsonl; see "
                f"doctor --record=ID); to train without them, stop, remove the checkpoints after step "
                f"{spike.first - 1}, and start the same command with {flags}."
            )

    def flush(self) -> None:
        """Flushes spikes.jsonl."""
        self._lines.flush()

    def _rows_read(self, spike: Spike) -> list[dict[str, Any]]:
        """Returns the records and epochs of each batch that the steps of a spike read."""
        data = self._config.data
        rows = []
        lanes = make_lanes(self._manifest, "train", seed=data.seed, lanes=data.lanes)
        for part in self._stages.between(spike.first, spike.last):
            columns = batch_rows(
                lanes, rows_before=part.rows_before, rows=part.rows, count=part.count
            )
            for batch, ids_B, epochs_B in zip(itertools.count(part.batch), *columns):
                rows.append(
                    {"batch": batch, "record_id": ids_B.tolist(), "epoch": epochs_B.tolist()}
                )
        return rows


def _spike_id(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["first_update"], line["last_update"], *line["batches"]
