"""The command `report`: what a run did, as one HTML page with plots, from its logs. Nothing here imports jax."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from mlm import config as configs
from mlm import logs
from mlm.data.manifest import read_manifest
from mlm.errors import InputError
from mlm.paths import UPath, write_text
from mlm.report import advice, confusion, pages, plots
from mlm.report.goodput import Session, TimeUse, sessions, use_of_time
from mlm.workdir import Workdir

HERE = Path(__file__).parent
Line = dict[str, Any]
Rows = Iterable[tuple[str, ...]]

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
class Facts:
    """All that the page tells.

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


def gather(workdir: Workdir) -> Facts:
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
    return Facts(workdir.root.name, config, train, evals, found, use, entropy, *said, confusion.read(workdir))


def render(facts: Facts) -> str:
    """Returns the page."""
    figures = plots.draw(train=facts.train, evals=facts.evals, found=facts.found, unigram_entropy=facts.unigram_entropy)
    cards = [
        pages.card(title, pages.image(f"{title} over updates", plots.to_svg(figure)))
        for title, figure in figures.items()
    ]
    if confusion.pairs(facts.confused, 1):
        cards.append(pages.card("Confusion", _confusion(facts.confused)))
    head, *rows = zip(*_columns(facts.evals), strict=True) if facts.evals else ((),)
    if facts.use.total:
        cards.append(pages.card("Goodput", _goodput(facts.use)))
    return Template((HERE / "report.html").read_text(encoding="utf-8")).substitute(
        name=pages.text(facts.name),
        lead=pages.text(_lead(facts)),
        warning=_warning(facts),
        advice=advice.section(facts.advice, facts.spikes),
        tiles="".join(
            f"<div><b>{pages.text(value)}</b><span>{pages.text(name)}</span></div>" for name, value in _tiles(facts)
        ),
        scores=_scores(facts),
        summary=pages.table((), _summary(facts), "summary"),
        cards="".join(cards),
        evaluations=pages.folded("Evaluations", len(facts.evals), pages.table(head, rows, "numbers")),
        starts=pages.folded("Starts", len(facts.found), _starts(facts.found)),
        config=pages.folded("Config", len(facts.config), _config(facts.config)),
    )


def _lead(facts: Facts) -> str:
    """One sentence: how far, on what, for how long."""
    step, steps = max(line["step"] for line in facts.train + facts.evals), facts.config.get("train.steps")
    text = f"{step:,} of {steps:,} updates" if steps else f"{step:,} updates"
    if facts.found:
        devices = list(dict.fromkeys(_device(session) for session in facts.found))
        text += f" on {', then '.join(devices)}, in {pages.duration(facts.use.total)}"
    return text + "."


def _device(session: Session) -> str:
    start = session.lines[0]
    return f"{start.get('devices', '?')} x {start.get('device', 'unknown device')}"


def _warning(facts: Facts) -> str:
    skipped = facts.train[-1].get("skipped", 0) if facts.train else 0
    if not skipped:
        return ""
    plural = "update was" if skipped == 1 else "updates were"
    return f'<p class="warning">{skipped:,} {plural} skipped, because loss or gradient was not finite.</p>'


def _tiles(facts: Facts) -> list[tuple[str, str]]:
    """The few numbers that a person looks for first: (name, value)."""
    tiles = []
    if facts.evals:
        final = facts.evals[-1]
        tiles += [(name, pages.number(final[key], spec)) for key, (name, spec) in TILES.items() if key in final]
        tiles = tiles[1:] if "mse" in final else tiles  # that is its loss
        distance = _distance(facts, final)
        if distance is not None:
            tiles.append(("nats under the unigram entropy", pages.number(distance, ".2f")))
    else:
        tiles.append(("training loss, nats", pages.number(facts.train[-1]["loss"], ".3f")))
    rates = _rates(facts)
    if rates:
        tiles.append(("tokens/s, median", f"{statistics.median(rates):,.0f}"))
    if facts.use.total:
        tiles.append(("goodput", f"{facts.use.goodput:.1%}"))
    return tiles


def _distance(facts: Facts, scores: Line) -> float | None:
    if facts.unigram_entropy is None or scores["loss"] is None:
        return None
    return facts.unigram_entropy - scores["loss"]


def _rates(facts: Facts) -> list[float]:
    """Tokens per second of each stretch of steps that were kept."""
    kept = (line for session in facts.found for line in session.lines if line["step"] <= session.kept)
    return [line["tokens_per_second"] for line in kept if line["kind"] == "train"]


def _scores(facts: Facts) -> str:
    """The table of scores: the last and the best evaluation and the last training line, side by side."""
    lines = {}
    if facts.evals:
        by = (lambda line: -line["accuracy"]) if "f1" in facts.evals[0] else (lambda line: line["loss"])
        best = min(facts.evals, key=lambda line: math.inf if line["loss"] is None else by(line))
        lines |= {"evaluation, last": facts.evals[-1], "evaluation, best": best}
    if facts.train:
        lines["training, last"] = facts.train[-1]
    return pages.table(("", *lines), _columns(lines.values()), "numbers scores")


