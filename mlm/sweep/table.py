"""The scores of many runs in one table: median, spread, best; as text, JSON and a page.

Nothing here imports jax.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from mlm import config as configs
from mlm import logs
from mlm.errors import InputError
from mlm.paths import UPath, write_text
from mlm.report import page, report
from mlm.sweep import grid, runs
from mlm.sweep.runs import Outcome, Trial
from mlm.tasks.scores import selected
from mlm.text import show, table

COLUMNS = ("median", "min", "max", "runs", "")  # of the table, after those of the varied keys
# How the names of scores end that are better when lower; the last two are standard errors
LOWER = ("loss", "perplexity", "mse", "bits_per_byte", "_se_draws", "_se_records")


class Group(NamedTuple):
    """The runs that differ in their seeds alone."""

    values: dict[str, Any]  # without the seeds
    trials: list[Trial]
    scores: list[float]

    @property
    def median(self) -> float:
        """The median of the scores."""
        return statistics.median(self.scores)


def read_scores(trial: Trial) -> dict[str, float]:
    """Returns the scores that `evaluate` printed, or those of a run's best checkpoint; {} if there are none.

    The first score is the one to compare by: the loss, or the mean of config.classify.metric.
    """
    folder = UPath(trial.folder)
    if trial.arguments[0] == "evaluate":
        printed = (folder / runs.OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        scores = configs.flatten(json.loads([line for line in printed if line.startswith("{")][-1]))
        losses = [key for key in scores if key.endswith(("loss", "accuracy"))]
        first = "loss" if "loss" in scores else next(iter(losses), "loss")
    else:
        config = configs.read(folder / "config.json")
        saved = {line["step"] for line in logs.read(folder / "timing.jsonl", "checkpoint")}
        evals = [
            line for line in logs.read(folder / "metrics.jsonl", "eval") if line["step"] in saved
        ]
        metrics = config.classify.metric if config else ()
        scores = report.best_evaluation(evals, config) if evals else {}
        first = " + ".join(metrics) or "loss"
        if scores and metrics:
            scores = {**scores, first: selected(scores, metrics)}
    scores = {first: scores.get(first)} | scores
    numbers = {key: value for key, value in scores.items() if type(value) in (int, float)}
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def check_name(metric: str, chosen_by: Sequence[str]) -> None:
    """Raises InputError if training by mlm's own classes has no score of that name; "" is any.

    Args:
      chosen_by: config.classify.metric.
    """
    names = [*logs.SCORES, *filter(None, [" + ".join(chosen_by)])]
    if metric and metric.rpartition("/")[2] not in names:
        raise InputError(f"--metric={metric}: is no score; name one of {', '.join(names)}.")


def sign(metric: str) -> int:
    """Returns 1 for a score that is better when it is higher, -1 for one that is better when it is lower."""
    return -1 if metric.endswith(LOWER) else 1


def write(root: UPath, outcomes: Sequence[Outcome], metric: str) -> None:
    """Writes sweep.json and sweep.html, prints the table; InputError if no run has the score `metric`, "" for any.

    Scores of a test split are reported, but choose no best setting.
    """
    trials = [outcome.trial for outcome in outcomes]
    scores = [{} if outcome.code else read_scores(outcome.trial) for outcome in outcomes]
    known = dict.fromkeys(key for run_scores in scores for key in run_scores)
    metric = metric or next(iter(known), "loss")
    if known and metric not in known:
        raise InputError(
            f"--metric={metric}: the runs have no such score; name one of {', '.join(known)}."
        )
    groups = summarize(trials, [run_scores.get(metric) for run_scores in scores])
    best = max(groups, key=lambda group: sign(metric) * group.median, default=None)
    rule = f"{metric}: the {'lowest' if sign(metric) < 0 else 'highest'} median over seeds is best"
    if any(trial.values.get("split") == "test" for trial in trials):
        best = None
        rule = f"{metric}: scores of a test split choose nothing"
    rows = []
    for group in groups:
        spread = (group.median, min(group.scores), max(group.scores))
        cells = [*group.values.values(), *(f"{score:.4f}" for score in spread)]
        rows.append([*map(str, cells), str(len(group.scores)), "best" if group is best else ""])
    content = {
        "trained_by": trials[0].entry.identity,
        "rule": rule,
        "groups": [
            {
                "values": group.values,
                "scores": group.scores,
                "median": group.median,
                "best": group is best,
            }
            for group in groups
        ],
        "runs": [
            outcome._asdict()
            | {"trial": outcome.trial.name, "values": outcome.trial.values, "scores": run_scores}
            for outcome, run_scores in zip(outcomes, scores, strict=True)
        ],
    }
    write_text(root / "sweep.json", json.dumps(content, indent=1) + "\n")
    if not groups:
        return  # no run is done
    names = grid.short_keys(groups[0].values).values()
    plots = page.drawn(lambda plots: plots.to_urls(draw(groups, metric, plots)), {})
    tables = [("", [(*names, *COLUMNS), *rows], "numbers")]
    lead = f"{len(trials):,} runs. {rule}."
    path = root / "sweep.html"
    write_text(path, page.render_tables(root.name, lead, tables, plots))
    heads = (*names, *(f">{name}" for name in COLUMNS))
    show(rule, table(*heads, rows=rows), "", f"table  {path}")


def summarize(trials: Sequence[Trial], scores: Sequence[float | None]) -> list[Group]:
    """Returns the groups of the runs that have a score, in the order of the grid."""
    groups: dict[str, Group] = {}
    for trial, score in zip(trials, scores, strict=True):
        kept = {key: value for key, value in trial.values.items() if not key.endswith("seed")}
        if score is not None:
            group = groups.setdefault(repr(kept), Group(kept, [], []))
            group.trials.append(trial)
            group.scores.append(score)
    return list(groups.values())


def draw(groups: Sequence[Group], metric: str, plots: ModuleType) -> dict[str, Any]:
    """Returns title -> figure of the scores over each varied number: a curve for each choice of the other keys."""
    figures = {}
    for key in groups[0].values:
        values = {group.values[key] for group in groups}
        if len(values) == 1 or not all(type(value) in (int, float) for value in values):
            continue
        curves: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for group in groups:
            others = {other: value for other, value in group.values.items() if other != key}
            name = ", ".join(
                f"{short}={others[other]}" for other, short in grid.short_keys(others).items()
            )
            curves[name].append(
                (group.values[key], min(group.scores), group.median, max(group.scores))
            )
        figures[f"{metric} over {key}"] = plots.draw_over_values(curves, key, metric)
    return figures
