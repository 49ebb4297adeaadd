"""What the logs of a run say, for the report, the comparison and the model card.

Nothing here imports jax.
"""

import dataclasses
import functools
import itertools
import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlm import logs
from mlm.data.manifest import Manifest, join_folders, read_manifest
from mlm.data.stages import make_stages
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.report.sessions import Line, Session, split_sessions
from mlm.workdir import Workdir

Points = tuple[Sequence[float], Sequence[float]]  # of a curve: x, y

NATS = "nats"  # what a loss is in
SQUARED = "squared error"  # of a regression
# Of evaluation.json
TEST = re.compile(r"test, (?P<masks>.+), step (?P<step>[0-9]+), data (?P<data>[0-9a-f]+)")


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The course of a run."""

    name: str  # of its folder
    config: ConfigDict | None  # None if there is none
    train: list[Line]  # of metrics.jsonl, as are the evaluations
    evals: list[Line]
    sessions: list[Session]
    manifest: Manifest | None  # of its shards; None if they are gone
    real_share: float = 1.0  # of the tokens in its rows, without padding
    # The table of the command `glue`
    glue: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Scores of the test split, by masks and step
    tests: dict[str, Line] = dataclasses.field(default_factory=dict)

    @property
    def glue_rows(self) -> list[tuple[str, ...]]:
        """Head and rows of that table; none without one."""
        return glue_rows(self.glue) if self.glue else []

    @property
    def unit_of_loss(self) -> str:
        """What the loss is in: a regression may not have been evaluated yet."""
        classify = self.config and self.config.classify
        is_regression = bool(classify and classify.train) and classify.kind == "regression"
        return SQUARED if is_regression or any("mse" in line for line in self.evals) else NATS

    @property
    def step(self) -> int:
        """The last one that was logged or saved: a run may be stopped between two lines of its log."""
        saved = [line for session in self.sessions for line in session.kept_lines("checkpoint")]
        return max(line["step"] for line in self.train + self.evals + saved)

    @functools.cached_property
    def training(self) -> Points:
        """Steps, and the seconds that training took until each, without compilation, evaluation and checkpoints.

        Of steps that were made again it is the last time that counts, and of those that no line reports, because the
        run was stopped, the pace of the steps after them.
        """
        steps = [session.lines[0]["step"] for session in self.sessions[:1]]
        seconds = [0.0 for _ in steps]
        for session in self.sessions:
            for before, line in itertools.pairwise(session.kept_lines("first_step", "train")):
                if line["kind"] == "train":
                    pace = line["seconds"] / (line["step"] - before["step"])
                    seconds.append(seconds[-1] + pace * (line["step"] - steps[-1]))
                    steps.append(line["step"])
        return steps, seconds

    def training_seconds(self, step: int) -> float | None:
        """Returns the seconds that training took until a step; None if no times were logged."""
        return float(np.interp(step, *self.training)) if self.sessions else None

    @property
    def seconds(self) -> float:
        """From the first start to the last line of the log, those between a stop and the next start too."""
        total = sum(session.seconds for session in self.sessions)
        for session, later in itertools.pairwise(self.sessions):
            total += max(later.lines[0]["time"] - session.lines[-1]["time"], 0.0)
        return total

    @property
    def goodput(self) -> float:
        """Share of these seconds spent on steps that were kept."""
        return self.training[1][-1] / self.seconds if self.seconds else 0.0

    @property
    def device_hours(self) -> float:
        """Hours of all starts, times their devices."""
        return sum(s.lines[0].get("devices", 1) * s.seconds for s in self.sessions) / 3600

    @property
    def unigram_entropy(self) -> float | None:
        """Of the validation split, in nats; None if unknown."""
        return self.manifest and self.manifest.splits["validation"].unigram_entropy

    def tokens(self, step: int) -> int | None:
        """Returns the tokens that the run itself has read up to a step, without padding; None if unknown."""
        if self.config is None or self.config.classify.train:
            return None
        # Where rows are short, and when a run of epochs ends, changes no number of rows: the
        # records don't matter.
        rows = make_stages(self.config, records=1).own_rows_read(step)
        return round(rows * self.config.shards.length * self.real_share)

    @property
    def devices(self) -> str:
        """The devices of all starts, without repeats."""
        return ", then ".join(dict.fromkeys(session.devices for session in self.sessions))

    def median(self, key: str) -> float | None:
        """Returns the median of a key of timing.jsonl over the training steps that were kept.

        None if unknown.
        """
        lines = [line for session in self.sessions for line in session.kept_lines("train")]
        values = [line[key] for line in lines if key in line]
        return statistics.median(values) if values else None


def read_tests(root: UPath, manifest: Manifest | None, until: float) -> dict[str, Line]:
    """Returns the scores of the test split, as its shards are now, in evaluation.json: by step and masks, in order."""
    data = manifest.fingerprint_of("test")[:12] if manifest and "test" in manifest.splits else None
    lines = []
    for key, scores in logs.read_object(root / logs.RESULTS).items():
        match = TEST.fullmatch(key)
        if match and "loss" in scores and data in (None, match["data"]):
            lines.append((int(match["step"]), match["masks"], scores))
    lines.sort(key=lambda line: line[:2])
    return {
        f"{masks}, step {step:,}": {"step": step, **scores}
        for step, masks, scores in lines
        if step <= until
    }


def glue_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns head and rows of a table of the command `glue`."""
    rows = [("task", "metric", "median", "range", "seeds", "device hours", "setting")]
    for name, task in result["tasks"].items():
        if "failed" in task:
            rows.append((name, "failed", "", "", "", "", task["failed"]))
            continue
        setting = task.get("setting", {}).items()
        settings = [f"{key.rpartition('.')[2]} {value:g}" for key, value in setting]
        row = (
            name,
            " + ".join(task["metrics"]),
            f"{task['median']:.1%}",
            f"{task['low']:.1%} to {task['high']:.1%}",
            str(len(task["scores"])),
            f"{task['device_hours']:.2f}" if "device_hours" in task else "",
            ", ".join(settings) or "the majority class",
        )
        rows.append(row)
    average = "" if result["average"] is None else f"{result['average']:.1%}"
    rows.append(("average", "without WNLI", average, "", "", f"{result['device_hours']:.2f}", ""))
    return rows


