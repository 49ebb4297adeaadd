"""GLUE by a protocol: runs of `classify`, chosen on the validation rows, as one table and the server's files.

The folder of a table holds runs/TASK/NAME, glue.json (`run`), and submission/ with the predictions of the test rows.
"""

import csv
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import RenderableType

from mlm import logs
from mlm.cluster.engine import Engine
from mlm.data import labelled
from mlm.errors import InputError
from mlm.glue.tasks import AX, MAJORITY, PROTOCOLS, TASKS, Protocol, Settings, Task
from mlm.paths import UPath, make_folder, remove, write_text
from mlm.sweep.bootstrap import paired
from mlm.sweep.runs import Outcome, Run, run_all
from mlm.tasks.scores import selected
from mlm.text import table
from mlm.workdir import Workdir

RESULT = "glue.json"


def source(data: str, name: str, split: str) -> str:
    """Returns where the rows of a split are: on the Hub, in a copy of its folder, or in DATA/TASK/SPLIT.jsonl."""
    data = data or {"glue": "hf:nyu-mll/glue", "super_glue": "hf:aps/super_glue"}[TASKS[name].suite]
    name, split = (AX, "test") if split == AX else (name, split)
    return f"{data}/{name}/{split}.jsonl" if data.startswith("jsonl:") else f"{data}:{name}#{split}"


def read(data: str, name: str, split: str, *, require_labels: bool = True) -> list[str | None]:
    """Returns the labels of a split; raises InputError for other columns or classes than the task's."""
    task, where = TASKS[name], source(data, name, split)
    options = {"text": task.text, "label": "label", "kind": "classes" if task.labels else "regression"}
    labels = labelled.read(where, split="validation", **options, require_labels=require_labels).labels
    if task.labels and require_labels:
        index = [_index(task, label) for label in labels]
        if None in index:
            odd = labels[index.index(None)]
            raise InputError(f"{where}: has the label {odd!r}; {name} has {', '.join(task.labels)}, or their indices.")
    return labels


def _index(task: Task, label: str) -> int | None:
    """Returns the index of a class, which files may have in the place of its name."""
    if label in task.labels:
        return task.labels.index(label)
    return int(label) if label.isdecimal() and int(label) < len(task.labels) else None


def run(
    names: Sequence[str],
    *,
    protocol: str,
    data: str,
    root: UPath,
    line: Sequence[str],
    given: Settings,
    most: int,
    engine: Engine | None,
) -> dict[str, Any]:
    """Runs the tasks, those that are not done; returns the table.

    Args:
      data: the folder of the data sets, "" for those of the Hub.
      line: flags of each run: its config file, the model that it starts from, and what sets the keys of `given`.
      given: settings that take the place of the protocol's.
      most: tokens that the model reads.

    Returns:
      {"protocol", "tasks": {TASK: {"metrics", "scores" of each seed, "median", "low", "high", "setting", "seeds",
      "device_hours"}}, "average" of the tasks without WNLI, "device_hours"}; a task whose runs failed has "failed".
    """
    own, tasks, start = PROTOCOLS[protocol], {}, ""
    for name in names:
        if name == MAJORITY:
            tasks[name] = _majority(data, root)
            continue
        if name in own.from_mnli and not start:
            tasks[name] = {"failed": "starts from MNLI's model, which failed", "code": tasks["mnli"]["code"]}
            continue
        first = (f"--config.train.init_from={start}",) if name in own.from_mnli else ()
        cells = [Cell(own, name, settings, root, data, most) for settings in own.cells(name, given)]
        outcomes = iter(
            run_all([run for cell in cells for run in cell.runs((*line, *first))], root=root, engine=engine)
        )
        ended = [[next(outcomes) for _ in cell.folders] for cell in cells]
        tasks[name] = _choose(list(zip(cells, ended, strict=True)), root)
        if name == "mnli":
            start = f"{tasks[name]['run']}/export" if "run" in tasks[name] else ""
        elif "run" in tasks[name]:
            for cell in cells:
                cell.remove_models()
    scores = [task["median"] for name, task in tasks.items() if name != MAJORITY and "median" in task]
    hours = sum(task.get("device_hours", 0.0) for task in tasks.values())
    average = statistics.mean(scores) if scores else None
    found = {"protocol": protocol, "tasks": tasks, "average": average, "device_hours": hours}
    write_text(root / RESULT, json.dumps(found, indent=1) + "\n")
    return found


