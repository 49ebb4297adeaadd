"""Metrics hooks: what is called with every line of metrics.jsonl while a run trains."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from mlm import logs
from mlm.data import mixture
from mlm.data.manifest import Manifest
from mlm.data.order import batch_rows
from mlm.data.stages import Stages
from mlm.monitor.adviser import Adviser
from mlm.monitor.loss_spikes import Detector, Spike
from mlm.workdir import Workdir

Notify = Callable[[str], None]


class MetricsHook:
    """Called with every line of metrics.jsonl; does nothing by itself."""

    def on_metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Takes the finite numbers of a line."""

    def flush(self) -> None:
        """Saves what must survive a kill; called before each checkpoint and at the end."""

    def close(self) -> None:
        """Called at the end, after `flush`."""


class Monitor(MetricsHook):
    """Prints advice and loss spikes, and appends them to advice.jsonl and spikes.jsonl: each once, over all restarts.

    A restart reads metrics.jsonl again: what the two files hold was printed, and what a kill kept back is printed then.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Workdir,
        manifest: Manifest,
        notify: Notify,
        *,
        stages: Stages,
        warmup: int,
    ):
        """Reads the files."""
        self._config, self._manifest, self._notify, self._stages = config, manifest, notify, stages
        self._adviser = Adviser(
            stages.steps,
            warmup,
            config.data.global_batch,
            manifest.splits["train"].unigram_entropy,
            mask_share=config.masking.mask_share,
            random_share=config.masking.random_share,
        )
        self._detector = Detector()
        for path in (workdir.advice, workdir.spikes):
            logs.cut(path, sys.maxsize)  # only a line torn by a kill
        self._advised = {line["what"] for line in logs.read(workdir.advice)}
        self._noted = {_spike_id(line) for line in logs.read(workdir.spikes)}
        self._advice, self._spikes = logs.Lines(workdir.advice), logs.Lines(workdir.spikes)
        for line in logs.read(workdir.metrics):
            self.on_metrics(line["kind"], line["step"], line)

    def on_metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Gives the line to the adviser and the detector."""
        line = values | {"step": step, "kind": kind}
        if share := values.get("share"):  # of train.hours, so the steps are an estimate
            self._adviser.steps = round(step / share)
            self._adviser.warmup_steps = round(self._config.schedule.warmup * self._adviser.steps)
        self._adviser.global_batch = self._stages.stage_at(step).rows
        for what, text in self._adviser.add(line).items():
            if what not in self._advised:
                self._advised.add(what)
                self._advice.append({"step": step, "kind": "advice", "what": what, "text": text})
                self._notify(f"step {step}: advice: {text}")
        if kind == "train" and (spike := self._detector.add(line)):
            self._note(spike)

    def _note(self, spike: Spike) -> None:
        """Appends a spike and the records that its steps read; prints it when it begins."""
        batches = [f"{first}:{last}" for first, last, _ in self._stages.batches_between(spike.first, spike.last)]
        line = {"step": spike.last, "kind": "spike", "first_update": spike.first, "last_update": spike.last}
        line |= {"batches": batches, "loss": spike.loss, "median": spike.median, "deviation": spike.deviation}
        if _spike_id(line) in self._noted:
            return
        self._noted.add(_spike_id(line))
        data, rows = self._config.data, []
        lanes = mixture.lanes(self._manifest, "train", seed=data.seed, lanes=data.lanes)
        for part in self._stages.between(spike.first, spike.last):
            columns = batch_rows(lanes, rows_before=part.rows_before, rows=part.rows, count=part.count)
            for batch, ids_B, epochs_B in zip(itertools.count(part.batch), *columns):
                rows.append({"batch": batch, "record_id": ids_B.tolist(), "epoch": epochs_B.tolist()})
        self._spikes.append(line | {"rows": rows})
        if spike.begins:
            flags = " ".join(f"--skip-batches {numbers}" for numbers in batches)
            jump = f"of the steps {spike.first} to {spike.last} jumped to {spike.loss:.2f} nats from {spike.median:.2f}"
            where = f"batches {', '.join(batches)}, their records in spikes.jsonl; see doctor --record=ID"
            fix = f"stop, remove the checkpoints after step {spike.first - 1}, and start the same command with {flags}"
            self._notify(f"step {spike.last}: the loss {jump} ({where}); to train without them, {fix}.")

    def flush(self) -> None:
        """Flushes the two files."""
        self._advice.flush()
        self._spikes.flush()


def _spike_id(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["first_update"], line["last_update"], *line["batches"]
