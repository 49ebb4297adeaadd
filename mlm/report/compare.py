"""`report --compare`: several runs on one page: their curves, their last scores, and the config keys that differ.

Nothing here imports jax.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from mlm.errors import InputError
from mlm.paths import write_text
from mlm.report import pages, plots, report
from mlm.report.report import Line, RunSummary
from mlm.workdir import Workdir

Place = Callable[[Line], float | None]  # from a line of metrics.jsonl to its x; None if it isn't known

PAGE = "compare.html"
ABSENT = "no such key"  # in a config that other code wrote


def write(workdirs: list[Workdir]) -> str:
    """Makes compare.html in the first run's folder, one file that needs no network; returns its path.

    Raises:
      InputError: a folder was named twice, or its run has logged nothing yet.
      DamageError: a log, config.json or manifest.json is damaged.
    """
    roots = [str(workdir.root) for workdir in workdirs]
    twice = next((root for root in roots if roots.count(root) > 1), None)
    if twice is not None:
        raise InputError(f"--compare={twice}: is there twice; name each run once.")
    if len(workdirs) > len(plots.COLORS):
        raise InputError(f"--compare: {len(workdirs)} runs, {len(plots.COLORS)} can be told apart; name fewer.")
    page = workdirs[0].root / PAGE
    write_text(page, render(dict(zip(names(roots), map(report.gather, workdirs), strict=True))))
    return str(page)


def names(roots: list[str]) -> list[str]:
    """Returns the shortest ends of the paths that tell them apart."""
    parts = [root.rstrip("/").split("/") for root in roots]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-count:]) for each in parts]
        if len(set(found)) == len(found):
            break
    return found


def render(runs: dict[str, RunSummary]) -> str:
    """Returns the page of runs, by name."""
    keys = differences({name: run.config for name, run in runs.items()})
    return pages.render(
        "compare.html.j2",
        figures=draw(runs),
        name=", ".join(runs),
        lead=f"{len(runs)} runs, {len(keys)} config keys that differ. Faint: training. With marks: evaluation.",
        runs=list(runs),
        scores=final_scores(runs),
        keys=keys,
    )


def draw(runs: dict[str, RunSummary]) -> dict[str, Figure]:
    """Returns title -> figure: the losses of all runs over updates, over tokens, and over wall-clock."""
    axes: dict[str, tuple[str, dict[str, Place]]] = {
        "Loss over updates": ("updates", dict.fromkeys(runs, lambda line: line["step"])),
        "Loss over tokens": ("tokens", {name: _tokens(run) for name, run in runs.items()}),
        "Loss over wall-clock": ("hours since the first start", {name: _hours(run) for name, run in runs.items()}),
    }
    figures = {}
    for title, (unit, places) in axes.items():
        curves = {
            name: (_points(run.train, places[name]), _points(run.evals, places[name])) for name, run in runs.items()
        }
        figures[title] = plots.draw_together(curves, unit)
    return figures


def final_scores(runs: dict[str, RunSummary]) -> list[tuple[str, ...]]:
    """Returns (name, value in each run, ...) of the last evaluation, the best loss, the last of training, the time."""
    lasts = [run.evals[-1] if run.evals else {} for run in runs.values()]
    rows = [
        (report.SCORE_NAMES.get(key, key), *(_value(last, key, spec) for last in lasts))
        for key, spec in report.SCORES.items()
        if any(key in last for last in lasts)
    ]
    finite = [[line["loss"] for line in run.evals if line["loss"] is not None] for run in runs.values()]
    rows.append(("best evaluation loss, nats", *(f"{min(losses):.4f}" if losses else "" for losses in finite)))
    trains = [run.train[-1] if run.train else {} for run in runs.values()]
    rows.append(("training loss, nats", *(_value(line, "loss", ".4f") for line in trains)))
    tokens = [_tokens(run)(_last_line(run)) for run in runs.values()]
    rows.append(("tokens read", *("" if count is None else f"{count:,.0f}" for count in tokens)))
    times = [run.use for run in runs.values()]
    rows.append(("wall-clock", *(pages.duration(use.total) if use.total else "" for use in times)))
    rows.append(("of it in kept steps", *(pages.duration(use.training) if use.total else "" for use in times)))
    return rows


def differences(found: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns (key, value in each config, ...) for each key that is not the same in all of some flattened configs."""
    rows = []
    for key in sorted({key for config in found.values() for key in config}):
        values = [json.dumps(config[key]) if key in config else ABSENT for config in found.values()]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return rows


def _tokens(run: RunSummary) -> Place:
    """The x of a line is the tokens read by then."""
    keys = ("data.global_batch", "shards.length")
    if not all(key in run.config for key in keys):
        return lambda line: None
    tokens = run.config[keys[0]] * run.config[keys[1]]
    return lambda line: line["step"] * tokens


def _hours(run: RunSummary) -> Place:
    """The x of a line is the hours from the first start to when it was written; of one that came again, the last."""
    lines = [line for session in run.found for line in session.lines]
    when = {(line["kind"], line["step"]): (line["time"] - lines[0]["time"]) / 3600 for line in lines}
    return lambda line: when.get((line["kind"], line["step"]))


def _points(lines: list[Line], place: Place) -> plots.Points:
    found = [(place(line), line["loss"]) for line in lines if line["loss"] is not None]
    found = [(x, y) for x, y in found if x is not None]
    return [x for x, _ in found], [y for _, y in found]


def _last_line(run: RunSummary) -> Line:
    return max(run.train + run.evals, key=lambda line: line["step"])


def _value(line: Line, key: str, spec: str) -> str:
    return pages.number(line[key], spec) if key in line else ""
