"""`export` of a classifier: a folder for transformers' RobertaForSequenceClassification, proven as export.py's are.

proof.json holds {"task": "text-classification", "rows": [{"texts", "ids", "scores"}, ...], "made_with"}, and
proof.safetensors their logits [rows, C], all rows but the last, the longest, as one padded batch.

Dimensions: C classes, 1 for regression.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import transformers
from safetensors.numpy import save_file
from transformers import FlaxRobertaForSequenceClassification, PreTrainedTokenizerFast

from mlm import logs
from mlm.data import tokenizer
from mlm.errors import DamageError, InputError
from mlm.export import export as exports
from mlm.export import model_card
from mlm.inference.classify_texts import TextClassifier, Texts
from mlm.inference.fill_mask import longest_row
from mlm.model import classifier
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained
from mlm.workdir import Workdir

TASK = "text-classification"  # transformers' name
# One entry of run_config.json under each title of the card.
RECIPE = {
    "trained on": "classify.train",
    "started from": "train.init_from",
    "rows in an update": "data.global_batch",
    "learning rate": "optimizer.learning_rate",
    "optimizer": "optimizer.name",
    "longest row, tokens": "classify.length",
}


def export(trained: Pretrained, workdir: Workdir, *, name: str, torch_python: str = "") -> None:
    """Writes a classifier into the workdir's export, which is replaced when the new one is complete and proven.

    Raises:
      InputError, DamageError: as `exports.export`.
    """
    tok = exports.fitting_tokenizer(trained)
    scores = [line for line in logs.read(workdir.metrics, "eval") if line["step"] == trained.step]

    def prove(new: Path) -> None:
        (new / "README.md").write_text(card(trained, scores[-1] if scores else {}, name), encoding="utf-8")
        rows, logits_NxC = write_proof(trained, tok, new)
        _check_files(rows, logits_NxC, new)

    exports.write_folder(trained, workdir.export, prove, torch_python)


def proof_texts(trained: Pretrained, tok: PreTrainedTokenizerFast) -> list[Texts]:
    """Returns texts, or pairs where the model reads pairs: several lengths, the last too long for the model."""
    pair = len((trained.run_config or {}).get("classify.text", ())) == 2
    texts = [text.replace("<mask>", "none") for text in exports.TEXTS]
    long = " ".join([exports.FILLER] * longest_row(trained))  # a word is a token at least
    if pair:
        return [*((text, texts[-1]) for text in texts), (texts[1], texts[0]), (texts[0], long)]
    return [(text,) for text in (*texts, long)]


def write_proof(
    trained: Pretrained, tok: PreTrainedTokenizerFast, folder: Path
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Writes proof.json and proof.safetensors; returns their rows and logits [N, C]."""
    predictor, longest = TextClassifier(trained, tok), longest_row(trained)
    texts = proof_texts(trained, tok)
    ids = [tok(*each, truncation="longest_first", max_length=longest)["input_ids"] for each in texts]
    logits_NxC = predictor.logits(ids)
    found = predictor.classify(ids, max(len(predictor.names), 1))
    rows = [
        {"texts": list(each), "ids": own, "scores": scores.get("probabilities", scores)}
        for each, own, scores in zip(texts, ids, found, strict=True)
    ]
    made_with = {module.__name__: module.__version__ for module in (jax, flax, transformers)}
    save_file({"logits": logits_NxC}, str(folder / "proof.safetensors"))
    content = {"task": TASK, "longest": longest, "made_with": made_with, "rows": rows}
    (folder / exports.PROOF).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return rows, logits_NxC


def _check_files(rows: list[dict[str, Any]], logits_NxC: np.ndarray, folder: Path) -> None:
    """Raises DamageError unless both weight files, read back, give the logits of the proof."""
    ids = [row["ids"] for row in rows]
    try:
        again = exports.read_back(folder, load.CLASSIFIER)
        found = TextClassifier(again, tokenizer.load(str(folder))).logits(ids)
        stock = FlaxRobertaForSequenceClassification.from_pretrained(str(folder), trust_remote_code=False)
        with jax.default_matmul_precision("highest"):
            stock_C = np.asarray(stock(np.asarray(ids[-1:], np.int32)).logits[0])
    except (InputError, OSError, ValueError) as error:
        raise DamageError(f"what export wrote can't be read back ({error}); look at the disk, and try again.") from None
    exports.check_logits("model.safetensors", [logits_NxC], [found])
    exports.check_logits("flax_model.msgpack", [logits_NxC[-1]], [stock_C])


def card(trained: Pretrained, scores: dict[str, Any], name: str) -> str:
    """Returns the model card as Markdown, with the metadata that the Hugging Face Hub reads on top."""
    run = trained.run_config or {}
    recipe = [(words, run[key]) for words, key in RECIPE.items() if run.get(key)] + [("updates", trained.step or "")]
    return model_card.render(
        "classifier_card.md.j2",
        task=TASK,
        name=name,
        config=trained.config,
        run=run,
        pair=len(run.get("classify.text", ())) == 2,
        reads=longest_row(trained),
        recipe=recipe,
        scores=[(key, value) for key, value in scores.items() if key not in ("step", "kind")],
        labels=classifier.class_names(trained.config),
    )
