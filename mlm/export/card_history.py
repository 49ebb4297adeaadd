"""The parts of a model card that a run's logs and the manifest of its shards tell: data, compute, losses."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import transformers

from mlm import logs
from mlm.data.manifest import Manifest, read_manifest
from mlm.model import flops
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.pretrained.load import Pretrained
from mlm.report import goodput, plots
from mlm.text import markdown
from mlm.workdir import Workdir

CURVE = "loss.png"
POINTS = 8  # evaluations in the table under the curve
COUNTS = {
    "documents": "documents",
    "duplicates": "duplicates dropped",
    "tokens": "tokens",
    "dropped_tokens": "tokens of the last, partial row, dropped",
    "text_bytes": "bytes of text",
    "unigram_entropy": "unigram entropy, nats",
}


@dataclasses.dataclass(frozen=True)
class History:
    """What a run's folder tells of how its model was made; what isn't known is empty.

    Attributes:
      train, evals: lines of metrics.jsonl, to the step of the model.
      found: the starts of the run.
      manifest: of the shards; None where they are gone.
      data_fingerprint: of the shards that it was trained on.
    """

    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    found: list[goodput.Session]
    manifest: Manifest | None
    data_fingerprint: str


def gather(workdir: Workdir, trained: Pretrained) -> History:
    """Reads the logs of a run, and the manifest of its shards where it is still there.

    Raises:
      DamageError: a log or the manifest is damaged.
    """
    lines = [line for line in logs.read(workdir.metrics) if line["step"] <= trained.step]
    train, evals = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    shards = UPath(trained.run_config["shards.dir"] or workdir.shards)
    meta = checkpoint_files.read_meta(workdir.checkpoints, trained.step)
    found = goodput.sessions(logs.read(workdir.timing))
    manifest = read_manifest(str(shards))
    return History(train, evals, found, manifest, meta.get("data_fingerprint", ""))


def draw(history: History, folder: Path) -> bool:
    """Writes the curve of the losses into a local folder; returns whether there is one."""
    if not history.train and not history.evals:
        return False
    entropy = history.manifest and history.manifest.splits["validation"].unigram_entropy
    figures = plots.draw(train=history.train, evals=history.evals, found=[], unigram_entropy=entropy)
    plots.save_png(figures["Loss"], folder / CURVE)
    return True


def data(manifest: Manifest | None) -> Iterator[str]:
    """Yields the section on the data: the counts of each split, side by side."""
    yield "## Data"
    if manifest is None:
        yield "The manifest of its shards is not at hand; see the corpus above."
        return
    splits = manifest.splits
    yield f"Rows of {manifest.length} tokens:"
    rows = [["rows", *(split.records for split in splits.values())]]
    rows += [[words, *(getattr(split, key) for split in splits.values())] for key, words in COUNTS.items()]
    yield table("data", [row for row in rows if any(value is not None for value in row[1:])], *splits)


def compute(trained: Pretrained, history: History) -> Iterator[str]:
    """Yields the section on hardware, time and useful FLOPs (see mlm/model/flops.py), if timing.jsonl has any."""
    run, use = trained.run_config, goodput.use_of_time(history.found)
    if not use.total:
        return
    yield "## Hardware and compute"
    spans = [(s.lines[0], s.lines[-1]["time"] - s.lines[0]["time"]) for s in history.found]
    kinds = dict.fromkeys(f"{start.get('devices', '?')} x {start.get('device', 'unknown')}" for start, _ in spans)
    hours = sum(start.get("devices", 1) * seconds for start, seconds in spans) / 3600
    tokens = trained.step * run["data.global_batch"] * run["shards.length"]
    useful = tokens * flops.train_flops_per_token(
        hidden=run["model.hidden_size"],
        layers=run["model.layers"],
        intermediate=run["model.intermediate_size"],
        length=run["shards.length"],
        vocab_size=trained.config.vocab_size,
        predicted_share=run["masking.rate"],
    )
    lines = [line for session in history.found for line in session.lines if line["kind"] == "train"]
    rows = [
        ("devices", ", then ".join(kinds)),
        ("hours from the first start to the last line of the log", use.total / 3600),
        ("device-hours, stops left out", hours),
        ("share of the time in steps that were kept", f"{use.goodput:.1%}"),
        ("tokens read", tokens),
        ("useful FLOPs", f"{useful:.3g}"),
    ]
    if lines:
        rows.append(("tokens/s, median", round(statistics.median(line["tokens_per_second"] for line in lines))))
    mfu = [line["mfu"] for line in lines if "mfu" in line]
    if mfu:
        rows.append(("MFU, median", f"{statistics.median(mfu):.1%}"))
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (jax, flax, transformers))
    yield table("compute", [*rows, ("exported with", versions)])


def losses(history: History, curve: bool) -> Iterator[str]:
    """Yields the curve, and some of the evaluations as a table."""
    if curve:
        yield "## Losses"
        yield f"![loss of training and evaluation over the updates]({CURVE})"
    evals = [line for line in history.evals if line.get("loss") is not None]
    if evals:
        last = len(evals) - 1
        chosen = sorted({round(i * last / (POINTS - 1)) for i in range(POINTS)})
        rows = [[f"{evals[i]['step']:,}", evals[i]["loss"], f"{evals[i]['accuracy']:.1%}"] for i in chosen]
        yield table("updates", rows, "evaluation loss, nats", "accuracy")


class Markup(str):
    """A cell that is Markdown already."""


def table(title: str, rows: list, *columns: str) -> str:
    """Returns a Markdown table: its heads, and a line for each row. Cells are text, unless they are `Markup`."""
    heads = (title, *(columns or ("",)))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_shown, row))} |" for row in rows)])


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Markup):
        return value
    shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return markdown(shown)
