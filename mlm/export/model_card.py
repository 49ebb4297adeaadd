"""The README.md of an export: what the model is, how it was made, what it cost, how good it is, how to use it."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import flax
import jax
import transformers
from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import entry, logs
from mlm.cluster import fingerprints
from mlm.data import tokenizer
from mlm.data.stages import make_stages
from mlm.model import classifier
from mlm.pretrained.load import Pretrained
from mlm.report import page
from mlm.report.page import Rows
from mlm.report.report import score_rows
from mlm.report.sessions import Line
from mlm.report.summary import RunSummary
from mlm.text import code, markdown, printable, templates

CURVE, TASK = "loss.png", "Masked Language Modeling"
ARCHITECTURES = {
    "Roberta": "RoBERTa",
    "RobertaPreLayerNorm": "RoBERTa-PreLayerNorm",
    "XLMRoberta": "XLM-RoBERTa",
    "Camembert": "CamemBERT",
    "Bert": "BERT",
    "ModernBert": "ModernBERT",
}
ORDER = re.compile(r"data\..*")  # keys that decide in which order a branch reads its rows
DATA = re.compile(r"(corpus|shards|data)\..*")  # and those that decide which rows these are
POINTS = 8  # evaluations in the table under the curve


def write(
    folder: Path, model: Pretrained, mask_token: str, *, scores: Line | None, name: str, history: RunSummary | None
) -> None:
    """Writes README.md and, from the `history` of the run up to the model's step, the curve of the loss beside it."""
    run, fast = model.run_config, tokenizer.load_fast(model.tokenizer)
    name = printable(" ".join(name.split()))
    values = {
        "metadata": _metadata(run, model.config.model_type, mask_token, scores, name),
        "name": name,
        "run_keys": 0 if run is None else len(configs.flatten(run)),
        "run_json": json.dumps(run and configs.flatten(run), indent=1).replace("\x7f", "\\u007f"),
        "branch": _branch(model.meta),
        "trained_by": entry.summary(model.meta.get("class", {})),
        "parameters": sum(value.size for value in jax.tree.leaves(model.params)),
        "example": json.dumps(f"The function returns a {mask_token} of all elements."),
        "tokenizer": fast,
        "tokenizer_model": type(fast.model).__name__,
        "history": history,
        "mixture": _folders(model, run),
        "planned": run and make_stages(run, model.meta["dataset"]["records"]).steps,
        "meta": model.meta,
        "scores": score_rows([scores or {}]),
        "tests": [] if history is None else _tests(history, model.step),
        "fingerprints": {
            "config": run and configs.fingerprint(run),
            "tokenizer": tokenizer.fingerprint(model.tokenizer),
            "code": _code_fingerprint(),
        },
    }
    if history is not None:
        if history.train or history.evals:
            page.drawn(lambda plots: plots.save(plots.draw_loss(history), folder / CURVE))
        values |= {
            "curve": CURVE if (folder / CURVE).is_file() else "",
            "losses": _losses(history),
            "versions": ", ".join(f"{module.__name__} {module.__version__}" for module in (jax, flax, transformers)),
        }
    _render(folder, "model_card.md.j2", model, values)


def write_classifier(folder: Path, model: Pretrained, *, scores: Line | None, name: str) -> None:
    """Writes the README.md of a classifier; `scores` are of an evaluation."""
    values = {
        "task": "token-classification" if classifier.kind(model.config) == "tokens" else "text-classification",
        "name": name,
        "pair": len(model.run_config.classify.text) == 2,
        "scores": score_rows([scores or {}]),
        "labels": classifier.class_names(model.config),
    }
    _render(folder, "classifier_card.md.j2", model, values)


