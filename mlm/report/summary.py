"""What the logs of a run say, for the report, the comparison and the model card. Nothing here imports jax."""

import dataclasses
import functools
import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.data import mixture
from mlm.data.manifest import Manifest, read_manifest
from mlm.data.stages import branch_start, make_stages
from mlm.paths import UPath
from mlm.pretrained import locate
from mlm.report.goodput import Line, Session, TimeUse, split_sessions, use_of_time
from mlm.report.plots import NATS, SQUARED, Points
from mlm.workdir import Workdir

PAIRS = re.compile(r"(pairs .+), step ([0-9]+)")  # of evaluation.json
TEST = re.compile(r"test, (?P<masks>.+), step (?P<step>[0-9]+), data (?P<data>[0-9a-f]+)")  # of evaluation.json


class Run(NamedTuple):
    """A run, perhaps a branch."""

    root: UPath
    config: ConfigDict | None  # None if there is none
    parent: UPath | None  # the folder of the run that it branched off from, if it is still there
    start: int  # the parent's step after which it starts, 0 without one
    real_share: float = 1.0  # of the tokens in its rows, without padding


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The course of a run."""

    name: str  # of its folder
    config: ConfigDict | None  # None if there is none
    train: list[Line]  # of metrics.jsonl, as are the evaluations
    evals: list[Line]
    sessions: list[Session]
    manifest: Manifest | None  # of its shards; None if they are gone
    ancestry: Sequence[Run]  # itself, and the runs that it branched off from, nearest first
    glue: dict[str, Any] = dataclasses.field(default_factory=dict)  # the table of the command `glue`, if there is one
    tests: dict[str, Line] = dataclasses.field(default_factory=dict)  # scores of the test split, by masks and step

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
    def use(self) -> TimeUse:
        """Where its time went."""
        return use_of_time(self.sessions)

    @property
    def unigram_entropy(self) -> float | None:
        """Of the validation split, in nats; None if unknown."""
        return self.manifest and self.manifest.splits["validation"].unigram_entropy

    def tokens(self, step: int) -> int | None:
        """Returns the tokens read up to a step, as `tokens_read`."""
        return tokens_read(self.ancestry, step)

    def epochs(self, step: int) -> list[tuple[str, float, int, float]]:
        """Returns (name, share, rows, epochs of the run itself) of each folder of a mixture; nothing of one folder."""
        parts = mixture.parts(self.manifest) if self.manifest else ()
        sized = [(name, share, manifest.splits["train"].records) for name, share, manifest in parts if name]
        if not sized or self.config is None:
            return []
        read = make_stages(self.config, records=1).own_rows_read(step)
        return [(name, share, rows, read * share / rows) for name, share, rows in sized]

    @functools.cached_property
    def hours(self) -> dict[tuple[str, int], float]:
        """Hours from the first start until each (kind, step) of metrics.jsonl was written: of those again, the last."""
        lines = [line for session in self.sessions for line in session.lines]
        return {(line["kind"], line["step"]): (line["time"] - lines[0]["time"]) / 3600 for line in lines}

    @property
    def xla(self) -> dict[str, dict[str, float]]:
        """What XLA did since the last start that logged it: see mlm/training/xla_metrics.py."""
        lines = [line for session in self.sessions for line in session.lines if line["kind"] == "xla"]
        return lines[-1]["programs"] if lines else {}

    @property
    def devices(self) -> str:
        """The devices of all starts, without repeats."""
        return ", then ".join(dict.fromkeys(session.devices for session in self.sessions))

    def median(self, key: str) -> float | None:
        """Returns the median of a key of timing.jsonl over the training steps that were kept; None if unknown."""
        values = [line[key] for session in self.sessions for line in session.kept_lines("train") if key in line]
        return statistics.median(values) if values else None


def read_tests(root: UPath, manifest: Manifest | None, until: float) -> dict[str, Line]:
    """Returns the scores of the test split, as its shards are now, in evaluation.json: by masks and step, in order."""
    data = manifest.fingerprint_of("test")[:12] if manifest and "test" in manifest.splits else None
    lines = []
    for key, scores in logs.read_object(root / logs.RESULTS).items():
        match = TEST.fullmatch(key)
        if match and "loss" in scores and data in (None, match["data"]) and int(match["step"]) <= until:
            lines.append((int(match["step"]), match["masks"], scores))
    lines.sort(key=lambda line: line[:2])
    return {f"{masks}, step {step:,}": {"step": step, **scores} for step, masks, scores in lines}


def glue_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns head and rows of a table of the command `glue`."""
    rows = [("task", "metric", "median", "range", "seeds", "device hours", "setting")]
    for name, task in result["tasks"].items():
        if "failed" in task:
            rows.append((name, "failed", "", "", "", "", task["failed"]))
            continue
        shown = (f"{task['median']:.1%}", f"{task['low']:.1%} to {task['high']:.1%}", str(len(task["scores"])))
        hours = f"{task['device_hours']:.2f}" if "device_hours" in task else ""
        setting = ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in task.get("setting", {}).items())
        rows.append((name, " + ".join(task["metrics"]), *shown, hours, setting or "the majority class"))
    average = "" if result["average"] is None else f"{result['average']:.1%}"
    return [*rows, ("average", "without WNLI", average, "", "", f"{result['device_hours']:.2f}", "")]


