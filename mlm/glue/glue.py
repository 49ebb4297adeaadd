"""GLUE by a protocol: runs of `classify`, chosen on the validation rows, as one table and the server's files."""

import csv
import io
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import RenderableType

from mlm import config as configs
from mlm import logs
from mlm.data import labelled
from mlm.errors import InputError
from mlm.glue.tasks import AX, MAJORITY, TASKS, Protocol, Settings, Task, load_protocol
from mlm.paths import UPath, make_folder, remove, write_text
from mlm.report.summary import glue_rows
from mlm.sweep import grid
from mlm.sweep.runs import Outcome, Trial, run_all
from mlm.sweep.table import summarize
from mlm.tasks.scores import selected
from mlm.text import table

RESULT = "glue.json"
MODELS = ("checkpoints", "export", "xla_cache")  # folders of a run, which take much room
CHOSEN = ("optimizer.learning_rate", "data.global_batch", "train.seed")  # keys that name a run


def source(data: str, name: str, split: str) -> str:
    """Returns where the rows of a split are: on the Hub, in a copy of its folder, or in DATA/TASK/SPLIT.jsonl."""
    data = data or {"glue": "hf:nyu-mll/glue", "super_glue": "hf:aps/super_glue"}[TASKS[name].suite]
    name, split = (AX, "test") if split == AX else (name, split)
    return f"{data}/{name}/{split}.jsonl" if data.startswith("jsonl:") else f"{data}:{name}#{split}"


def read(data: str, name: str, split: str, *, require_labels: bool = True) -> list[str | None]:
    """Returns the labels of a split.

    Raises InputError for other columns or classes than the task's.
    """
    task = TASKS[name]
    where = source(data, name, split)
    columns = labelled.Columns(task.text, "label", "classes" if task.labels else "regression")
    rows = labelled.read_table(
        where, columns, split="validation", require_labels=require_labels, key="--data"
    )
    for label in rows.labels if task.labels and require_labels else ():
        if _index(task, label) is None:
            known = f"{name} has {', '.join(task.labels)}, or their indices"
            raise InputError(f"{where}: has the label {label!r}; {known}.")
    return rows.labels


def _index(task: Task, label: str) -> int | None:
    """Returns the index of a class, which files may have in the place of its name."""
    label = labelled.spelling(label)
    names = [labelled.spelling(name) for name in task.labels]
    if label in names:
        return names.index(label)
    return int(label) if label.isdecimal() and int(label) < len(task.labels) else None


class Setup(NamedTuple):
    """What all runs of a table have in common."""

    protocol: str
    data: str  # folder of the data sets, "" for those of the Hub
    root: UPath
    flags: Sequence[str]  # of each run: its config file, its model, and the `overrides`
    overrides: Settings  # in the place of the protocol's
    longest: int  # tokens that the model reads


def run(names: Sequence[str], setup: Setup) -> dict[str, Any]:
    """Runs the tasks that are not done; returns their table: "protocol", "tasks" (`_choose`), and those of `means`."""
    recipe = load_protocol(setup.protocol)
    overrides = setup.overrides
    tasks: dict[str, Any] = {}
    for name in names:
        if name == MAJORITY:
            tasks[name] = _majority(setup.data, setup.root)
            continue
        start = []
        if name in recipe.from_mnli:
            if "failed" in tasks["mnli"]:
                failed = {"failed": "starts from MNLI's model, which failed"}
                tasks[name] = failed | {"code": tasks["mnli"]["code"]}
                continue
            start.append(f"--config.train.init_from={tasks['mnli']['run']}/export")
        trials = plan(recipe, name, setup, start)
        tasks[name] = _choose(name, run_all(trials, setup.root, name), setup.root)
        if "run" in tasks[name] and name != "mnli":  # the models of a table take much room
            for trial, part in itertools.product(trials, MODELS):
                remove(UPath(trial.folder) / part)
    cell = next(recipe.cells(names[0], {}))
    others = sorted(
        key for key in overrides if key not in cell and not configs.resume_may_change(key)
    )
    changed = [f"{key}={overrides[key]}" for key in (*cell, *others) if key in overrides]
    protocol = f"{setup.protocol} (with {', '.join(changed)})" if changed else setup.protocol
    return {"protocol": protocol, "tasks": tasks} | means(tasks)


def means(tasks: dict[str, Any]) -> dict[str, float | None]:
    """Returns the "average" over the tasks, None if one has failed, and their "device_hours"."""
    scored = [task for name, task in tasks.items() if name != MAJORITY]
    # The mean of the others would be another score
    failed = not scored or any("failed" in task for task in scored)
    average = None if failed else statistics.mean(task["median"] for task in scored)
    return {
        "average": average,
        "device_hours": sum(task.get("device_hours", 0.0) for task in tasks.values()),
    }


def save(root: UPath, table: dict[str, Any]) -> dict[str, Any]:
    """Writes a table, joined with the one there if that is of the same model; returns it."""
    old = logs.read_object(root / RESULT)
    table = join(old, table) if old.get("model") == table["model"] else table
    write_text(root / RESULT, json.dumps(table, indent=1) + "\n")
    return table


