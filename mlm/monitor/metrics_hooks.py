"""Who listens to the lines of metrics.jsonl while a run trains: the adviser, and the detector of spikes.

metrics.jsonl stays as it is. What they say goes to the terminal and to files that are only ever appended to:
advice.jsonl and spikes.jsonl. At a start they hear again what metrics.jsonl holds; what is in the files was said, and
what a kill kept from being said is said then.
"""

from __future__ import annotations

import sys
from typing import Any

from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm import config as configs
from mlm.config_rules import parse_ranges
from mlm.data import skip_batches
from mlm.data.manifest import Manifest
from mlm.data.order import batch_rows
from mlm.monitor.adviser import Adviser, Facts
from mlm.monitor.loss_spikes import Detector, Spike
from mlm.training import recipe
from mlm.training.metrics import Log
from mlm.workdir import Workdir

SPLIT = "train"


def attach(log: Log, config: ConfigDict, workdir: Workdir, manifest: Manifest, steps: int) -> None:
    """Lets the listeners hear all lines of a run: those that are there, and those to come; on the first host.

    Args:
      log: just opened, and so cut at the update that the run starts from.
      config, workdir, manifest: of the run.
      steps: updates in all.
    """
    if cluster.is_primary():
        listener = Listener(log, config, workdir, manifest, steps)
        for line in logs.read(workdir.metrics):
            listener.write(line["kind"], line["step"], line)
        log.add_sink(listener)


class Listener:
    """One more place where the lines of a log go, beside TensorBoard."""

    def __init__(self, log: Log, config: ConfigDict, workdir: Workdir, manifest: Manifest, steps: int):
        """Opens the two files, and reads what was said in earlier lives of the run."""
        split = manifest.splits[SPLIT]
        self._log, self._ranges = log, parse_ranges(config.data.skip_batches)
        self._order = {
            "seed": config.data.seed,
            "records": tuple(shard.records for shard in split.shards),
            "lanes": config.data.lanes,
            "global_batch": config.data.global_batch,
        }
        facts = Facts(
            steps=steps,
            warmup=recipe.warmup_steps(configs.flatten(config), steps),
            global_batch=config.data.global_batch,
            unigram_entropy=split.unigram_entropy,
            mask_share=config.masking.mask_share,
            random_share=config.masking.random_share,
        )
        self._adviser, self._detector = Adviser(facts), Detector(config.log.every)
        for path in (workdir.advice, workdir.spikes):
            logs.cut(path, sys.maxsize)  # a line torn by a kill alone
        self._said = {line["what"] for line in logs.read(workdir.advice)}
        self._noted = {_place(line) for line in logs.read(workdir.spikes)}
        self._advice, self._spikes = logs.Lines(workdir.advice), logs.Lines(workdir.spikes)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Hears a line."""
        line = values | {"step": step, "kind": kind}
        for advice in self._adviser.hear(line):
            if advice.kind not in self._said:
                self._said.add(advice.kind)
                self._advice.append({"step": step, "kind": "advice", "what": advice.kind, "text": advice.text})
                self._log.say(f"step {step}: advice: {advice.text}")
        spike = self._detector.hear(line) if kind == "train" else None
        if spike is not None:
            self._note(spike)

    def _note(self, spike: Spike) -> None:
        """Writes down which records the updates of a spike read, and says it at its beginning."""
        spans = skip_batches.spans(self._ranges, spike.first, spike.last)
        line = {
            "step": spike.last,
            "kind": "spike",
            "first_update": spike.first,
            "last_update": spike.last,
            "batches": [f"{first}:{last}" for first, last in spans],
            "loss": spike.loss,
            "median": spike.median,
            "deviation": spike.deviation,
        }
        if _place(line) in self._noted:
            return
        self._noted.add(_place(line))
        rows = []
        for first, last in spans:
            ids, epochs = batch_rows(**self._order, first=first, last=last)
            columns = zip(range(first, last + 1), ids.tolist(), epochs.tolist(), strict=True)
            rows += [{"batch": batch, "record_id": ids_B, "epoch": epochs_B} for batch, ids_B, epochs_B in columns]
        self._spikes.append(line | {"rows": rows})
        if spike.begins:
            flags = " ".join(f"--skip-batches {batches}" for batches in line["batches"])
            self._log.say(
                f"step {spike.last}: the loss of the updates {spike.first} to {spike.last} jumped to {spike.loss:.2f} "
                f"nats from {spike.median:.2f} (batches {', '.join(line['batches'])}, their records in spikes.jsonl); "
                f"to train without them, stop, remove the checkpoints after update {spike.first - 1}, and start the "
                f"same command with {flags}."
            )

    def flush(self) -> None:
        """Returns when what was said is where a kill leaves it."""
        self._advice.flush()
        self._spikes.flush()

    def close(self) -> None:
        """Writes what is left."""
        self.flush()


def _place(line: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two lines of spikes.jsonl the same spike."""
    return line["first_update"], line["last_update"], *line["batches"]
