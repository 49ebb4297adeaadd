"""What a run did, or several beside one another, as one HTML page with plots, from their logs. No jax."""

import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import entry, logs
from mlm.errors import InputError
from mlm.monitor import adviser
from mlm.paths import canonical, write_text
from mlm.pretrained import locate
from mlm.report import family, plots, summary
from mlm.report.goodput import Line
from mlm.report.summary import RunSummary
from mlm.tasks.scores import selected
from mlm.text import number, templates
from mlm.workdir import Workdir

Rows = list[tuple[str, ...]]

ABSENT = "no such key"  # of a group `mine`, in one of several configs
PAIRS = 20  # of classes most often confused, on the page


def write(workdir: Workdir) -> None:
    """Makes report.html: one file that needs no network."""
    run, classification = gather(workdir), logs.read_object(workdir.classification)
    figures = plots.draw(run.train, run.evals, run.sessions, run.unigram_entropy, run.unit_of_loss)
    if downstream := {name: (([], []), points) for name, points in summary.curves(run.ancestry).items()}:
        figures["Downstream scores"] = plots.draw_together(downstream, "tokens read", "%")
    if len(norms := logs.read(workdir.norms, "norms")) > 1:
        figures["Norms"] = plots.draw_norms(norms)
    columns = list(dict.fromkeys(key for numbers in run.xla.values() for key in numbers))
    programs = ((name, *(f"{p[key]:,.10g}" if key in p else "" for key in columns)) for name, p in run.xla.items())
    scored = {}
    if run.evals:
        scored |= {"evaluation, last": run.evals[-1], "evaluation, best": best_evaluation(run.evals, run.config)}
    if run.train:
        scored["training, last"] = run.train[-1]
    unit = _unit_of_loss([run])
    values = {
        "run": run,
        "unit": unit,
        "programs": [("program", *columns), *programs],
        "trained_by": entry.summary(locate.metadata(workdir).get("class", {})),
        "last": run.evals[-1] if run.evals else {},
        "advice": logs.read(workdir.advice),
        "kinds": adviser.LINES,
        "spikes": logs.read(workdir.spikes),
        "scores": [("", *scored), *score_rows(list(scored.values()), unit=unit)],
        "tests": [("", *run.tests), *score_rows(list(run.tests.values()))] if run.tests else [],
        "evaluations": list(zip(*score_rows(run.evals, unit=unit), strict=True)) or [()],
        "family": family.tree(run.ancestry) if run.config else [],
        "classification": classification,
        "confused": confused_pairs(classification, PAIRS),
        "config": {} if run.config is None else configs.flatten(run.config),
        "base": configs.flatten(configs.load(str(configs.BASE), [])),
    }
    write_text(workdir.report, render_page("report.html.j2", figures, values))


def gather(workdir: Workdir) -> RunSummary:
    """Reads the logs, the config and the manifest of a run; config and manifest may be missing."""
    run = summary.gather(workdir, configs.read(workdir.config))
    if not (run.train or run.evals):
        raise InputError(f"{workdir.metrics}: holds no line of training or evaluation yet; train there first.")
    return run


def render_page(template: str, figures: dict[str, Figure], values: dict[str, Any]) -> str:
    """Returns a page, one file that needs no network; figures are by title."""
    sources = {title: plots.to_url(figure) for title, figure in figures.items()}
    pages = templates("mlm.report")
    pages.filters |= {"number": number, "duration": duration}
    pages.filters["config_value"] = lambda value: value if isinstance(value, str) and value else json.dumps(value)
    return pages.get_template(template).render(values, plots=sources)


def render_tables(
    title: str, lead: str, tables: Sequence[tuple[str, Rows, str]], figures: dict[str, Figure] | None = None
) -> str:
    """Returns a page of tables, the figures after the first: (heading or "", head and rows, class in the style)."""
    return render_page("tables.html.j2", figures or {}, {"title": title, "lead": lead, "tables": tables})


