"""The README.md of an export: what the model is, how it was made, what it cost, how good it is, how to use it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup

from mlm import config as configs
from mlm.cluster import fingerprints
from mlm.data import tokenizer
from mlm.export import card_history
from mlm.export.card_history import History
from mlm.pretrained.load import Pretrained
from mlm.text import code, markdown, printable, templates

SCORES = {
    "loss": "cross entropy, nats per masked token",
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "bits_per_byte": "bits per byte",
    "predictions": "masked tokens scored",
}


def write(
    folder: Path,
    trained: Pretrained,
    mask_token: str,
    *,
    scores: dict[str, Any] | None,
    name: str,
    history: History | None = None,
) -> None:
    """Writes README.md, and the loss's curve beside it where there is one.

    Args:
      folder: local.
      trained: the model.
      mask_token: of its tokenizer.
      scores: of the evaluation; None leaves the section out.
      name: of the model.
      history: of its run; None for a model from elsewhere.
    """
    config, run = trained.config, trained.run_config
    name = printable(" ".join(name.split()))
    values: dict[str, Any] = {}
    if history is not None:
        values["curve"] = card_history.CURVE if card_history.draw(history, folder) else ""
        values["data"] = card_history.data_rows(history.manifest) if history.manifest else []
        values["compute"] = card_history.compute_rows(trained, history)
        values["losses"] = card_history.loss_rows(history)
    if run is not None:
        values["recipe"] = _recipe(trained)
        values["run_json"] = json.dumps(run, indent=1).replace("\x7f", "\\u007f")
    text = render(
        "model_card.md.j2",
        metadata=_metadata(trained, mask_token, scores, name),
        name=name,
        config=config,
        run=run,
        parameters=sum(value.size for value in jax.tree.leaves(trained.params)),
        reads=config.max_position_embeddings - config.pad_token_id - 1,
        example=json.dumps(f"The function returns a {mask_token} of all elements."),
        tokenizer=_tokenizer(trained),
        history=history,
        scores=[(words, scores[key]) for key, words in SCORES.items() if scores and scores.get(key) is not None],
        fingerprints=_fingerprints(trained, history),
        **values,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def render(template: str, **values: Any) -> str:
    """Returns a card; what its template shows is escaped as Markdown."""
    cards = templates("mlm.export", finalize=lambda value: value if isinstance(value, Markup) else markdown(str(value)))
    cards.filters |= {"cell": _cell, "code": code}
    return cards.get_template(template).render(values)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def _metadata(trained: Pretrained, mask_token: str, scores: dict[str, Any] | None, name: str) -> str:
    """Returns the YAML that the Hub reads; scores are in it where the data set has a name there."""
    sources = trained.run_config["corpus.sources"] if trained.run_config else ()
    names = [match[1] for source in sources if (match := re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(:.*)?", source))]
    results = None
    if scores and len(names) == len(sources) == 1:
        kinds = [key for key in ("loss", "perplexity", "accuracy") if scores.get(key) is not None]
        task = {"task_type": "fill-mask", "task_name": "Masked Language Modeling"}
        data = {"dataset_type": names[0], "dataset_name": names[0], "dataset_split": "validation"}
        results = [EvalResult(**task, **data, metric_type=kind, metric_value=scores[kind]) for kind in kinds]
    card = ModelCardData(
        library_name="transformers",
        pipeline_tag="fill-mask",
        mask_token=mask_token,
        tags=["roberta", "fill-mask", "jax"],
        datasets=names or None,
        model_name=name,
        eval_results=results or None,
    )
    if not results:
        card.model_name = None
    return card.to_yaml()


def _recipe(trained: Pretrained) -> list[tuple[str, Any]]:
    run = trained.run_config
    warmup = f"{run['schedule.warmup_steps']} updates"
    if run["schedule.warmup_fraction"]:
        warmup = f"{run['schedule.warmup_fraction']:.1%} of the updates"
    clip, average = run["optimizer.clip_norm"], run["optimizer.ema_decay"]
    return [
        ("corpus", Markup(", ").join(map(code, run["corpus.sources"]))),
        ("updates", trained.step),
        ("rows in an update", f"{run['data.global_batch']:,} of {run['shards.length']} tokens"),
        ("predicted", _predicted(run)),
        ("started from", run.get("train.init_from") or "random parameters"),
        ("dropout", f"{run['model.hidden_dropout']}, in attention {run['model.attention_dropout']}"),
        ("optimizer", f"{run['optimizer.name']}, weight decay {run['optimizer.weight_decay']}"),
        ("gradient clipping", f"norm {clip}" if clip else "none"),
        ("learning rate", f"{run['optimizer.learning_rate']}, {run['schedule.name']}, warmup {warmup}"),
        ("parameters", f"averaged, decay {average}" if average else "of the last update"),
        ("computed in", run["model.dtype"]),
    ]


def _predicted(run: dict[str, Any]) -> str:
    units = {"word": " in whole words", "span": " in spans of words"}.get(run.get("masking.kind"), "")
    end = f", {run['masking.end_rate']:.0%} at the end" if run.get("masking.end_rate") else ""
    return (
        f"{run['masking.rate']:.0%} of the tokens{units}{end}; of these {run['masking.mask_share']:.0%} masked and "
        f"{run['masking.random_share']:.0%} replaced at random"
    )


def _tokenizer(trained: Pretrained) -> list[tuple[str, Any]]:
    run = trained.run_config or {}
    kind = code(run["tokenizer.path"]) if run.get("tokenizer.path") else run.get("tokenizer.kind", "not known")
    found = tokenizer.load_fast(trained.tokenizer)
    return [("kind", kind), ("entries", found.get_vocab_size()), ("model", type(found.model).__name__)]


def _fingerprints(trained: Pretrained, history: History | None) -> Iterator[tuple[str, Markup]]:
    if trained.run_config is not None:
        yield "config", code(configs.fingerprint(configs.unflatten(trained.run_config)))
    if history is not None and history.data_fingerprint:
        yield "data", code(history.data_fingerprint)
    yield "tokenizer", code(tokenizer.fingerprint(trained.tokenizer))
    files = hashlib.sha256(json.dumps(fingerprints.code(), sort_keys=True).encode()).hexdigest()
    yield "code that exported it", code(files) + _commit()


def _commit() -> Markup:
    """Returns the commit of the code where it is a git checkout, for the table."""
    command = ["git", "-C", str(fingerprints.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # there is no git
        return Markup()
    there = done.returncode == 0 and (fingerprints.ROOT / ".git").exists()
    return ", commit " + code(done.stdout.strip()) if there else Markup()
