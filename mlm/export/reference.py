"""The outputs of a model that every reader of its export must reproduce: proof.json and proof.safetensors.

proof.json has {"task": transformers' name, "longest": tokens that a row is cut to, "rows": [{"texts":
one or two, "ids"}, ...]}. A row of a masked language model has the "positions" whose logits are
kept, and the "fillings" of its masks, "top_k" each; a classifier has its "labels". proof.safetensors
has the logits of each row as "logits.{row}": [K, V] at its positions, of a classifier [C], or of token
labels [L, C].

Dimensions: L tokens in a row, K positions in a row, V vocabulary entries, C classes, 1 for
regression.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
import transformers
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.export.folder import PROOF
from mlm.inference.fill_mask import FillMask
from mlm.inference.forward import make_forward
from mlm.model import classifier
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained

TOP_K = 5
# What the tokenizer and the model are compared on: masks first, last, alone, twice, inside a word;
# figures, letters that a vocabulary may lack, and white space. A row as long as the model's
# positions comes on top.
TEXTS = (
    "The function returns a <mask> of all elements in the list.",
    "If the file does not <mask>, an error is raised and the <mask> is closed.",
    "<mask> the first argument is None, the default value of 0.5 is used.",
    "It was the best of times, it was the worst of <mask>",
    "Compute the mean of an array along the given ax<mask>; see also `numpy.sum()`.",
    "In 1905 he moved  to\tZürich, where the naïve café \N{EM DASH} 東京 \N{THUMBS UP SIGN} \N{EM DASH} <mask> stood.",
    "<mask>",
)
FILLER = "The name of the model is read from the file, and the value of each key is set to that of the default config."


class Reference(NamedTuple):
    """Texts, and a model's outputs for them."""

    content: dict[str, Any]  # of proof.json
    logits: list[np.ndarray]  # of each row

    def write(self, folder: Path) -> None:
        """Writes both files, and the versions of the packages that computed them."""
        tensors = {f"logits.{row}": logits for row, logits in enumerate(self.logits)}
        save_file(tensors, str(folder / "proof.safetensors"))
        versions = {module.__name__: module.__version__ for module in (jax, flax, transformers)}
        text = json.dumps(self.content | {"made_with": versions}, indent=1, ensure_ascii=False)
        (folder / PROOF).write_text(text + "\n", encoding="utf-8")

    def logits_by(self, model: Pretrained) -> list[np.ndarray]:
        """Returns what another model gives for these rows."""
        return _logits(model, self.content["rows"])


def compute(model: Pretrained) -> Reference:
    """Returns the reference outputs of a model."""
    tok = tokenizer.load(model.tokenizer)
    longest = model.longest_row
    is_classifier = load.CLASSIFIER in model.params
    texts = _texts_to_classify(model) if is_classifier else _texts_to_fill(tok, longest)
    rows = [
        {
            "texts": row,
            "ids": tok(*row, truncation="longest_first", max_length=longest)["input_ids"],
        }
        for row in texts
    ]
    content = {"task": "fill-mask", "longest": longest, "rows": rows}
    if is_classifier:
        of_tokens = classifier.kind(model.config) == "tokens"
        content["task"] = "token-classification" if of_tokens else "text-classification"
        labels = model.config.id2label
        content["labels"] = [str(labels[index]) for index in range(model.config.num_labels)]
        return Reference(content, _logits(model, rows))
    content["top_k"] = min(TOP_K, model.config.vocab_size)
    fillings = FillMask(model, tok, content["top_k"])([text for (text,) in texts])
    for row, best in zip(rows, fillings, strict=True):
        ids = row["ids"]
        masks = [place for place, token in enumerate(ids) if token == tok.mask_token_id]
        row["positions"] = sorted({0, len(ids) // 2, len(ids) - 1, *masks[:4]})
        row["fillings"] = best
    return Reference(content, _logits(model, rows))


def _logits(model: Pretrained, rows: list[dict[str, Any]]) -> list[np.ndarray]:
    positions = [row["positions"] for row in rows if "positions" in row]
    return make_forward(model)([row["ids"] for row in rows], positions or None)


def _texts_to_fill(tok: PreTrainedTokenizerFast, longest: int) -> list[list[str]]:
    """Returns the texts that the model reads whole; the last one fills its positions to the last."""
    mask = tok.mask_token

    def size(text: str) -> int:
        return len(tok(text, verbose=False)["input_ids"])

    filler = FILLER.split() * longest
    while (length := size(" ".join([*filler, mask]))) > longest and filler:
        filler = filler[: len(filler) * longest // (length + 1)]  # always fewer
    long = " ".join([*filler, *[mask] * (longest - length + 1)])
    texts = [*(text.replace("<mask>", mask) for text in TEXTS), long]
    return [[text] for text in texts if size(text) <= longest]


def _texts_to_classify(model: Pretrained) -> list[list[str]]:
    """Returns texts, or pairs of them; the last is too long for the model."""
    plain = [text.replace("<mask>", "none") for text in TEXTS]
    long = " ".join([FILLER] * model.longest_row)  # a word is a token at least
    if model.run_config is not None and len(model.run_config.classify.text) == 2:
        return [*([text, plain[-1]] for text in plain), [plain[1], plain[0]], [plain[0], long]]
    return [[text] for text in (*plain, long)]
