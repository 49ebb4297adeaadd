"""The scores of many runs in one table, as text, JSON and an HTML page. Nothing here imports jax."""

import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from mlm import logs
from mlm.errors import InputError
from mlm.paths import UPath, write_text
from mlm.report import compare, plots, report
from mlm.sweep import grid, runs
from mlm.sweep.runs import Outcome, Run
from mlm.text import show, table

COLUMNS = ("median", "min", "max", "runs", "")  # of the table, after those of the varied keys
LOWER = ("loss", "perplexity", "mse", "bits_per_byte")  # how the names of scores end that are better when lower


class Case(NamedTuple):
    """A run of the grid that has ended."""

    values: dict[str, Any]  # of the varied keys
    config: dict[str, Any]  # flattened
    outcome: Outcome


class Group(NamedTuple):
    """The runs that differ in their seeds alone."""

    values: dict[str, Any]  # without the seeds
    scores: list[float]

    @property
    def median(self) -> float:
        """The median of the scores."""
        return statistics.median(self.scores)


def is_lower_better(metric: str) -> bool:
    """Returns whether a score is better when it is lower."""
    return metric.endswith(LOWER)


def default_metric(scores: dict[str, Any]) -> str:
    """Returns the score that decides: the accuracy of a classifier, the loss of any other model."""
    return "accuracy" if "accuracy" in scores and "perplexity" not in scores else "loss"


def read_scores(run: Run) -> dict[str, Any]:
    """Returns what `evaluate` has printed, or the evaluation of a run's best checkpoint; {} if there is none."""
    if run.arguments[0] == "evaluate":
        lines = (UPath(run.folder) / runs.OUTPUT).read_text(errors="replace").splitlines()
        printed = [json.loads(line) for line in lines if line.startswith("{")]
        return {key: value for key, value in printed[-1].items() if type(value) in (int, float)}
    lines = logs.read(UPath(run.folder) / "metrics.jsonl", "eval")[::-1]  # the newest of equal ones
    metric = default_metric(lines[0]) if lines else ""
    finite = [line for line in lines if line[metric] is not None]
    return (min if is_lower_better(metric) else max)(finite, key=lambda line: line[metric], default={})


def summarize(values: Sequence[dict[str, Any]], scores: Sequence[float | None]) -> list[Group]:
    """Returns the groups of the runs that have a score, in the order of the grid."""
    groups: dict[str, Group] = {}
    for own, score in zip(values, scores, strict=True):
        kept = {key: value for key, value in own.items() if not grid.is_seed(key)}
        if score is not None:
            groups.setdefault(repr(kept), Group(kept, [])).scores.append(score)
    return list(groups.values())


def write(root: UPath, command: str, cases: Sequence[Case], metric: str) -> None:
    """Writes sweep.json and sweep.html and prints the table; raises InputError if no run has the score `metric`."""
    scores = [read_scores(case.outcome.run) if case.outcome.code == 0 else {} for case in cases]
    known = {key: None for each in scores for key, value in each.items() if type(value) in (int, float)}
    metric = metric or default_metric(known)
    if known and metric not in known:
        raise InputError(f"--metric={metric}: the runs have no such score; name one of {', '.join(known)}.")
    groups = summarize([case.values for case in cases], [each.get(metric) for each in scores])
    sign = -1 if is_lower_better(metric) else 1
    best = max(groups, key=lambda group: sign * group.median, default=None)
    rule = f"{metric}: the {'lowest' if sign < 0 else 'highest'} median over seeds is best"
    _write_json(root, cases, scores, [(group, group is best) for group in groups], {"command": command, "rule": rule})
    if best is None:
        return  # no run is done
    names = grid.short_keys([*best.values])
    rows = [_row(group, "best" if group is best else "") for group in groups]
    figures = {f"{metric} over {key}": draw(groups, key, metric) for key in names}
    tables = {"rows": rows, "head": [*names.values(), *COLUMNS], "runs": _rows(cases, scores, metric)}
    page = report.render_page("sweep.html.j2", figures, name=root.name, command=command, rule=rule, **tables)
    write_text(root / "sweep.html", page)
    show(rule, table(*names.values(), *(f">{name}" for name in COLUMNS), rows=rows), f"\ntable  {root / 'sweep.html'}")


def draw(groups: Sequence[Group], key: str, metric: str) -> Figure:
    """Returns the scores over the values of a key, a curve for each choice of the other keys: the best ones."""
    curves: dict[str, list[tuple[Any, float, float, float]]] = {}
    for group in sorted(groups, key=lambda group: group.median, reverse=not is_lower_better(metric)):
        name = grid.label({other: value for other, value in group.values.items() if other != key})
        curves.setdefault(name, []).append((group.values[key], min(group.scores), group.median, max(group.scores)))
    order = {repr(group.values[key]): place for place, group in enumerate(groups)}
    curves = {name: sorted(curve, key=lambda point: order[repr(point[0])]) for name, curve in curves.items()}
    return plots.draw_over_values(curves, key, metric)


def _row(group: Group, mark: str) -> tuple[str, ...]:
    numbers = (f"{each:.4f}" for each in (group.median, min(group.scores), max(group.scores)))
    return (*map(grid.text_of, group.values.values()), *numbers, str(len(group.scores)), mark)


def _rows(cases: Sequence[Case], scores: Sequence[dict[str, Any]], metric: str) -> report.Rows:
    """Returns head and rows of all runs: how they ended, and the config keys in which they differ."""
    found = [case.config | case.values for case in cases]
    columns = [
        ("run", *(case.outcome.run.name for case in cases)),
        (metric, *(f"{each[metric]:.4f}" if metric in each else "" for each in scores)),
        ("step", *(str(each.get("step", "")) for each in scores)),
        ("time", *(report.duration(case.outcome.seconds) for case in cases)),
        ("exit code", *(str(case.outcome.code) for case in cases)),
        *compare.differences(found),
    ]
    return list(zip(*columns, strict=True))


def _write_json(
    root: UPath, cases: Sequence[Case], scores: Sequence[dict], groups: Sequence[tuple[Group, bool]], head: dict
) -> None:
    ended = [case.outcome._asdict() | case.outcome.run._asdict() for case in cases]
    own = [{"values": case.values, "scores": each} for case, each in zip(cases, scores, strict=True)]
    content = head | {
        "groups": [group._asdict() | {"median": group.median, "best": best} for group, best in groups],
        "runs": [{k: v for k, v in (a | b).items() if k != "run"} for a, b in zip(own, ended, strict=True)],
    }
    write_text(root / "sweep.json", json.dumps(content, indent=1) + "\n")
