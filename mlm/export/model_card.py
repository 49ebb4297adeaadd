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

from mlm import config as configs
from mlm.cluster import fingerprints
from mlm.data import tokenizer
from mlm.export import card_history
from mlm.export.card_history import History, Markup, table
from mlm.pretrained.load import Pretrained
from mlm.text import code, markdown, printable

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
    curve = history is not None and card_history.draw(history, folder)
    name = printable(" ".join(name.split()))
    parts = _parts(trained, mask_token, scores=scores, name=name, history=history, curve=curve)
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _parts(
    trained: Pretrained, mask_token: str, *, scores: dict | None, name: str, history: History | None, curve: bool
) -> Iterator[str]:
    config, run = trained.config, trained.run_config
    count = sum(value.size for value in jax.tree.leaves(trained.params))
    reads = config.max_position_embeddings - config.pad_token_id - 1
    yield _metadata(trained, mask_token, scores, name)
    yield f"# {markdown(name)}"
    yield (
        f"A RoBERTa masked language model: {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {count / 1e6:.1f} million parameters, {config.vocab_size:,} vocabulary "
        f"entries. It reads up to {reads} tokens."
    )
    yield "## Use"
    text = json.dumps(f"The function returns a {mask_token} of all elements.")
    yield (
        "```python\nfrom transformers import pipeline\n\n"
        'fill = pipeline("fill-mask", model="PATH_OR_HUB_NAME_OF_THIS_FOLDER")\n'
        f"print(fill({text}))\n```"
    )
    yield "`FlaxRobertaForMaskedLM.from_pretrained` (transformers 4) loads the same folder."
    yield "## How it was made"
    if run is None:
        yield "Written from an existing folder; its recipe is not known."
    else:
        yield "Pretrained from scratch; every key of the run is at the end, and in `run_config.json`."
        yield table("recipe", _recipe(trained))
    yield table("tokenizer", _tokenizer(trained))
    if history is not None:
        yield from card_history.data(history.manifest)
        yield from card_history.compute(trained, history)
        yield from card_history.losses(history, curve)
    known = [(words, scores[key]) for key, words in SCORES.items() if scores.get(key) is not None] if scores else []
    if known:
        yield "## Scores"
        yield "On the validation split, every record once:"
        yield table("score", known)
    yield "## Proof"
    yield (
        "`proof.json` and `proof.safetensors` hold texts with their token ids, the logits and the fillings that the "
        "trained model gives in JAX. `mlm/export/verify_export.py` of the project that wrote this folder compares them "
        "with what PyTorch gives."
    )
    yield "## Limits"
    yield _limits(run, reads)
    yield "## Fingerprints"
    yield table("SHA-256 of", [(what, Markup(value)) for what, value in _fingerprints(trained, history)])
    if run is not None:
        shown = json.dumps(run, indent=1).replace("\x7f", "\\u007f")
        yield f"<details><summary>Config, {len(run)} keys</summary>\n\n```json\n{shown}\n```\n\n</details>"


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
    return f"---\n{card.to_yaml()}\n---"


def _recipe(trained: Pretrained) -> list[tuple[str, Any]]:
    run = trained.run_config
    warmup = f"{run['schedule.warmup_steps']} updates"
    if run["schedule.warmup_fraction"]:
        warmup = f"{run['schedule.warmup_fraction']:.1%} of the updates"
    clip, average = run["optimizer.clip_norm"], run["optimizer.ema_decay"]
    return [
        ("corpus", Markup(", ".join(map(code, run["corpus.sources"])))),
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
    kind = Markup(code(run["tokenizer.path"])) if run.get("tokenizer.path") else run.get("tokenizer.kind", "not known")
    found = tokenizer.load_fast(trained.tokenizer)
    return [("kind", kind), ("entries", found.get_vocab_size()), ("model", type(found.model).__name__)]


def _limits(run: dict[str, Any] | None, reads: int) -> str:
    text = (
        "The model fills masks as its corpus would: it knows nothing else, repeats the biases of that text, and has "
        f"not been evaluated for any other use. Text of more than {reads} tokens must be cut."
    )
    if run is not None:
        rate = run["masking.rate"]
        text += f" It was trained with {rate:.0%} of the tokens to predict; at other rates it was not."
    return text


def _fingerprints(trained: Pretrained, history: History | None) -> Iterator[tuple[str, str]]:
    if trained.run_config is not None:
        yield "config", code(configs.fingerprint(configs.unflatten(trained.run_config)))
    if history is not None and history.data_fingerprint:
        yield "data", code(history.data_fingerprint)
    yield "tokenizer", code(tokenizer.fingerprint(trained.tokenizer))
    files = hashlib.sha256(json.dumps(fingerprints.code(), sort_keys=True).encode()).hexdigest()
    yield "code that exported it", f"`{files}`{_commit()}"


def _commit() -> str:
    """Returns the commit of the code where it is a git checkout, for the table."""
    command = ["git", "-C", str(fingerprints.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # there is no git
        return ""
    there = done.returncode == 0 and (fingerprints.ROOT / ".git").exists()
    return f", commit `{done.stdout.strip()}`" if there else ""
