"""The scores of many runs in one table, as text, JSON and an HTML page. Nothing here imports jax."""

import itertools
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
from mlm.report import plots, report
from mlm.sweep import bootstrap, grid, runs
from mlm.sweep.bootstrap import Difference
from mlm.sweep.grid import Case
from mlm.sweep.runs import Outcome
from mlm.tasks.scores import selected
from mlm.text import show, table

COLUMNS = ("median", "min", "max", "runs", "against the best")  # of the table, after those of the varied keys
LOWER = ("loss", "perplexity", "mse", "bits_per_byte")  # how the names of scores end that are better when lower
LOWER += ("_se_draws", "_se_records")  # standard errors


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
    """Returns the scores that `evaluate` printed, or those of a run's best checkpoint; {} if there are none.

    The first score is the one to compare by: the loss, or the mean of config.classify.metric.
    """
    scores = _logged(case)
    return {key: value for key, value in scores.items() if type(value) in (int, float) and math.isfinite(value)}


def _logged(case: Case) -> dict[str, Any]:
    """Returns `read_scores`, with None for those that are not finite, and with texts."""
    folder = UPath(case.run.folder)
    if case.run.arguments[0] == "evaluate":
        printed = (folder / runs.OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        scores = configs.flatten(json.loads([line for line in printed if line.startswith("{")][-1]))
        first = next((key for key in ("loss", *scores) if key in scores and key.endswith(("loss", "accuracy"))), "loss")
    else:
        config = configs.read(folder / "config.json")
        saved = {line["step"] for line in logs.read(folder / "timing.jsonl", "checkpoint")}
        evals = [line for line in logs.read(folder / "metrics.jsonl", "eval") if line["step"] in saved]
        metrics = config.classify.metric if config else ()  # a run may have failed before it wrote its config
        scores, first = report.best_evaluation(evals, config) if evals else {}, " + ".join(metrics) or "loss"
        if scores and metrics:
            scores = scores | {first: selected(scores, metrics)}
    return {first: scores.get(first)} | scores


def check_metric(metric: str, case: Case) -> None:
    """Raises InputError if a run that is done has no score of that name, finite or not; "" is any."""
    names = [name for name, value in _logged(case).items() if value is None or type(value) in (int, float)]
    if metric and metric not in names:
        raise InputError(f"--metric={metric}: {case.run.name} has no such score; name one of {', '.join(names)}.")


def check_name(metric: str, cases: Sequence[Case]) -> None:
    """Raises InputError if training by mlm's own classes has no score of that name; "" is any."""
    names = dict.fromkeys([*logs.SCORES, *(" + ".join(case.config["classify.metric"]) for case in cases)])
    if metric and metric.rpartition("/")[2] not in names:
        raise InputError(f"--metric={metric}: is no score; name one of {', '.join(filter(None, names))}.")


def sign(metric: str) -> int:
    """Returns 1 for a score that is better when it is higher, -1 for one that is better when it is lower."""
    return -1 if metric.endswith(LOWER) else 1


def write(root: UPath, cases: Sequence[Case], outcomes: Sequence[Outcome], metric: str) -> None:
    """Writes sweep.json and sweep.html, prints the table; InputError if no run has the score `metric`, "" for any.

    Scores of a test split are reported, but choose no best setting.
    """
    scores = [{} if outcome.code else read_scores(case) for case, outcome in zip(cases, outcomes, strict=True)]
    known = dict.fromkeys(key for run_scores in scores for key in run_scores)
    metric = metric or next(iter(known), "loss")
    if known and metric not in known:
        raise InputError(f"--metric={metric}: the runs have no such score; name one of {', '.join(known)}.")
    groups = summarize(cases, [run_scores.get(metric) for run_scores in scores])
    if any(case.values.get("split") == "test" for case in cases):
        best, rule = None, f"{metric}: scores of a test split choose nothing, so no setting is marked as the best"
    else:
        best = max(groups, key=lambda group: sign(metric) * group.median, default=None)
        rule = f"{metric}: the {'lowest' if sign(metric) < 0 else 'highest'} median over seeds is best"
    head = {"command": cases[0].run.arguments[0], "trained_by": cases[0].run.program.identity, "rule": rule}
    summaries, rows = [], []
    for group in groups:
        difference, spread = best and _compare(group, best), (group.median, min(group.scores), max(group.scores))
        summary = {"values": group.values, "scores": group.scores, "median": group.median, "best": group is best}
        summaries.append(summary | {"difference": difference and difference._asdict()})
        cells = [*map(str, group.values.values()), *(f"{score:.4f}" for score in spread), str(len(group.scores))]
        if best:
            cells.append("best" if group is best else str(difference or ""))
        rows.append(cells)
    ended = [
        case.run._asdict()
        | outcome._asdict()
        | {"run": case.run.name, "program": case.run.program.command, "values": case.values, "scores": run_scores}
        for case, outcome, run_scores in zip(cases, outcomes, scores, strict=True)
    ]
    write_text(root / "sweep.json", json.dumps(head | {"groups": summaries, "runs": ended}, indent=1) + "\n")
    if not groups:
        return  # no run is done
    names, columns = grid.short_keys(groups[0].values), COLUMNS if best else COLUMNS[:-1]
    trained_by = f" with {head['trained_by']}" if head["trained_by"] else ""
    tables = [
        ("", [[*names.values(), *columns], *rows], "numbers"),
        ("Runs, and the keys in which they differ", _rows(cases, outcomes, scores, metric), "numbers"),
    ]
    lead = f"{len(cases):,} runs of {head['command']}{trained_by}. {rule}."
    write_text(root / "sweep.html", report.render_tables(root.name, lead, tables, draw(groups, metric)))
    show(rule, table(*names.values(), *(f">{name}" for name in columns), rows=rows), f"\ntable  {root / 'sweep.html'}")


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


def draw(groups: Sequence[Group], metric: str) -> dict[str, Figure]:
    """Returns title -> figure of the scores over each varied number: a curve for each choice of the other keys."""
    figures = {}
    for key in groups[0].values:
        values = [group.values[key] for group in groups]
        if not all(type(value) in (int, float) for value in values) or len(set(values)) == 1:
            continue
        curves: dict[str, list[tuple[float, ...]]] = {}
        for group in groups:
            others = {other: value for other, value in group.values.items() if other != key}
            name = ", ".join(f"{short}={others[other]}" for other, short in grid.short_keys(others).items())
            point = (group.values[key], min(group.scores), group.median, max(group.scores))
            curves.setdefault(name, []).append(point)
        shown = dict(itertools.islice(curves.items(), len(plots.COLORS)))
        left_out = f", {len(shown)} of {len(curves)} curves" if len(shown) < len(curves) else ""
        figures[f"{metric} over {key}{left_out}"] = plots.draw_over_values(shown, key, metric)
    return figures


def _compare(group: Group, best: Group) -> Difference | None:
    """Returns `bootstrap.compare` of the classifiers of a group and the best one; None where they can't be compared."""
    kind, folders = best.cases[0].config.get("classify.kind"), [case.run.folder for case in group.cases]
    if group is best or kind not in ("classes", "regression"):
        return None
    return bootstrap.compare(folders, [case.run.folder for case in best.cases], numbers=kind == "regression")


def _rows(cases: Sequence[Case], outcomes: Sequence[Outcome], scores: Sequence[dict], metric: str) -> report.Rows:
    """Returns head and rows of all runs: how they ended, and the config keys in which they differ."""
    columns = [
        ("run", *(case.run.name for case in cases)),
        (metric, *(f"{run_scores[metric]:.4f}" if metric in run_scores else "" for run_scores in scores)),
        ("step", *(str(run_scores.get("step", "")) for run_scores in scores)),
        ("time", *(report.duration(outcome.seconds) for outcome in outcomes)),
        ("exit code", *(str(outcome.code) for outcome in outcomes)),
        *report.differences([case.config | case.values for case in cases]),
    ]
    return list(zip(*columns, strict=True))
