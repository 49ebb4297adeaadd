"""What a model card tells from a run's logs and the manifest of its shards: rows of its tables, and the curve."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import flax
import jax
import transformers

from mlm import logs
from mlm.data.manifest import Manifest, read_manifest
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.pretrained.load import Pretrained
from mlm.report import goodput, plots
from mlm.training import recipe
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
      records: rows of their training split.
    """

    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    found: list[goodput.Session]
    manifest: Manifest | None
    data_fingerprint: str
    records: int


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
    return History(train, evals, found, manifest, meta.get("data_fingerprint", ""), meta["dataset"]["records"])


def draw(history: History, folder: Path) -> bool:
    """Writes the curve of the losses into a local folder; returns whether there is one."""
    if not history.train and not history.evals:
        return False
    entropy = history.manifest and history.manifest.splits["validation"].unigram_entropy
    figures = plots.draw(train=history.train, evals=history.evals, found=[], unigram_entropy=entropy)
    plots.save_png(figures["Loss"], folder / CURVE)
    return True


def data_rows(manifest: Manifest) -> list[list[Any]]:
    """Returns (what, its count in each split, ...)."""
    splits = manifest.splits.values()
    rows = [["rows", *(split.records for split in splits)]]
    rows += [[words, *(getattr(split, key) for split in splits)] for key, words in COUNTS.items()]
    return [row for row in rows if any(value is not None for value in row[1:])]


def compute_rows(trained: Pretrained, history: History) -> list[tuple[str, Any]]:
    """Returns hardware, time and useful FLOPs (see mlm/model/flops.py); nothing where timing.jsonl has none."""
    run, use = trained.run_config, goodput.use_of_time(history.found)
    if not use.total:
        return []
    spans = [(s.lines[0], s.lines[-1]["time"] - s.lines[0]["time"]) for s in history.found]
    kinds = dict.fromkeys(f"{start.get('devices', '?')} x {start.get('device', 'unknown')}" for start, _ in spans)
    hours = sum(start.get("devices", 1) * seconds for start, seconds in spans) / 3600
    steps = recipe.total_steps(run, history.records)
    useful = recipe.useful_flops(run, trained.config.vocab_size, step=trained.step, steps=steps)
    lines = [line for session in history.found for line in session.lines if line["kind"] == "train"]
    rows = [
        ("devices", ", then ".join(kinds)),
        ("hours from the first start to the last line of the log", use.total / 3600),
        ("device-hours, stops left out", hours),
        ("share of the time in steps that were kept", f"{use.goodput:.1%}"),
        ("tokens read", trained.step * recipe.tokens_per_step(run)),
        ("useful FLOPs", f"{useful:.3g}"),
    ]
    if lines:
        rows.append(("tokens/s, median", round(statistics.median(line["tokens_per_second"] for line in lines))))
    mfu = [line["mfu"] for line in lines if "mfu" in line]
    if mfu:
        rows.append(("MFU, median", f"{statistics.median(mfu):.1%}"))
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (jax, flax, transformers))
    return [*rows, ("exported with", versions)]


def loss_rows(history: History) -> list[tuple[str, float, str]]:
    """Returns (updates, loss, accuracy) of some of the evaluations."""
    evals = [line for line in history.evals if line.get("loss") is not None]
    chosen = sorted({round(i * (len(evals) - 1) / (POINTS - 1)) for i in range(POINTS)}) if evals else []
    return [(f"{evals[i]['step']:,}", evals[i]["loss"], f"{evals[i]['accuracy']:.1%}") for i in chosen]