def gather(
    workdir: Workdir, config: ConfigDict | None, *, until: float = float("inf")
) -> RunSummary:
    """Reads the logs of a run up to a step, and the manifest of its shards if they are still there."""
    lines = [line for line in logs.read(workdir.metrics) if line["step"] <= until]
    tables = {int(step): table for step, table in logs.read_object(workdir.glue).items()}
    newest = max((step for step in tables if step <= until), default=None)
    manifest = read_data(workdir, config)
    # Of a checkpoint; before the first one, the shards say it
    dataset = checkpoint_files.newest_meta(workdir.checkpoints).get("dataset", {})
    return RunSummary(
        name=workdir.root.name,
        config=config,
        train=[line for line in lines if line["kind"] == "train"],
        evals=[line for line in lines if line["kind"] == "eval"],
        sessions=split_sessions(logs.read(workdir.timing), until),
        manifest=manifest,
        real_share=dataset.get("real_share", manifest.real_share if manifest else 1.0),
        glue=tables.get(newest, {}),
        tests=read_tests(workdir.root, manifest, until),
    )


def read_data(workdir: Workdir, config: ConfigDict | None) -> Manifest | None:
    """Reads the manifest of a run's shards; None if they are gone."""
    folders = [(str(workdir.shards), 1.0)]
    if config is not None:
        folders = config.data.mixture or [(workdir.shards_of(config), 1.0)]
    manifests = [(share, read_manifest(folder)) for folder, share in folders]
    return None if any(manifest is None for _, manifest in manifests) else join_folders(manifests)
