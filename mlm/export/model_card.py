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
from huggingface_hub import EvalResult, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from markupsafe import Markup
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import entry, logs
from mlm.cluster import fingerprints
from mlm.data import tokenizer
from mlm.data.stages import make_stages
from mlm.model import classifier
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained
from mlm.report import page
from mlm.report.page import Rows
from mlm.report.report import score_rows
from mlm.report.sessions import Line
from mlm.report.summary import RunSummary
from mlm.text import code, markdown, printable, templates

CURVE = "loss.png"
ARCHITECTURES = {
    "Roberta": "RoBERTa",
    "RobertaPreLayerNorm": "RoBERTa-PreLayerNorm",
    "XLMRoberta": "XLM-RoBERTa",
    "Camembert": "CamemBERT",
    "Bert": "BERT",
    "ModernBert": "ModernBERT",
}
TASKS = {  # of the Hub
    "fill-mask": "Masked Language Modeling",
    "text-classification": "Text Classification",
    "token-classification": "Token Classification",
}
METRICS = (
    "loss",
    "perplexity",
    "accuracy",
    "f1",
    "f1_macro",
    "matthews",
    "mse",
    "pearson",
    "spearman",
)
ORDER = re.compile(r"data\..*")  # keys that decide in which order a branch reads its rows
DATA = re.compile(r"(corpus|shards|data)\..*")  # and those that decide which rows these are
POINTS = 8  # evaluations in the table under the curve


def write(
    folder: Path,
    model: Pretrained,
    mask_token: str,
    *,
    scores: Line | None,
    name: str,
    history: RunSummary | None,
) -> None:
    """Writes README.md and, from the `history` of a run up to the model's step, the curve of the loss beside it.

    `scores` are of an evaluation; values are escaped as Markdown where the templates show them.
    """
    run = model.run_config
    name = printable(" ".join(name.split()))
    parts = model.meta.get("averaged", ())
    averaged = (
        f"averaged, decay {run.optimizer.ema_decay}" if run and run.optimizer.ema_decay else ""
    )
    if parts:
        weights = (
            f"{part['checkpoint'].rpartition('/')[2]} (weight {part['weight']:.3g})"
            for part in parts
        )
        averaged = f"the mean of {', '.join(weights)}"
    is_classifier = load.CLASSIFIER in model.params
    task = "fill-mask"
    if is_classifier:
        task = (
            "token-classification"
            if classifier.kind(model.config) == "tokens"
            else "text-classification"
        )
    values = {
        "metadata": _metadata(model, task, mask_token, scores or {}, name),
        "name": name,
        "task": task,
        "config": model.config,
        "family": model.family,
        "architecture": ARCHITECTURES.get(model.family.name, model.family.name),
        "run": run,
        "step": model.step,
        "averaged": averaged,
        "reads": model.longest_row,
        "scores": score_rows([scores or {}]),
        "labels": classifier.class_names(model.config) if is_classifier else (),
    }
    if not is_classifier:
        values |= _pretraining(model, mask_token) | _course(folder, model, history)
    cards = templates(
        "mlm.export",
        finalize=lambda value: value if isinstance(value, Markup) else markdown(str(value)),
    )
    cards.filters |= {"cell": _cell, "code": code}
    template = cards.get_template("classifier_card.md.j2" if is_classifier else "model_card.md.j2")
    (folder / "README.md").write_text(template.render(values), encoding="utf-8")


def _pretraining(model: Pretrained, mask_token: str) -> dict[str, Any]:
    """Returns what the card of a language model shows of its recipe, its tokenizer and its fingerprints."""
    run = model.run_config
    flat = None if run is None else configs.flatten(run)
    fast = tokenizer.load_fast(model.tokenizer)
    return {
        "run_keys": len(flat or ()),
        "run_json": json.dumps(flat, indent=1).replace("\x7f", "\\u007f"),
        "branch": _branch(model.meta),
        "trained_by": entry.summary(model.meta.get("class", {})),
        "parameters": sum(value.size for value in jax.tree.leaves(model.params)),
        "example": json.dumps(f"The function returns a {mask_token} of all elements."),
        "tokenizer": fast,
        "tokenizer_model": type(fast.model).__name__,
        "mixture": _folders(model, run),
        "planned": run and make_stages(run, model.meta["dataset"]["records"]).steps,
        "meta": model.meta,
        "fingerprints": {
            "config": run and configs.fingerprint(run),
            "tokenizer": tokenizer.fingerprint(model.tokenizer),
            "code": _code_fingerprint(),
        },
    }