class Cell:
    """The runs of a task with the same settings, one for each seed."""

    def __init__(self, protocol: Protocol, name: str, settings: Settings, root: UPath, data: str, most: int):
        """Takes the settings of `Protocol.cells`."""
        self.name, self.task, self.seeds = name, TASKS[name], protocol.seeds.get(name, protocol.seeds[""])
        self.chosen = {key: settings[key] for key in ("optimizer.learning_rate", "data.global_batch")}
        self.label = ",".join(f"{key.rpartition('.')[2]}={value:g}" for key, value in self.chosen.items())
        sets = [*self.task.validation[1:], *(split for split, _ in self.task.tests)]
        self.settings = settings | {
            "classify.length": min(settings["classify.length"], most),
            "classify.train": source(data, name, "train"),
            "classify.validation": source(data, name, self.task.validation[0]),
            "classify.predict": tuple((split, source(data, name, split)) for split in sets),
            "classify.text": self.task.text,
            "classify.label": "label",
            "classify.kind": "classes" if self.task.labels else "regression",
            "classify.metric": self.task.metrics,
        }
        self.folders = [root / "runs" / name / f"{self.label},seed={seed}" for seed in range(self.seeds)]

    def runs(self, line: Sequence[str]) -> list[Run]:
        """Returns the runs of all seeds."""
        found = []
        for seed, folder in enumerate(self.folders):
            settings = self.settings | {"train.seed": seed, "data.seed": seed}
            keys = (f"--config.{key}={value}" for key, value in settings.items())
            found.append(
                Run(f"{self.name} {folder.name}", str(folder), ("classify", f"--workdir={folder}", *keys, *line))
            )
        return found

    def scores(self) -> list[float]:
        """Returns the score of each seed on the validation rows: the mean over metrics, then over sets."""
        found = []
        for folder in self.folders:
            content = logs.read_object(Workdir(str(folder), create=False).classification)
            sets = [content["scores"], *(content["sets"][split] for split in self.task.validation[1:])]
            found.append(statistics.mean(selected(own, self.task.metrics) for own in sets))
        return found

    def remove_models(self) -> None:
        """Removes checkpoints, exports and compiled programs of finished runs: a table of a base model has many."""
        for folder in self.folders:
            for part in ("checkpoints", "export", "xla_cache"):
                if (folder / part).is_dir():
                    remove(folder / part)


def _choose(cells: list[tuple[Cell, list[Outcome]]], root: UPath) -> dict[str, Any]:
    """Returns the entry of a task: of the cell whose seeds have the best median; writes the files of its best run."""
    failed = [outcome for _, own in cells for outcome in own if outcome.code]
    if failed:
        return {"failed": f"{failed[0].run.name}: {failed[0].last_line}", "code": failed[0].code}
    scores = [cell.scores() for cell, _ in cells]
    best = max(range(len(cells)), key=lambda n: statistics.median(scores[n]))
    cell, own = cells[best][0], scores[best]
    chosen = cell.folders[own.index(max(own))]
    for split, file in cell.task.tests:
        with (chosen / "predictions" / f"{split}.tsv").open() as lines:
            found = [row["prediction"] for row in csv.DictReader(lines, delimiter="\t")]
        _submit(cell.task, found, root / "submission" / file)
    return {
        "metrics": cell.task.metrics,
        "scores": own,
        "median": statistics.median(own),
        "low": min(own),
        "high": max(own),
        "setting": cell.chosen,
        "folders": [str(folder) for folder in cell.folders],
        "run": str(chosen),
        "device_hours": sum(_devices(o.run.folder) * o.seconds for _, outcomes in cells for o in outcomes) / 3600,
    }