def _render(folder: Path, template: str, model: Pretrained, values: dict[str, Any]) -> None:
    """Writes a card; the values that its template shows are escaped as Markdown."""
    cards = templates("mlm.export", finalize=lambda value: value if isinstance(value, Markup) else markdown(str(value)))
    cards.filters |= {"cell": _cell, "code": code}
    parts = model.meta.get("averaged", ())
    means = [f"{part['checkpoint'].rpartition('/')[2]} (weight {part['weight']:.3g})" for part in parts]
    decay = model.run_config.optimizer.ema_decay if model.run_config else 0
    values |= {
        "config": model.config,
        "family": model.family,
        "architecture": ARCHITECTURES.get(model.family.name, model.family.name),
        "run": model.run_config,
        "step": model.step,
        "averaged": f"the mean of {', '.join(means)}" if means else f"averaged, decay {decay}" if decay else "",
        "reads": model.longest_row,
    }
    (folder / "README.md").write_text(cards.get_template(template).render(values), encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def _metadata(run: ConfigDict | None, model_type: str, mask_token: str, scores: Line | None, name: str) -> str:
    """Returns the YAML that the Hub reads; scores are in it where the data set has a name there."""
    sources = run.corpus.sources if run and not run.data.mixture else ()
    names = [match[1] for source in sources if (match := re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(:[^#]*)?(#.*)?", source))]
    hub = names[0] if len(names) == len(sources) and len(set(names)) == 1 else ""
    known = [key for key in ("loss", "perplexity", "accuracy") if hub and scores and scores.get(key) is not None]
    results = [EvalResult("fill-mask", hub, hub, key, scores[key], TASK, dataset_split="validation") for key in known]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="fill-mask",
        mask_token=mask_token,
        tags=[model_type, "fill-mask", "jax"],
        datasets=list(dict.fromkeys(names)) or None,
        model_name=name if results else None,
        eval_results=results or None,
    ).to_yaml()


def _branch(meta: dict[str, Any]) -> str:
    """Returns where a run branched off, and the changed keys that change a number; "" if it is no branch."""
    if not (branch := meta.get("branch")):
        return ""
    shown = ORDER if branch["same_data"] else DATA  # a folder may have moved
    keys = {change: change.partition(":")[0] for change in branch["config_changes"]}
    changes = [change for change, key in keys.items() if shown.fullmatch(key) or not configs.resume_may_change(key)]
    return f"step {branch['step']:,} of {branch['from']}, with {', '.join(changes) or 'nothing changed'}"


def _folders(model: Pretrained, run: ConfigDict | None) -> list[tuple[str, str, int, float]]:
    """Returns (name, share, rows, epochs read) of each folder of the run's mixture."""
    folders = model.meta.get("dataset", {}).get("mixture", ()) if run else ()
    read = make_stages(run, model.meta["dataset"]["records"]).own_rows_read(model.step) if folders else 0
    rows = [(folder["name"], folder["share"], folder["records"]) for folder in folders]
    return [(name, f"{share:.4g}", count, f"{read * share / count:.2f}") for name, share, count in rows]


def _losses(history: RunSummary) -> list[tuple[str, float, str]]:
    """Returns (steps, loss, accuracy) of some of the evaluations, evenly spread."""
    evals = [line for line in history.evals if line.get("loss") is not None]
    chosen = sorted({round(i * (len(evals) - 1) / (POINTS - 1)) for i in range(POINTS)}) if evals else []
    return [(f"{evals[i]['step']:,}", evals[i]["loss"], f"{evals[i]['accuracy']:.1%}") for i in chosen]


def _tests(history: RunSummary, step: int) -> Rows:
    """Returns head and rows of the scores of the test split at a step; none if it was not scored."""
    tests = {name: scores for name, scores in history.tests.items() if scores["step"] == step}
    rows = [row for row in score_rows(list(tests.values())) if row[0] != logs.SCORES["step"][0]]
    return [("", *(name.rpartition(", step ")[0] for name in tests)), *rows] if tests else []


def _code_fingerprint() -> Markup:
    """Returns the SHA-256 of the code, and its commit: $MLM_COMMIT, or that of the git checkout that it is."""
    text = code(hashlib.sha256(json.dumps(fingerprints.code(), sort_keys=True).encode()).hexdigest())
    if commit := os.environ.get("MLM_COMMIT"):  # of launch/tpu.py, whose hosts have no git
        return text + ", commit " + code(commit)
    command = ["git", "-C", str(fingerprints.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError:  # there is no git
        return text
    has_commit = done.returncode == 0 and (fingerprints.ROOT / ".git").exists()
    return text + ", commit " + code(done.stdout.strip()) if has_commit else text