def join(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the new table of a model with the other tasks of its old one, if that is of the same protocol."""
    if old.get("protocol") != new["protocol"]:
        return new
    known = old["tasks"] | new["tasks"]
    tasks = {name: known[name] for name in TASKS if name in known}
    return new | {"tasks": tasks} | means(tasks)


def plan(protocol: Protocol, name: str, setup: Setup, start: Sequence[str] = ()) -> list[Trial]:
    """Returns the runs of a task, over its settings and the seeds; `start` are flags of its own."""
    task = TASKS[name]
    data = setup.data
    trials = []
    sets = [*task.validation[1:], *(split for split, _ in task.tests)]
    rows = {
        "classify.train": source(data, name, "train"),
        "classify.validation": source(data, name, task.validation[0]),
        "classify.predict": tuple((split, source(data, name, split)) for split in sets),
        "classify.text": task.text,
        "classify.label": "label",
        "classify.kind": "classes" if task.labels else "regression",
        "classify.metric": task.metrics,
    }
    for cell in protocol.cells(name, setup.overrides):
        length = min(cell["classify.length"], setup.longest)
        for seed in range(protocol.seeds.get(name, protocol.seeds[""])):
            settings = (
                cell | rows | {"classify.length": length, "train.seed": seed, "data.seed": seed}
            )
            values = {key: settings[key] for key in CHOSEN}
            folder = setup.root / "runs" / name / grid.name(values)
            keys = (f"--config.{key}={value}" for key, value in settings.items())
            arguments = ("classify", f"--workdir={folder}", *keys, *setup.flags, *start)
            trials.append(Trial(f"{name} {folder.name}", str(folder), arguments, values))
    return trials


def _choose(name: str, outcomes: Sequence[Outcome], root: UPath) -> dict[str, Any]:
    """Returns the entry of a task: of the setting with the best median.

    Writes the files of its best run.
    """
    failed = next((outcome for outcome in outcomes if outcome.code), None)
    if failed:
        return {"failed": f"{failed.trial.name}: {failed.last_line}", "code": failed.code}
    trials = [outcome.trial for outcome in outcomes]
    groups = summarize(trials, [_score(name, trial) for trial in trials])
    best = max(groups, key=lambda group: group.median)
    chosen = UPath(best.trials[best.scores.index(max(best.scores))].folder)
    for split, file in TASKS[name].tests:
        text = (chosen / "predictions" / f"{split}.tsv").read_text(encoding="utf-8")
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t")
        _submit(TASKS[name], [row["prediction"] for row in rows], root / "submission" / file)
    return _entry(name, best.scores) | {
        "setting": best.values,
        "run": str(chosen),
        "device_hours": sum(outcome.seconds * _devices(outcome.trial) for outcome in outcomes)
        / 3600,
    }


def _entry(name: str, scores: list[float]) -> dict[str, Any]:
    return {
        "metrics": TASKS[name].metrics,
        "scores": scores,
        "median": statistics.median(scores),
        "low": min(scores),
        "high": max(scores),
    }


def _devices(trial: Trial) -> int:
    return logs.read(UPath(trial.folder) / "timing.jsonl", "start")[-1]["devices"]


def _score(name: str, trial: Trial) -> float:
    """Returns the score of a run on the validation rows: the mean over metrics, then over sets."""
    content = logs.read_object(UPath(trial.folder) / "classification.json")
    sets = [content["scores"], *(content["sets"][split] for split in TASKS[name].validation[1:])]
    return statistics.mean(selected(scores, TASKS[name].metrics) for scores in sets)


def _submit(task: Task, predicted: Sequence[str], file: UPath) -> None:
    """Writes predictions as GLUE's server takes them, or SuperGLUE's."""
    if not task.labels:  # STS-B: from 0 to 5
        shown = [f"{min(max(float(value), 0.0), 5.0):.3f}" for value in predicted]
    else:
        indices = [_index(task, label) for label in predicted]
        named = task.names or file.suffix == ".jsonl"
        shown = [task.labels[index] if named else str(index) for index in indices]
    if file.suffix == ".jsonl":
        rows = ({"idx": number, "label": label.lower()} for number, label in enumerate(shown))
        lines = [json.dumps(row) for row in rows]
    else:
        lines = ["index\tprediction"]
        lines += [f"{number}\t{label}" for number, label in enumerate(shown)]
    make_folder(file.parent)
    write_text(file, "\n".join(lines) + "\n")


def _majority(data: str, root: UPath) -> dict[str, Any]:
    """Returns the entry of WNLI, predicted by its most frequent class alone, and writes its file."""
    task = TASKS[MAJORITY]
    [(label, _)] = Counter(read(data, MAJORITY, "train")).most_common(1)
    labels = read(data, MAJORITY, "validation")
    for split, file in task.tests:
        count = len(read(data, MAJORITY, split, require_labels=False))
        _submit(task, [label] * count, root / "submission" / file)
    score = labels.count(label) / len(labels)
    return _entry(MAJORITY, [score]) | {"majority": label}


def render(result: dict[str, Any]) -> list[RenderableType]:
    """Returns the table of a result of `run`."""
    head, *rows = glue_rows(result)
    return [table(*head, rows=rows), f"protocol {result['protocol']}"]