def duration(seconds: float) -> str:
    """Returns "1 h 05 min", "2 min 03 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60):02d} min"


def score_rows(lines: Sequence[Line], *, unit: str = "") -> Rows:
    """Returns (name, value in each line, ...) for each score that one of the lines has; validation sets come last.

    `unit` is what the loss is in; by default the squared error if one of the lines is of a regression, else nats.
    """
    by_set, rows = list(map(logs.by_set, lines)), []
    for set_name in dict.fromkeys(name for sets in by_set for name in sets):
        columns = [sets.get(set_name, {}) for sets in by_set]
        shown = [key for key in (*logs.SCORES, *logs.own_metrics(columns)) if any(key in scores for scores in columns)]
        for key in shown:
            name, spec = logs.SCORES.get(key, (key, ".4g"))
            name = f"loss, {unit or plots.SQUARED}" if key == "loss" and (unit or "mse" in shown) else name
            name = "F1, spans of words" if key == "f1" and "recall" in shown else name
            name = f"{set_name}: {name}" if set_name else name
            rows.append((name, *(number(scores[key], spec) if key in scores else "" for scores in columns)))
    return rows


def confused_pairs(classification: dict[str, Any], limit: int) -> list[tuple[str, str, int, int]]:
    """Returns (true, predicted, how often, rows of the true class) of the `limit` pairs most often confused."""
    table, labels = classification.get("confusion", []), classification.get("labels", [])
    cells = [
        (labels[true], labels[other], count, sum(row))
        for true, row in enumerate(table)
        for other, count in enumerate(row)
        if true != other and count
    ]
    return sorted(cells, key=lambda cell: -cell[2])[:limit]


def best_evaluation(evals: Sequence[Line], config: ConfigDict | None) -> Line:
    """Returns the best one: of equal ones, the newest."""
    metrics = () if config is None else config.classify.metric
    minimized = (lambda line: -selected(line, metrics)) if metrics else (lambda line: line["loss"])
    return min(evals[::-1], key=lambda line: math.inf if line["loss"] is None else minimized(line))


def compare(workdirs: list[Workdir]) -> str:
    """Makes compare.html in the first run's folder, one file that needs no network; returns its path."""
    roots = [str(workdir.root) for workdir in workdirs]
    real = list(map(canonical, roots))
    if twice := [root for root, folder in zip(roots, real, strict=True) if real.count(folder) > 1]:
        raise InputError(f"--compare={twice[0]}: this run is named twice; name each run once.")
    if len(workdirs) > len(plots.COLORS):
        raise InputError(f"--compare: {len(workdirs)} runs, at most {len(plots.COLORS)} can be shown; name fewer.")
    runs = dict(zip(_distinct_names(roots), map(gather, workdirs), strict=True))
    keys = differences([configs.flatten(run.config or {}) for run in runs.values()])
    tables = [("", [("last scores", *runs), *_final_scores(list(runs.values()))], "numbers scores")]
    if keys:
        tables.append(("Config keys that differ", [("key", *runs), *keys], "summary"))
    lead = f"{len(runs)} runs, {len(keys)} config keys that differ. Faint: training. With marks: evaluation."
    path = workdirs[0].root / "compare.html"
    write_text(path, render_tables(", ".join(runs), lead, tables, draw_losses(runs)))
    return str(path)


def _distinct_names(roots: list[str]) -> list[str]:
    """Returns the shortest distinct ends of the paths."""
    parts = [root.rstrip("/").split("/") for root in roots]
    ends = (["/".join(folders[-count:]) for folders in parts] for count in range(1, max(map(len, parts)) + 1))
    return next((ends_of_all for ends_of_all in ends if len(set(ends_of_all)) == len(roots)), roots)


def draw_losses(runs: dict[str, RunSummary]) -> dict[str, Figure]:
    """Returns title -> figure: the losses of all runs over steps, over tokens, and over wall-clock."""
    figures, of_loss = {}, f"loss, {_unit_of_loss(runs.values(), plots.NATS)}"
    for over, unit, position in (
        ("steps", "steps", lambda run, line: line["step"]),
        ("tokens", "tokens", lambda run, line: run.tokens(line["step"])),
        ("wall-clock", "hours since the first start", lambda run, line: run.hours.get((line["kind"], line["step"]))),
    ):
        curves = {
            name: [plots.points(lines, "loss", position=partial(position, run)) for lines in (run.train, run.evals)]
            for name, run in runs.items()
        }
        figures[f"Loss over {over}"] = plots.draw_together(curves, unit, of_loss)
    return figures


def _unit_of_loss(runs: Iterable[RunSummary], nats: str = "nats") -> str:
    return " or ".join(sorted({nats if run.unit_of_loss == plots.NATS else run.unit_of_loss for run in runs}))


def _final_scores(runs: list[RunSummary]) -> Rows:
    """Returns rows (name, value in each run, ...)."""
    finite = [[line["loss"] for line in run.evals if line["loss"] is not None] for run in runs]
    tokens = [run.tokens(run.step) for run in runs]
    unit = _unit_of_loss(runs)
    return [
        *score_rows([run.evals[-1] if run.evals else {} for run in runs], unit=unit),
        (f"best evaluation loss, {unit}", *(f"{min(losses):.4f}" if losses else "" for losses in finite)),
        (f"training loss, {unit}", *(number(r.train[-1]["loss"], ".4f") if r.train else "" for r in runs)),
        ("tokens read", *("" if count is None else f"{count:,.0f}" for count in tokens)),
        ("wall-clock", *(duration(run.use.total) if run.use.total else "" for run in runs)),
        ("of it in kept steps", *(duration(run.use.training) if run.use.total else "" for run in runs)),
    ]


def differences(configs: list[dict[str, Any]]) -> Rows:
    """Returns (key, value in each config, ...) for each key that is not the same in all of some flattened configs."""
    keys = sorted(set().union(*configs))
    rows = [(key, *(json.dumps(config[key]) if key in config else ABSENT for config in configs)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