def _course(folder: Path, model: Pretrained, history: RunSummary | None) -> dict[str, Any]:
    """Returns what the card shows of the course of the run, and draws its curve."""
    if history is None:
        return {"history": None, "tests": []}
    if history.train or history.evals:
        page.drawn(lambda plots: plots.save(plots.draw_loss(history), folder / CURVE))
    return {
        "history": history,
        "tests": _tests(history, model.step),
        "curve": CURVE if (folder / CURVE).is_file() else "",
        "losses": _losses(history),
        "versions": ", ".join(
            f"{module.__name__} {module.__version__}" for module in (jax, flax, transformers)
        ),
    }


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def _metadata(model: Pretrained, task: str, mask_token: str, scores: Line, name: str) -> str:
    """Returns the YAML that the Hub reads."""
    run = model.run_config
    is_pretraining = task == "fill-mask"
    sources: tuple[str, ...] = ()
    if run and is_pretraining and not run.data.mixture:
        sources = run.corpus.sources
    elif run and not is_pretraining:
        sources = (run.classify.train, run.classify.validation)
    names = [
        match[1]
        for source in sources
        if (match := re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(:[^#]*)?(#.*)?", source))
    ]
    datasets = list(dict.fromkeys(names))
    is_one = len(datasets) == 1 and len(names) == len(sources)  # that the scores are of
    results = [
        EvalResult(
            task_type=task,
            task_name=TASKS[task],
            dataset_type=datasets[0] if is_one else "text",
            dataset_name=datasets[0] if is_one else "the validation split of its own data",
            dataset_split="validation",
            metric_type=metric,
            metric_value=scores[metric],
        )
        for metric in METRICS
        if scores.get(metric) is not None
    ]
    language = run.hub.language if run else ()
    init_from = run.train.init_from if run else ""
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        mask_token=mask_token if is_pretraining else None,
        tags=[model.config.model_type, task, "jax"],
        language=list(language or (["en"] if sources == ("docstrings",) else ())) or None,
        license=(run.hub.license if run else "") or None,
        datasets=datasets or None,
        base_model=init_from if _is_of_the_hub(init_from) else None,
        model_name=name if results else None,
        eval_results=results or None,
    ).to_yaml()


def _is_of_the_hub(name: str) -> bool:
    """Returns whether the Hub gave a model, whose name could be that of a folder, too."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # a path
        return False


def _branch(meta: dict[str, Any]) -> str:
    """Returns where a run branched off, and the changed keys that change a number; "" if it is no branch."""
    if not (branch := meta.get("branch")):
        return ""
    shown = ORDER if branch["same_data"] else DATA  # a folder may have moved
    keys = {change: change.partition(":")[0] for change in branch["config_changes"]}
    changes = [
        change
        for change, key in keys.items()
        if shown.fullmatch(key) or not configs.resume_may_change(key)
    ]
    return f"step {branch['step']:,} of {branch['from']}, with {', '.join(changes) or 'nothing changed'}"


def _folders(model: Pretrained, run: ConfigDict | None) -> list[tuple[str, str, int, float]]:
    """Returns (name, share, rows, epochs read) of each folder of the run's mixture."""
    folders = model.meta.get("dataset", {}).get("mixture", ()) if run else ()
    read = (
        make_stages(run, model.meta["dataset"]["records"]).own_rows_read(model.step)
        if folders
        else 0
    )
    rows = [(folder["name"], folder["share"], folder["records"]) for folder in folders]
    return [
        (name, f"{share:.4g}", count, f"{read * share / count:.2f}") for name, share, count in rows
    ]


def _losses(history: RunSummary) -> list[tuple[str, float, str]]:
    """Returns (steps, loss, accuracy) of some of the evaluations, evenly spread."""
    evals = [line for line in history.evals if line.get("loss") is not None]
    chosen = (
        sorted({round(i * (len(evals) - 1) / (POINTS - 1)) for i in range(POINTS)}) if evals else []
    )
    return [
        (f"{evals[i]['step']:,}", evals[i]["loss"], f"{evals[i]['accuracy']:.1%}") for i in chosen
    ]


def _tests(history: RunSummary, step: int) -> Rows:
    """Returns head and rows of the scores of the test split at a step; none if it was not scored."""
    tests = {name: scores for name, scores in history.tests.items() if scores["step"] == step}
    rows = [row for row in score_rows(list(tests.values())) if row[0] != logs.SCORES["step"][0]]
    return [("", *(name.rpartition(", step ")[0] for name in tests)), *rows] if tests else []


def _code_fingerprint() -> Markup:
    """Returns the SHA-256 of the code, and its commit: $MLM_COMMIT, or that of the git checkout that it is."""
    text = code(
        hashlib.sha256(json.dumps(fingerprints.code(), sort_keys=True).encode()).hexdigest()
    )
    if commit := os.environ.get("MLM_COMMIT"):  # of launch/tpu.py, whose hosts have no git
        return text + ", commit " + code(commit)
    command = [
        "git",
        "-C",
        str(fingerprints.ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError:  # there is no git
        return text
    has_commit = done.returncode == 0 and (fingerprints.ROOT / ".git").exists()
    return text + ", commit " + code(done.stdout.strip()) if has_commit else text