def gather(workdir: Workdir, config: ConfigDict | None, *, until: float = float("inf")) -> RunSummary:
    """Reads the logs of a run up to a step, and the manifest of its shards if they are still there."""
    lines = [line for line in logs.read(workdir.metrics) if line["step"] <= until]
    train, evals = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    tables = {int(step): table for step, table in logs.read_object(workdir.glue).items()}
    newest = max((step for step in tables if step <= until), default=None)
    run, *ancestors = ancestry(workdir.root)
    manifest = read_data(workdir, config)
    return RunSummary(
        name=workdir.root.name,
        config=config,
        train=train,
        evals=evals,
        sessions=split_sessions(logs.read(workdir.timing), until),
        manifest=manifest,
        ancestry=[run._replace(config=config), *ancestors],
        glue=tables.get(newest, {}),
        tests=read_tests(workdir.root, manifest, until),
    )


def read_data(workdir: Workdir, config: ConfigDict | None) -> Manifest | None:
    """Reads the manifest of a run's shards; None if they are gone."""
    folders = [(str(workdir.shards), 1.0)]
    if config is not None:
        folders = config.data.mixture or [(workdir.shards_of(config), 1.0)]
    manifests = [(share, read_manifest(folder)) for folder, share in folders]
    return None if any(manifest is None for _, manifest in manifests) else mixture.join(manifests)


def read_run(root: UPath) -> Run:
    """Reads the config of the run in a workdir, and where it came from."""
    config = configs.read(root / "config.json")
    name, start = ("", 0) if config is None else (config.train.branch_from.rpartition("@")[0], branch_start(config))
    candidates = (UPath(name).absolute(), root.parent / UPath(name).name)  # the second if it was started elsewhere
    parent = next((folder for folder in candidates if start and (folder / "checkpoints").is_dir()), None)
    dataset = locate.metadata(str(root)).get("dataset", {})
    if "real_share" not in dataset and (manifest := read_data(Workdir(str(root), create=False), config)):
        dataset = {"real_share": manifest.real_share}  # before the first checkpoint
    return Run(root, config, parent, start, dataset.get("real_share", 1.0))


def ancestry(root: UPath) -> list[Run]:
    """Returns the run in a workdir, then the runs that it branched off from, nearest first."""
    runs, run = [], read_run(root)
    while run and run not in runs:
        runs.append(run)
        run = run.parent and read_run(run.parent)
    return runs


def tokens_read(ancestry: Sequence[Run], step: int) -> int | None:
    """Returns the tokens read up to a step of the first run of an ancestry, without the padding of each run's rows.

    None if unknown: of a classifier, without a config, or where a run that it came from is gone.
    """
    run_configs = [run.config for run in ancestry]
    if None in run_configs or ancestry[-1].start or run_configs[0].classify.train:
        return None
    last_steps = itertools.accumulate([step, *(run.start for run in ancestry[:-1])], min)  # on the way to `step`
    # Where rows are short, and when a run of epochs ends, changes no number of rows, so their records don't matter.
    return sum(
        round(make_stages(run.config, records=1).own_rows_read(last) * run.config.shards.length * run.real_share)
        for run, last in zip(ancestry, last_steps, strict=True)
    )


def downstream(root: UPath) -> dict[int, dict[str, float]]:
    """Returns {step: {name: score}} of a run: averages of GLUE, and accuracies on minimal pairs within words."""
    scores: dict[int, dict[str, float]] = defaultdict(dict)
    for step, table in logs.read_object(Workdir(str(root), create=False).glue).items():
        if table["average"] is not None:
            scores[int(step)][f"GLUE {table['protocol']}"] = table["average"]
    for key, values in logs.read_object(root / logs.RESULTS).items():
        if match := PAIRS.fullmatch(key):
            scores[int(match[2])][match[1]] = values["within_word"]["accuracy"]
    return scores


def curves(ancestry: Sequence[Run]) -> dict[str, Points]:
    """Returns {name: (tokens read, downstream scores in %)} of the first run of an ancestry, on the way to its end."""
    percents, end = defaultdict(dict), math.inf
    for generation, run in enumerate(ancestry):
        for step, scores in downstream(run.root).items():
            tokens = tokens_read(ancestry[generation:], step)
            for name, value in scores.items() if step <= end and tokens is not None else ():
                percents[name][tokens] = 100 * value
        end = run.start
    return {name: tuple(zip(*sorted(by_tokens.items()), strict=True)) for name, by_tokens in percents.items()}
