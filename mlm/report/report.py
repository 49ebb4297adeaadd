"""The command `report`: what a run did, as one HTML page with plots, from its logs. Nothing here imports jax."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlm import config as configs
from mlm import logs
from mlm.data.manifest import read_manifest
from mlm.errors import InputError
from mlm.paths import UPath, write_text
from mlm.report import advice, confusion, pages, plots
from mlm.report.goodput import Session, TimeUse, sessions, use_of_time
from mlm.workdir import Workdir

BASE = Path(__file__).parents[2] / "configs" / "base.py"
Line = dict[str, Any]
Rows = list[tuple[str, ...]]

# Keys of a line of metrics.jsonl, how their values are shown, and what they are called on the page.
SCORES = {"step": ",", "loss": ".4f", "perplexity": ",.2f", "accuracy": ".2%"}
SCORES |= {"bits_per_byte": ".4f", "predictions": ","}
SCORES |= {"f1": ".2%", "mse": ".4f", "pearson": ".4f", "spearman": ".4f", "rows": ","}
SCORE_NAMES = {"step": "updates", "loss": "loss, nats", "bits_per_byte": "bits per byte", "f1": "F1, weighted"}
TILES = {"loss": ("evaluation loss, nats", ".3f"), "perplexity": ("perplexity", ",.2f")}
TILES |= {"mse": ("mean squared error", ".4f")}
TILES |= {"accuracy": ("accuracy", ".1%"), "f1": ("F1, weighted", ".1%"), "pearson": ("Pearson", ".3f")}
PAIRS = 20  # most often confused, on the page

# What the wall-clock went into: a field of TimeUse, its name on the page, its color in the bar.
USES = (
    ("training", "training steps that were kept", "#3b6ea8"),
    ("evaluation", "evaluation", "#8fb3d9"),
    ("checkpoints", "waiting for checkpoints", "#c9b458"),
    ("start", "start and compilation", "#9aa3ad"),
    ("redone", "steps made again after a kill", "#c2561d"),
    ("down", "down, between a stop and the next start", "#dfe3e8"),
)


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """What the page shows of a run.

    Attributes:
      name, config: of the run; the config is flattened, empty if there is none.
      train, evals: lines of metrics.jsonl.
      found, use: the starts of the run and what its time went into.
      unigram_entropy: of the validation split, in nats; None if unknown.
      advice, spikes: lines of advice.jsonl and spikes.jsonl.
      confused: of a classifier, what its classification.json holds.
    """

    name: str
    config: dict[str, Any]
    train: list[Line]
    evals: list[Line]
    found: list[Session]
    use: TimeUse
    unigram_entropy: float | None
    advice: list[Line]
    spikes: list[Line]
    confused: dict[str, Any] = dataclasses.field(default_factory=dict)


def write(workdir: Workdir) -> None:
    """Makes report.html: one file that needs no network.

    Raises:
      InputError: the run has logged nothing yet.
      DamageError: a log, config.json or manifest.json is damaged.
    """
    write_text(workdir.report, render(gather(workdir)))


def gather(workdir: Workdir) -> RunSummary:
    """Reads the logs, the config and the manifest of a run; config and manifest may be missing."""
    train, evals = logs.read(workdir.metrics, "train"), logs.read(workdir.metrics, "eval")
    if not train and not evals:
        raise InputError(f"{workdir.metrics}: holds no line of training or evaluation yet; train there first.")
    config = configs.flatten(logs.read_object(workdir.config))
    found = sessions(logs.read(workdir.timing))
    shards = UPath(config.get("shards.dir") or workdir.shards)
    manifest = read_manifest(str(shards))
    entropy = manifest and manifest.splits["validation"].unigram_entropy
    said = logs.read(workdir.advice), logs.read(workdir.spikes)
    use = use_of_time(found)
    return RunSummary(workdir.root.name, config, train, evals, found, use, entropy, *said, confusion.read(workdir))


def render(run: RunSummary) -> str:
    """Returns the page."""
    figures = plots.draw(train=run.train, evals=run.evals, found=run.found, unigram_entropy=run.unigram_entropy)
    return pages.render(
        "report.html.j2",
        figures=figures,
        name=run.name,
        lead=_lead(run),
        skipped=_skipped(run),
        tiles=_tiles(run),
        advice=advice.rows(run.advice, run.spikes),
        scores=_scores(run),
        summary=_summary(run),
        confusion=_confusion(run.confused),
        use=run.use,
        uses=USES,
        evaluations=list(zip(*_columns(run.evals), strict=True)) or [()],
        starts=_starts(run.found),
        config=_config(run.config),
    )


def _lead(run: RunSummary) -> str:
    """One sentence: how far, on what, for how long."""
    step, steps = max(line["step"] for line in run.train + run.evals), run.config.get("train.steps")
    text = f"{step:,} of {steps:,} updates" if steps else f"{step:,} updates"
    if run.found:
        devices = list(dict.fromkeys(_device(session) for session in run.found))
        text += f" on {', then '.join(devices)}, in {pages.duration(run.use.total)}"
    return text + "."


def _device(session: Session) -> str:
    start = session.lines[0]
    return f"{start.get('devices', '?')} x {start.get('device', 'unknown device')}"


def _skipped(run: RunSummary) -> int:
    """Updates that changed nothing, because loss or gradient was not finite."""
    return run.train[-1].get("skipped", 0) if run.train else 0


def _tiles(run: RunSummary) -> list[tuple[str, str]]:
    """The few numbers that a person looks for first: (name, value)."""
    tiles = []
    if run.evals:
        final = run.evals[-1]
        tiles += [(name, pages.number(final[key], spec)) for key, (name, spec) in TILES.items() if key in final]
        tiles = tiles[1:] if "mse" in final else tiles  # that is its loss
        distance = _distance(run, final)
        if distance is not None:
            tiles.append(("nats under the unigram entropy", pages.number(distance, ".2f")))
    else:
        tiles.append(("training loss, nats", pages.number(run.train[-1]["loss"], ".3f")))
    rates = _rates(run)
    if rates:
        tiles.append(("tokens/s, median", f"{statistics.median(rates):,.0f}"))
    if run.use.total:
        tiles.append(("goodput", f"{run.use.goodput:.1%}"))
    return tiles


def _distance(run: RunSummary, scores: Line) -> float | None:
    if run.unigram_entropy is None or scores["loss"] is None:
        return None
    return run.unigram_entropy - scores["loss"]


def _rates(run: RunSummary) -> list[float]:
    """Tokens per second of each stretch of steps that were kept."""
    kept = (line for session in run.found for line in session.lines if line["step"] <= session.kept)
    return [line["tokens_per_second"] for line in kept if line["kind"] == "train"]


def _scores(run: RunSummary) -> Rows:
    """Head and rows of the scores: of the last and the best evaluation and the last training line."""
    lines = {}
    if run.evals:
        by = (lambda line: -line["accuracy"]) if "f1" in run.evals[0] else (lambda line: line["loss"])
        best = min(run.evals, key=lambda line: math.inf if line["loss"] is None else by(line))
        lines |= {"evaluation, last": run.evals[-1], "evaluation, best": best}
    if run.train:
        lines["training, last"] = run.train[-1]
    return [("", *lines), *_columns(lines.values())]


def _columns(lines: Iterable[Line]) -> Rows:
    """Returns (name, value in each line, ...) for each score that is there."""
    shown = [name for name in SCORES if any(name in line for line in lines)]
    values = ([pages.number(line[name], SCORES[name]) if name in line else "" for line in lines] for name in shown)
    names = SCORE_NAMES | ({"loss": "loss, squared error"} if "mse" in shown else {})
    return [(names.get(name, name), *column) for name, column in zip(shown, values, strict=True)]


def _summary(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Rows (what, value) of the table below the scores."""
    if run.unigram_entropy is not None:
        text = f"{run.unigram_entropy:.4f} nats"
        distance = _distance(run, run.evals[-1]) if run.evals else None
        if distance is not None:
            side = "under" if distance >= 0 else "above"
            text += f"; the last evaluation loss is {abs(distance):.4f} nats {side} it"
        yield "Unigram entropy of the validation split", text
    step = max(line["step"] for line in run.train + run.evals)
    rows = {"data.global_batch", "shards.length"} <= run.config.keys()
    if rows and not run.confused:  # a classifier's rows are as long as they are
        tokens = step * run.config["data.global_batch"] * run.config["shards.length"]
        yield "Tokens read", f"{tokens:,} in {step:,} updates"
    if run.train:
        yield "Updates skipped (not finite)", f"{_skipped(run):,}"
    rates = _rates(run)
    if rates:
        mfu = [line["mfu"] for session in run.found for line in session.lines if "mfu" in line]
        more = f", MFU {statistics.median(mfu):.1%}" if mfu else ""
        yield "Throughput, median", f"{statistics.median(rates):,.0f} tokens/s{more}"
    if run.found:
        use = run.use
        yield "Time", f"{pages.duration(use.total)} in all, {pages.duration(use.training)} of it in kept steps"
        yield "Device", _device(run.found[-1])