def _devices(folder: str) -> int:
    return logs.read(Workdir(folder, create=False).timing, "start")[-1]["devices"]


def _submit(task: Task, predicted: Sequence[str], file: UPath) -> None:
    """Writes predictions as the server takes them."""
    make_folder(file.parent)
    if not task.labels:  # STS-B: from 0 to 5
        shown = [f"{min(max(float(value), 0.0), 5.0):.3f}" for value in predicted]
    else:
        indices = [_index(task, label) for label in predicted]
        shown = [task.labels[index] if task.names else str(index) for index in indices]
    lines = [f"{number}\t{each}" for number, each in enumerate(shown)]
    write_text(file, "\n".join(["index\tprediction", *lines]) + "\n")


def _majority(data: str, root: UPath) -> dict[str, Any]:
    """Returns the entry of the task that every model predicts by its most frequent class, and writes its file."""
    task = TASKS[MAJORITY]
    most = Counter(read(data, MAJORITY, "train")).most_common(1)[0][0]
    labels = read(data, MAJORITY, "validation")
    for split, file in task.tests:
        _submit(task, [most] * len(read(data, MAJORITY, split, require_labels=False)), root / "submission" / file)
    share = labels.count(most) / len(labels)
    return {"metrics": task.metrics, "scores": [share], "median": share, "low": share, "high": share, "majority": most}


def compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns {TASK: the paired bootstrap of the right answers on the first validation set}, of two tables.

    Of a regression, each example's score is minus its squared error.
    """
    found = {}
    for name in one["tasks"].keys() & other["tasks"].keys():
        if all("folders" in each["tasks"][name] for each in (one, other)):
            scores = [[_right(folder, name) for folder in each["tasks"][name]["folders"]] for each in (one, other)]
            found[name] = paired(*map(np.array, scores))._asdict()
    return found


def _right(folder: str, name: str) -> list[float]:
    with (UPath(folder) / "predictions" / "validation.tsv").open() as lines:
        pairs = [(row["prediction"], row["label"]) for row in csv.DictReader(lines, delimiter="\t")]
    if TASKS[name].labels:
        return [float(predicted == label) for predicted, label in pairs]
    return [-((float(predicted) - float(label)) ** 2) for predicted, label in pairs]


def render(found: dict[str, Any], differences: dict[str, dict[str, float]] | None = None) -> list[RenderableType]:
    """Returns the table, with a column for `compare` if given."""
    cells = []
    for name, task in found["tasks"].items():
        if "failed" in task:
            cells.append((name, "failed", "", "", "", task["failed"]))
            continue
        spread = f"{task['low']:.1%} to {task['high']:.1%}, {len(task['scores'])}" if len(task["scores"]) > 1 else ""
        setting = ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in task.get("setting", {}).items())
        setting = setting or f"the majority class, {task['majority']}"
        hours = f"{task['device_hours']:.2f}" if "device_hours" in task else ""
        other = differences.get(name) if differences else None
        shown = f"{other['difference']:+.1%} ({other['low']:+.1%} to {other['high']:+.1%})" if other else ""
        cells.append((name, " + ".join(task["metrics"]), f"{task['median']:.1%}", spread, hours, shown or setting))
    last = "difference (95% interval)" if differences else "setting"
    heads = ("metric", ">median", "range, seeds", ">device hours", last)
    average = "no task is done" if found["average"] is None else f"average {found['average']:.1%}"
    note = f"{average}, without WNLI; protocol {found['protocol']}, {found['device_hours']:.2f} device hours"
    return [table("task", *heads, rows=cells), note]