def _columns(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    """Returns (name, value in each line, ...) for each score that is there."""
    shown = [name for name in SCORES if any(name in line for line in lines)]
    values = ([pages.number(line[name], SCORES[name]) if name in line else "" for line in lines] for name in shown)
    names = SCORE_NAMES | ({"loss": "loss, squared error"} if "mse" in shown else {})
    return [(names.get(name, name), *column) for name, column in zip(shown, values, strict=True)]


def _summary(facts: Facts) -> Rows:
    """Rows (what, value) of the table below the scores."""
    if facts.unigram_entropy is not None:
        text = f"{facts.unigram_entropy:.4f} nats"
        distance = _distance(facts, facts.evals[-1]) if facts.evals else None
        if distance is not None:
            side = "under" if distance >= 0 else "above"
            text += f"; the last evaluation loss is {abs(distance):.4f} nats {side} it"
        yield "Unigram entropy of the validation split", text
    step = max(line["step"] for line in facts.train + facts.evals)
    rows = {"data.global_batch", "shards.length"} <= facts.config.keys()
    if rows and not facts.confused:  # a classifier's rows are as long as they are
        tokens = step * facts.config["data.global_batch"] * facts.config["shards.length"]
        yield "Tokens read", f"{tokens:,} in {step:,} updates"
    if facts.train:
        yield "Updates skipped (not finite)", f"{facts.train[-1].get('skipped', 0):,}"
    rates = _rates(facts)
    if rates:
        mfu = [line["mfu"] for session in facts.found for line in session.lines if "mfu" in line]
        more = f", MFU {statistics.median(mfu):.1%}" if mfu else ""
        yield "Throughput, median", f"{statistics.median(rates):,.0f} tokens/s{more}"
    if facts.found:
        use = facts.use
        yield "Time", f"{pages.duration(use.total)} in all, {pages.duration(use.training)} of it in kept steps"
        yield "Device", _device(facts.found[-1])


def _confusion(content: dict[str, Any]) -> str:
    """The whole table of a few classes; of many, the pairs most often confused."""
    scores, labels = content["scores"], content["labels"]
    rows = [(true, other, f"{n:,}", f"{n / of:.0%}") for true, other, n, of in confusion.pairs(content, PAIRS)]
    note = f"Best checkpoint, after {content['step']:,} updates, on the {scores['rows']:,} {content['split']} rows."
    table = pages.table(("true", "predicted", "rows", "of the true"), rows, "numbers")
    if len(labels) <= PAIRS // 2:
        cells = [(name, *map(str, row)) for name, row in zip(labels, content["confusion"], strict=True)]
        table = pages.table(("true, and predicted:", *labels), cells, "numbers")
    return f'<p class="note">{pages.text(note)}</p><div class="wide">{table}</div>'


def _goodput(use: TimeUse) -> str:
    """The number, a bar, and what it is made of."""
    rows, bar = [], []
    for field, name, color in USES:
        seconds = getattr(use, field)
        share = seconds / use.total
        bar.append(f'<i style="width:{100 * share:.2f}%;background:{color}"></i>')
        dot = f'<i class="dot" style="background:{color}"></i>'
        rows.append(
            f"<tr><td>{dot}{pages.text(name)}</td><td>{pages.text(pages.duration(seconds))}</td><td>{share:.1%}</td></tr>"
        )
    note = "Share of the wall-clock, from the first start to the last line of the log, in which kept steps were made."
    return (
        f'<p class="figure">{use.goodput:.1%}</p><p class="note">{note}</p>'
        f'<div class="bar">{"".join(bar)}</div><table class="uses">{"".join(rows)}</table>'
    )


def _starts(found: list[Session]) -> str:
    rows = []
    for session in found:
        start, last = session.lines[0], session.lines[-1]
        redone = max(last["step"] - session.kept, 0)
        seconds = last["time"] - start["time"]
        row = (f"{start['step']:,}", f"{last['step']:,}", f"{redone:,.0f}", pages.duration(seconds), _device(session))
        rows.append((*row, str(start.get("host", "?"))))
    return pages.table(("from update", "to update", "made again", "time", "devices", "host"), rows, "numbers")


def _config(config: dict[str, Any]) -> str:
    """Key, value, and the base config's value where it differs."""
    base = json.loads(json.dumps(configs.flatten(configs.load(str(HERE.parents[1] / "configs" / "base.py"), []))))
    rows = []
    for key, value in config.items():
        changed = key not in base or base[key] != value
        was = "" if not changed else f"base: {_value(base[key])}" if key in base else "not in the base config"
        mark = ' class="changed"' if changed else ""
        name = re.sub(r"([._])", r"\1<wbr>", pages.text(key))  # where a narrow screen may break the line
        rows.append(f"<tr{mark}><td>{name}</td><td>{pages.text(_value(value))}</td><td>{pages.text(was)}</td></tr>")
    return f'<table class="config">{"".join(rows)}</table>'


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
