"""Several runs on one page: their curves, their last scores, the config keys that differ. Nothing here imports jax."""

import json
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from mlm import config as configs
from mlm.errors import InputError
from mlm.paths import canonical, write_text
from mlm.report import plots, report
from mlm.report.summary import RunSummary
from mlm.workdir import Workdir

PAGE = "compare.html"
ABSENT = "no such key"  # of a group `mine`


def write(workdirs: list[Workdir]) -> str:
    """Makes compare.html in the first run's folder, one file that needs no network; returns its path."""
    roots = [str(workdir.root) for workdir in workdirs]
    real = list(map(canonical, roots))
    if twice := [root for root, folder in zip(roots, real, strict=True) if real.count(folder) > 1]:
        raise InputError(f"--compare={twice[0]}: this run is named twice; name each run once.")
    if len(workdirs) > len(plots.COLORS):
        raise InputError(f"--compare: {len(workdirs)} runs, at most {len(plots.COLORS)} can be shown; name fewer.")
    runs, path = dict(zip(names(roots), map(report.gather, workdirs), strict=True)), workdirs[0].root / PAGE
    keys = differences([configs.flatten(run.config or {}) for run in runs.values()])
    tables = [("", [("last scores", *runs), *final_scores(list(runs.values()))], "numbers scores")]
    if keys:
        tables.append(("Config keys that differ", [("key", *runs), *keys], "summary"))
    lead = f"{len(runs)} runs, {len(keys)} config keys that differ. Faint: training. With marks: evaluation."
    write_text(path, report.render_tables(", ".join(runs), lead, tables, draw(runs)))
    return str(path)


def names(roots: list[str]) -> list[str]:
    """Returns the shortest distinct ends of the paths."""
    parts = [root.rstrip("/").split("/") for root in roots]
    ends = (["/".join(folders[-count:]) for folders in parts] for count in range(1, max(map(len, parts)) + 1))
    return next((ends_of_all for ends_of_all in ends if len(set(ends_of_all)) == len(roots)), roots)


def draw(runs: dict[str, RunSummary]) -> dict[str, Figure]:
    """Returns title -> figure: the losses of all runs over steps, over tokens, and over wall-clock."""
    figures = {}
    for over, unit, position in (
        ("steps", "steps", lambda run, line: line["step"]),
        ("tokens", "tokens", lambda run, line: run.tokens(line["step"])),
        ("wall-clock", "hours since the first start", RunSummary.hours),
    ):
        curves = {
            name: [plots.points(lines, "loss", position=partial(position, run)) for lines in (run.train, run.evals)]
            for name, run in runs.items()
        }
        figures[f"Loss over {over}"] = plots.draw_together(curves, unit)
    return figures


def final_scores(runs: list[RunSummary]) -> report.Rows:
    """Returns rows (name, value in each run, ...)."""
    finite = [[line["loss"] for line in run.evals if line["loss"] is not None] for run in runs]
    tokens = [run.tokens(run.step) for run in runs]
    return [
        *report.score_rows([run.evals[-1] if run.evals else {} for run in runs]),
        ("best evaluation loss, nats", *(f"{min(losses):.4f}" if losses else "" for losses in finite)),
        ("training loss, nats", *(report.number(r.train[-1]["loss"], ".4f") if r.train else "" for r in runs)),
        ("tokens read", *("" if count is None else f"{count:,.0f}" for count in tokens)),
        ("wall-clock", *(report.duration(run.use.total) if run.use.total else "" for run in runs)),
        ("of it in kept steps", *(report.duration(run.use.training) if run.use.total else "" for run in runs)),
    ]


def differences(configs: list[dict[str, Any]]) -> report.Rows:
    """Returns (key, value in each config, ...) for each key that is not the same in all of some flattened configs."""
    keys = sorted(set().union(*configs))
    rows = [(key, *(json.dumps(config[key]) if key in config else ABSENT for config in configs)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
