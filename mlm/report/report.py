"""What a run did, or several beside one another, as one HTML page with plots, from their logs.

No jax.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm import entry, logs
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.paths import canonical, distinct_parts, write_text
from mlm.pretrained import checkpoint_files
from mlm.report import page, summary
from mlm.report.page import Rows
from mlm.report.sessions import Line
from mlm.report.summary import SQUARED, RunSummary
from mlm.tasks.scores import selected
from mlm.text import number
from mlm.workdir import Workdir

MOST_RUNS = 8  # of a comparison: as many colors


def write(workdir: Workdir) -> None:
    """Makes report.html: one file that needs no network."""
    run = gather(workdir)
    norms = logs.read(workdir.norms, "norms")
    plots = page.drawn(lambda plots: plots.to_urls(plots.draw(run, norms)), {})
    columns = {}
    if run.evals:
        columns["evaluation, last"] = run.evals[-1]
        columns["evaluation, best"] = best_evaluation(run.evals, run.config)
    if run.train:
        columns["training, last"] = run.train[-1]
    for name, scores in run.tests.items():
        columns[f"test, {name}"] = scores
    classification = logs.read_object(workdir.classification)
    values = {
        "run": run,
        "trained_by": entry.summary(
            checkpoint_files.newest_meta(workdir.checkpoints).get("class", {})
        ),
        "last": run.evals[-1] if run.evals else {},
        "spikes": logs.read(workdir.spikes),
        "scores": [("", *columns), *score_rows(list(columns.values()), unit=run.unit_of_loss)],
        "classification": classification,
        "confused": confused_pairs(classification),
        "config": {} if run.config is None else configs.flatten(run.config),
        "base": configs.flatten(configs.load(str(configs.BASE), [])),
    }
    write_text(workdir.report, page.render("report.html.j2", values, plots))


def gather(workdir: Workdir) -> RunSummary:
    """Reads the logs, the config and the manifest of a run; config and manifest may be missing."""
    run = summary.gather(workdir, configs.read(workdir.config))
    if not (run.train or run.evals):
        raise InputError(
            f"{workdir.metrics}: holds no line of training or evaluation yet; train there first."
        )
    return run


def score_rows(lines: Sequence[Line], *, unit: str = "") -> Rows:
    """Returns (name, value in each line, ...) for each score that one of the lines has; validation sets come last.

    `unit` is what the loss is in; by default the squared error if one of the lines is of a regression, else nats.
    """
    by_set = list(map(logs.by_set, lines))
    rows = []
    for set_name in dict.fromkeys(name for sets in by_set for name in sets):
        columns = [sets.get(set_name, {}) for sets in by_set]
        shown = [
            key
            for key in (*logs.SCORES, *logs.own_metrics(columns))
            if any(key in scores for scores in columns)
        ]
        for key in shown:
            name, spec = logs.SCORES.get(key, (key, ".4g"))
            if key == "loss" and (unit or "mse" in shown):
                name = f"loss, {unit or SQUARED}"
            if key == "f1" and "recall" in shown:
                name = "F1, spans of words"
            if set_name:
                name = f"{set_name}: {name}"
            rows.append(
                (name, *(number(scores[key], spec) if key in scores else "" for scores in columns))
            )
    return rows


def confused_pairs(classification: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """Returns (true, predicted, how often, rows of the true class) of all confused classes, the most frequent first."""
    labels = classification.get("labels", [])
    cells = [
        (labels[true], labels[other], count, sum(row))
        for true, row in enumerate(classification.get("confusion", []))
        for other, count in enumerate(row)
        if true != other and count
    ]
    return sorted(cells, key=lambda cell: -cell[2])


def best_evaluation(evals: Sequence[Line], config: ConfigDict | None) -> Line:
    """Returns the best one: of equal ones, the newest."""
    metrics = () if config is None else config.classify.metric
    minimized = (lambda line: -selected(line, metrics)) if metrics else (lambda line: line["loss"])
    return min(evals[::-1], key=lambda line: math.inf if line["loss"] is None else minimized(line))


def compare(workdirs: list[Workdir]) -> str:
    """Makes compare.html in the first run's folder, one file that needs no network.

    Returns its path.
    """
    roots = [str(workdir.root) for workdir in workdirs]
    if len(set(map(canonical, roots))) < len(roots) or len(roots) > MOST_RUNS:
        raise InputError(
            f"--compare: {', '.join(roots)}: name at most {MOST_RUNS} runs, each once."
        )
    runs = dict(zip(distinct_parts(roots), map(gather, workdirs), strict=True))
    unit = " or ".join(sorted({run.unit_of_loss for run in runs.values()}))
    keys = differences([configs.flatten(run.config or {}) for run in runs.values()])
    tables = [
        ("", [("last scores", *runs), *_final_scores(list(runs.values()), unit)], "numbers scores")
    ]
    if keys:
        tables.append(("Config keys that differ", [("key", *runs), *keys], "summary"))
    lead = f"{len(runs)} runs, {len(keys)} config keys that differ. Faint: training. With marks: evaluation."
    warning = ""
    if len(set(map(_validation_rows, runs.values())) - {None}) > 1:
        warning = "The validation rows differ, so that the scores are not of the same text."
    if len(set(map(_tokenizer, workdirs, runs.values())) - {None}) > 1:
        warning = "The tokenizers differ, so that a token is not the same in all runs: compare bits per byte."
    plots = page.drawn(lambda plots: plots.to_urls(plots.draw_comparison(runs, unit)), {})
    path = workdirs[0].root / "compare.html"
    write_text(path, page.render_tables(", ".join(runs), lead, tables, plots, warning))
    return str(path)


def _tokenizer(workdir: Workdir, run: RunSummary) -> str | None:
    """Returns the fingerprint of a run's tokenizer; None if it is unknown."""
    if run.manifest:
        return run.manifest.tokenizer_fingerprint
    return workdir.tokenizer_folder and tokenizer.fingerprint(workdir.tokenizer_folder)


def _validation_rows(run: RunSummary) -> str | None:
    """Returns what tells a run's validation rows from others; None if it is unknown."""
    if run.manifest:
        return str([shard.sha256 for shard in run.manifest.splits["validation"].shards])
    return run.config and run.config.classify.validation


def _final_scores(runs: list[RunSummary], unit: str) -> Rows:
    """Returns rows (name, value in each run, ...)."""
    tokens = [run.tokens(run.step) for run in runs]
    seconds = [page.duration(run.seconds) if run.sessions else "" for run in runs]
    of_training = [page.duration(run.training[1][-1]) if run.sessions else "" for run in runs]
    return [
        *score_rows([run.evals[-1] if run.evals else {} for run in runs], unit=unit),
        ("tokens read", *("" if count is None else f"{count:,}" for count in tokens)),
        ("time in all", *seconds),
        ("of it training", *of_training),
    ]


def differences(configs: list[dict[str, Any]]) -> Rows:
    """Returns (key, value in each config, ...) for each key that is not the same in all of some flattened configs."""
    keys = sorted(set().union(*configs))
    # A group `mine` may lack a key
    rows = [(key, *(json.dumps(c[key]) if key in c else "" for c in configs)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