def _confusion(content: dict[str, Any]) -> dict[str, Any] | None:
    """Note, head and rows: the whole table of a few classes; of many, the pairs most often confused."""
    pairs = confusion.pairs(content, PAIRS)
    if not pairs:
        return None
    scores, labels = content["scores"], content["labels"]
    note = f"Best checkpoint, after {content['step']:,} updates, on the {scores['rows']:,} {content['split']} rows."
    if len(labels) <= PAIRS // 2:
        rows = [(name, *row) for name, row in zip(labels, content["confusion"], strict=True)]
        return {"note": note, "head": ("true, and predicted:", *labels), "rows": rows}
    rows = [(true, other, f"{n:,}", f"{n / of:.0%}") for true, other, n, of in pairs]
    return {"note": note, "head": ("true", "predicted", "rows", "of the true"), "rows": rows}


def _starts(found: list[Session]) -> Rows:
    rows = []
    for session in found:
        start, last = session.lines[0], session.lines[-1]
        redone = max(last["step"] - session.kept, 0)
        seconds = last["time"] - start["time"]
        row = (f"{start['step']:,}", f"{last['step']:,}", f"{redone:,.0f}", pages.duration(seconds), _device(session))
        rows.append((*row, str(start.get("host", "?"))))
    return rows


def _config(config: dict[str, Any]) -> Rows:
    """Key, value, and the base config's value where it differs."""
    base = json.loads(json.dumps(configs.flatten(configs.load(str(BASE), []))))
    rows = []
    for key, value in config.items():
        was = "not in the base config"
        if key in base:
            was = "" if base[key] == value else f"base: {_value(base[key])}"
        rows.append((key, _value(value), was))
    return rows


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
