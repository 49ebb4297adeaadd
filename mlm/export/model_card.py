"""The README.md of an export: what the model is, how it was made, what it cost, how good it is, how to use it."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import flax
import jax
import transformers
from huggingface_hub import EvalResult, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from markupsafe import Markup

from mlm import config as configs
from mlm import entry, logs
from mlm.cluster import fingerprints
from mlm.data import tokenizer
from mlm.data.stages import make_stages
from mlm.model import classifier
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained
from mlm.report import page
from mlm.report.report import score_rows
from mlm.report.sessions import Line
from mlm.report.summary import RunSummary
from mlm.text import code, markdown, printable, templates

CURVE = "loss.png"
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
    is_classifier = load.CLASSIFIER in model.params
    task = "fill-mask"
    if is_classifier:
        of_tokens = classifier.kind(model.config) == "tokens"
        task = "token-classification" if of_tokens else "text-classification"
    values = {
        "metadata": _metadata(model, task, mask_token, scores or {}, name),
        "name": name,
        "task": task,
        "model": model,
        "config": model.config,
        "meta": model.meta,
        "run": run,
        "step": model.step,
        "reads": model.longest_row,
        "scores": score_rows([scores or {}]),
        "labels": classifier.class_names(model.config) if is_classifier else (),
    }
    if not is_classifier:
        flat = configs.flatten(run) if run else {}
        fast = tokenizer.load_fast(model.tokenizer)
        values |= {
            "history": history,
            "run_keys": len(flat),
            "run_json": json.dumps(flat, indent=1).replace("\x7f", "\\u007f"),
            "branch": _branch(model.meta),
            "trained_by": entry.summary(model.meta.get("class", {})),
            "parameters": sum(value.size for value in jax.tree.leaves(model.params)),
            "example": json.dumps(f"The function returns a {mask_token} of all elements."),
            "tokenizer": fast,
            "tokenizer_model": type(fast.model).__name__,
            "stages": run and make_stages(run, model.meta["dataset"]["records"]),
            "fingerprints": {
                "config": run and configs.fingerprint(run),
                "tokenizer": tokenizer.fingerprint(model.tokenizer),
                "code": _code_fingerprint(),
            },
            "versions": ", ".join(
                f"{module.__name__} {module.__version__}" for module in (jax, flax, transformers)
            ),
        }
    if history:
        if history.train or history.evals:
            page.drawn(lambda plots: plots.save(plots.draw_loss(history), folder / CURVE))
        evals = [line for line in history.evals if line.get("loss") is not None]
        tests = [scores for scores in history.tests.values() if scores["step"] == model.step]
        values |= {
            "curve": CURVE if (folder / CURVE).is_file() else "",
            "evals": evals[:: -(len(evals) // POINTS + 1)][::-1],  # the last, and some before it
            "test_names": [name for name, line in history.tests.items() if line in tests],
            # their names say the step
            "tests": [row for row in score_rows(tests) if row[0] != logs.SCORES["step"][0]],
        }
    cards = templates(
        "mlm.export",
        finalize=lambda value: value if isinstance(value, Markup) else markdown(str(value)),
    )
    cards.filters |= {"cell": _cell, "code": code}
    template = cards.get_template("classifier_card.md.j2" if is_classifier else "model_card.md.j2")
    (folder / "README.md").write_text(template.render(values), encoding="utf-8")


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
    matches = [re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(:[^#]*)?(#.*)?", source) for source in sources]
    datasets = list(dict.fromkeys(match[1] for match in matches if match))
    is_one = len(datasets) == 1 and all(matches)  # that the scores are of
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
    language = list(run.hub.language) if run else []
    if not language and sources == ("docstrings",):
        language = ["en"]
    init_from = run.train.init_from if run else ""
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        mask_token=mask_token if is_pretraining else None,
        tags=[model.config.model_type, task, "jax"],
        language=language or None,
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
    """Returns where a run branched off, and the changed keys that a resume may not change; "" if it is no branch."""
    if not (branch := meta.get("branch")):
        return ""
    changes = [
        change
        for change in branch["config_changes"]
        if not configs.resume_may_change(change.partition(":")[0])
    ]
    return f"step {branch['step']:,} of {branch['from']}, with {', '.join(changes) or 'nothing changed'}"


def _code_fingerprint() -> Markup:
    """Returns the SHA-256 of the code, and its commit: $MLM_COMMIT, or that of the git checkout that it is."""
    files = json.dumps(fingerprints.code(), sort_keys=True)
    text = code(hashlib.sha256(files.encode()).hexdigest())
    commit = os.environ.get("MLM_COMMIT")  # of launch/tpu.py, whose hosts have no git
    if not commit and (fingerprints.ROOT / ".git").exists():
        commit = entry.commit(fingerprints.ROOT)
    return text + ", commit " + code(commit) if commit else text
