"""The scores of many runs in one table, as text, JSON and an HTML page. Nothing here imports jax."""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from mlm import config as configs
from mlm import logs
from mlm.errors import InputError
from mlm.paths import UPath, write_text
from mlm.report import compare, plots, report
from mlm.sweep import bootstrap, grid, runs
from mlm.sweep.grid import Case
from mlm.sweep.runs import Outcome
from mlm.tasks.scores import selected
from mlm.text import show, table

COLUMNS = ("median", "min", "max", "runs", "against the best")  # of the table, after those of the varied keys
SHOWN = "{difference:+.4f} ({low:+.4f} to {high:+.4f})"
LOWER = ("loss", "perplexity", "mse", "bits_per_byte")  # how the names of scores end that are better when lower


class Group(NamedTuple):
    """The runs that differ in their seeds alone."""

    values: dict[str, Any]  # without the seeds
    scores: list[float]
    cases: list[Case]

    @property
    def median(self) -> float:
        """The median of the scores."""
        return statistics.median(self.scores)


def read_scores(case: Case) -> dict[str, float]:
    """Returns what `evaluate` has printed, or the evaluation of a run's best checkpoint; {} if there is none.

    The first score is the one to compare by: the loss, or the mean of config.classify.metric.
    """
    folder = UPath(case.run.folder)
    if case.run.arguments[0] == "evaluate":
        lines = (folder / runs.OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        found = configs.flatten(json.loads([line for line in lines if line.startswith("{")][-1]))
        first = next((key for key in ("loss", *found) if key in found and key.endswith(("loss", "accuracy"))), "loss")
    else:
        evals, config = logs.read(folder / "metrics.jsonl", "eval"), configs.read(folder / "config.json")
        metrics = config.classify.metric if config else ()  # a run may have failed before it wrote its config
        found = report.best_evaluation(evals, config) if evals else {}
        first = " + ".join(metrics) or "loss"
        found |= {first: selected(found, metrics)} if found and metrics else {}
    scores = {first: found.get(first)} | found
    return {key: value for key, value in scores.items() if type(value) in (int, float) and math.isfinite(value)}


def sign(metric: str) -> int:
    """Returns 1 for a score that is better when it is higher, -1 for one that is better when it is lower."""
    return -1 if metric.endswith(LOWER) else 1


def write(root: UPath, cases: Sequence[Case], outcomes: Sequence[Outcome], metric: str) -> None:
    """Writes sweep.json and sweep.html, prints the table; InputError if no run has the score `metric`, "" for any.

    Nothing is best by scores of a test split, which are there to be reported.
    """
    scores = [{} if outcome.code else read_scores(case) for case, outcome in zip(cases, outcomes, strict=True)]
    known = {key: None for each in scores for key in each}
    metric = metric or next(iter(known), "loss")
    if known and metric not in known:
        raise InputError(f"--metric={metric}: the runs have no such score; name one of {', '.join(known)}.")
    groups = summarize(cases, [each.get(metric) for each in scores])
    if any(case.values.get("split") == "test" for case in cases):
        best, rule = None, f"{metric}: scores of a test split choose nothing, so no setting is marked as the best"
    else:
        best = max(groups, key=lambda group: sign(metric) * group.median, default=None)
        rule = f"{metric}: the {'lowest' if sign(metric) < 0 else 'highest'} median over seeds is best"
    head = {"command": cases[0].run.arguments[0], "trained_by": cases[0].run.program.identity, "rule": rule}
    differences = [best and _compare(group, best) for group in groups]
    lines = [
        {"values": g.values, "scores": g.scores, "median": g.median, "best": g is best, "difference": each}
        for g, each in zip(groups, differences, strict=True)
    ]
    ended = [
        {
            **case.run._asdict(),
            "program": case.run.program.command,
            "values": case.values,
            **outcome._asdict(),
            "run": case.run.name,
            "scores": own,
        }
        for case, outcome, own in zip(cases, outcomes, scores, strict=True)
    ]
    write_text(root / "sweep.json", json.dumps(head | {"groups": lines, "runs": ended}, indent=1) + "\n")
    if not groups:
        return  # no run is done
    names, columns = grid.short_keys(groups[0].values), COLUMNS if best else COLUMNS[:-1]
    rows = []
    for group, difference in zip(groups, differences, strict=True):
        numbers = (f"{each:.4f}" for each in (group.median, min(group.scores), max(group.scores)))
        mark = "best" if group is best else difference and SHOWN.format(**difference)
        row = (*map(str, group.values.values()), *numbers, str(len(group.scores)), mark or "")
        rows.append(row[: len(names) + len(columns)])
    tables = {"rows": rows, "head": [*names.values(), *columns], "runs": _rows(cases, outcomes, scores, metric)}
    figures = {f"{metric} over {key}": draw(groups, key, metric) for key in names}
    write_text(root / "sweep.html", report.render_page("sweep.html.j2", figures, name=root.name, **head, **tables))
    heads = (*names.values(), *(f">{name}" for name in columns))
    show(rule, table(*heads, rows=rows), f"\ntable  {root / 'sweep.html'}")


def summarize(cases: Sequence[Case], scores: Sequence[float | None]) -> list[Group]:
    """Returns the groups of the runs that have a score, in the order of the grid."""
    groups: dict[str, Group] = {}
    for case, score in zip(cases, scores, strict=True):
        kept = {key: value for key, value in case.values.items() if not key.endswith("seed")}
        if score is not None:
            group = groups.setdefault(repr(kept), Group(kept, [], []))
            group.scores.append(score)
            group.cases.append(case)
    return list(groups.values())


def draw(groups: Sequence[Group], key: str, metric: str) -> Figure:
    """Returns the scores over the values of a key, a curve for each choice of the other keys: the best ones."""
    curves: dict[str, list[tuple[Any, float, float, float]]] = {}
    for group in groups:
        others = {other: value for other, value in group.values.items() if other != key}
        name = grid.label(others)
        curves.setdefault(name, []).append((group.values[key], min(group.scores), group.median, max(group.scores)))
    best = sorted(curves, key=lambda name: -max(sign(metric) * median for *_, median, _ in curves[name]))
    return plots.draw_over_values({name: curves[name] for name in best}, key, metric)


def _compare(group: Group, best: Group) -> dict[str, float] | None:
    """Returns `bootstrap.compare` of the classifiers of a group and the best one; None where it says nothing."""
    configs, folders = best.cases[0].config, [[case.run.folder for case in each.cases] for each in (group, best)]
    if group is best or configs.get("classify.kind") not in ("classes", "regression"):
        return None
    found = bootstrap.compare(*folders, numbers=configs["classify.kind"] == "regression")
    return found and found._asdict()


def _rows(cases: Sequence[Case], outcomes: Sequence[Outcome], scores: Sequence[dict], metric: str) -> report.Rows:
    """Returns head and rows of all runs: how they ended, and the config keys in which they differ."""
    columns = [
        ("run", *(case.run.name for case in cases)),
        (metric, *(f"{each[metric]:.4f}" if metric in each else "" for each in scores)),
        ("step", *(str(each.get("step", "")) for each in scores)),
        ("time", *(report.duration(outcome.seconds) for outcome in outcomes)),
        ("exit code", *(str(outcome.code) for outcome in outcomes)),
        *compare.differences([case.config | case.values for case in cases]),
    ]
    return list(zip(*columns, strict=True))
