"""The README.md of an export: what the model is, how it was made, how good it is, how to use it."""

from __future__ import annotations

import json
from typing import Any

import jax

from mlm.trained import Trained

SCORES = {
    "loss": "cross entropy, nats per masked token",
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "bits_per_byte": "bits per byte",
    "predictions": "masked tokens scored",
}


def text(trained: Trained, mask_token: str, *, scores: dict[str, Any] | None, name: str) -> str:
    """Returns the card as Markdown, with the metadata that the Hugging Face Hub reads on top.

    Args:
      trained: the model.
      mask_token: of its tokenizer.
      scores: of the evaluation; None leaves the section out.
      name: of the model.
    """
    config = trained.config
    count = sum(value.size for value in jax.tree.leaves(trained.params))
    reads = config.max_position_embeddings - config.pad_token_id - 1
    parts = [
        _metadata(mask_token),
        f"# {' '.join(name.split())}",
        f"A RoBERTa masked language model: {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {count / 1e6:.1f} million parameters, {config.vocab_size:,} vocabulary "
        f"entries. It reads up to {reads} tokens.",
        "## Use",
        "```python\nfrom transformers import pipeline\n\n"
        'fill = pipeline("fill-mask", model="PATH_OF_THIS_FOLDER")\n'
        f'print(fill("The function returns a {mask_token} of all elements."))\n```',
        "`FlaxRobertaForMaskedLM.from_pretrained` (transformers 4) loads the same folder.",
        "## How it was made",
        _recipe(trained),
    ]
    known = [(words, scores[key]) for key, words in SCORES.items() if key in scores] if scores else []
    if known:
        parts += ["## Scores", "On the validation split, every record once:", _table("score", known)]
    parts += [
        "## Proof",
        "`proof.json` and `proof.safetensors` hold texts with their token ids, the logits and the fillings that the "
        "trained model gives in JAX. `mlm/verify_export.py` of the project that wrote this folder compares them with "
        "what PyTorch gives.",
        "## Limits",
        "The model fills masks as its corpus would: it knows nothing else, repeats the biases of that text, and has "
        "not been evaluated for any other use.",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(mask_token: str) -> str:
    lines = ["library_name: transformers", "pipeline_tag: fill-mask", f"mask_token: {json.dumps(mask_token)}", "tags:"]
    return "\n".join(["---", *lines, "- roberta", "- fill-mask", "- jax", "---"])


def _recipe(trained: Trained) -> str:
    run = trained.run_config
    if run is None:
        return "Written from an existing folder; its recipe is not known."
    warmup = f"{run['schedule.warmup_steps']} updates"
    if run["schedule.warmup_fraction"]:
        warmup = f"{run['schedule.warmup_fraction']:.1%} of the updates"
    clip, average = run["optimizer.clip_norm"], run["optimizer.ema_decay"]
    rows = [
        ("corpus", ", ".join(f"`{source}`" for source in run["corpus.sources"])),
        ("tokenizer", f"`{run['tokenizer.path']}`" if run["tokenizer.path"] else run["tokenizer.kind"]),
        ("updates", trained.step),
        ("rows in an update", f"{run['data.global_batch']:,} of {run['shards.length']} tokens"),
        (
            "predicted",
            f"{run['masking.rate']:.0%} of the tokens; of these {run['masking.mask_share']:.0%} masked and "
            f"{run['masking.random_share']:.0%} replaced at random",
        ),
        ("dropout", f"{run['model.hidden_dropout']}, in attention {run['model.attention_dropout']}"),
        ("optimizer", f"{run['optimizer.name']}, weight decay {run['optimizer.weight_decay']}"),
        ("gradient clipping", f"norm {clip}" if clip else "none"),
        ("learning rate", f"{run['optimizer.learning_rate']}, {run['schedule.name']}, warmup {warmup}"),
        ("parameters", f"averaged, decay {average}" if average else "of the last update"),
        ("computed in", run["model.dtype"]),
    ]
    return "Pretrained from scratch; every key of the run is in `run_config.json`.\n\n" + _table("recipe", rows)


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
    lines = [f"| {title} | |", "|---|---|"]
    for words, value in rows:
        shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        lines.append(f"| {words} | {shown.replace('|', '&#124;')} |")
    return "\n".join(lines)
