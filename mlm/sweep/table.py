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
from mlm.sweep.grid import Case
from mlm.sweep.runs import Outcome
from mlm.text import show, table

COLUMNS = ("median", "min", "max", "runs", "")  # of the table, after those of the varied keys
LOWER = ("loss", "perplexity", "mse", "bits_per_byte")  # how the names of scores end that are better when lower


class Group(NamedTuple):
    """The runs that differ in their seeds alone."""

    values: dict[str, Any]  # without the seeds
    scores: list[float]

    @property
    def median(self) -> float:
        """The median of the scores."""
        return statistics.median(self.scores)


def read_scores(case: Case) -> dict[str, float]:
    """Returns what `evaluate` has printed, or the evaluation of a run's best checkpoint; {} if there is none."""
    folder = UPath(case.run.folder)
    if case.run.arguments[0] == "evaluate":
        lines = (folder / runs.OUTPUT).read_text(errors="replace").splitlines()
        found = json.loads([line for line in lines if line.startswith("{")][-1])
    else:
        evals = logs.read(folder / "metrics.jsonl", "eval")
        found = report.best_evaluation(evals, case.config) if evals else {}
    return {key: value for key, value in found.items() if type(value) in (int, float)}


def is_lower_better(metric: str) -> bool:
    """Returns whether a score is better when it is lower."""
    return metric.endswith(LOWER)


def write(root: UPath, cases: Sequence[Case], outcomes: Sequence[Outcome], metric: str) -> None:
    """Writes sweep.json and sweep.html and prints the table; raises InputError if no run has the score `metric`.

    metric: "" for the one that chooses the best checkpoint, the first of several.
    """
    scores = [{} if outcome.code else read_scores(case) for case, outcome in zip(cases, outcomes, strict=True)]
    known = {key: None for each in scores for key in each}
    metric = metric or (*report.deciding_metrics(known, cases[0].config), "loss")[0]
    if known and metric not in known:
        raise InputError(f"--metric={metric}: the runs have no such score; name one of {', '.join(known)}.")
    sign = -1 if is_lower_better(metric) else 1
    groups = summarize(cases, [each.get(metric) for each in scores])
    best = max(groups, key=lambda group: sign * group.median, default=None)
    rule = f"{metric}: the {'lowest' if sign < 0 else 'highest'} median over seeds is best"
    content = {"command": cases[0].run.arguments[0], "rule": rule}
    ended = [outcome._asdict() | {"run": outcome.run._asdict()} for outcome in outcomes]
    own = [{"values": case.values, "scores": each} for case, each in zip(cases, scores, strict=True)]
    lines = [group._asdict() | {"median": group.median, "best": group is best} for group in groups]
    whole = content | {"groups": lines, "runs": [a | b for a, b in zip(own, ended, strict=True)]}
    write_text(root / "sweep.json", json.dumps(whole, indent=1) + "\n")
    if best is not None:  # a run is done
        names = grid.short_keys(best.values)
        rows = [_row(group, "best" if group is best else "") for group in groups]
        figures = {f"{metric} over {key}": draw(groups, key, metric) for key in names}
        tables = {"rows": rows, "head": [*names.values(), *COLUMNS], "runs": _rows(cases, outcomes, scores, metric)}
        write_text(
            root / "sweep.html", report.render_page("sweep.html.j2", figures, name=root.name, **content, **tables)
        )
        heads = [*names.values(), *(f">{name}" for name in COLUMNS)]
        show(rule, table(*heads, rows=rows), f"\ntable  {root / 'sweep.html'}")


def summarize(cases: Sequence[Case], scores: Sequence[float | None]) -> list[Group]:
    """Returns the groups of the runs that have a score, in the order of the grid."""
    groups: dict[str, Group] = {}
    for case, score in zip(cases, scores, strict=True):
        kept = {key: value for key, value in case.values.items() if not grid.is_seed(key)}
        if score is not None:
            groups.setdefault(repr(kept), Group(kept, [])).scores.append(score)
    return list(groups.values())


def draw(groups: Sequence[Group], key: str, metric: str) -> Figure:
    """Returns the scores over the values of a key, a curve for each choice of the other keys: the best ones."""
    curves: dict[str, list[tuple[Any, float, float, float]]] = {}
    for group in groups:
        others = {other: value for other, value in group.values.items() if other != key}
        name = ", ".join(f"{short}={grid.text_of(others[other])}" for other, short in grid.short_keys(others).items())
        curves.setdefault(name, []).append((group.values[key], min(group.scores), group.median, max(group.scores)))
    sign = 1 if is_lower_better(metric) else -1
    best = sorted(curves, key=lambda name: min(sign * median for *_, median, _ in curves[name]))
    return plots.draw_over_values({name: curves[name] for name in best}, key, metric)


def _row(group: Group, mark: str) -> tuple[str, ...]:
    numbers = (f"{each:.4f}" for each in (group.median, min(group.scores), max(group.scores)))
    return (*map(grid.text_of, group.values.values()), *numbers, str(len(group.scores)), mark)


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
