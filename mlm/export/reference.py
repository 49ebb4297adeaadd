"""The outputs of a model that every reader of its export must reproduce: proof.json and proof.safetensors.

A masked language model has {"rows": [{"text", "ids", "positions", "fillings"}, ...], "top_k"}, and
its logits [K, V] of each row as "logits.{row}". A classifier has {"task": transformers' name,
"longest", "labels": [C], "rows": [{"texts", "ids"}, ...]} and "logits" [B, C], or of token labels
those of each row, [L, C], as "logits.{row}".

Dimensions: B rows, L tokens in a row, K positions in a row, V vocabulary entries, C classes, 1 for
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

    texts: list[list[str]]  # one or two a row
    longest: int  # tokens to truncate a row to
    ids: list[list[int]]
    positions: list[list[int]] | None  # in each row, whose logits are kept; None of a classifier
    logits: list[np.ndarray]  # of each row

    def write(self, folder: Path) -> None:
        """Writes both files, and the versions of the packages that computed them."""
        tensors = {f"logits.{row}": logits for row, logits in enumerate(self.logits)}
        if self.content.get("task") == "text-classification":
            tensors = {"logits": np.stack(self.logits)}
        save_file(tensors, str(folder / "proof.safetensors"))
        versions = {module.__name__: module.__version__ for module in (jax, flax, transformers)}
        text = json.dumps(self.content | {"made_with": versions}, indent=1, ensure_ascii=False)
        (folder / PROOF).write_text(text + "\n", encoding="utf-8")


def compute(model: Pretrained) -> Reference:
    """Returns the reference outputs of a model."""
    tok = tokenizer.load(model.tokenizer)
    return (
        _of_classifier(model, tok) if load.CLASSIFIER in model.params else _of_masked_lm(model, tok)
    )


def _of_masked_lm(model: Pretrained, tok: PreTrainedTokenizerFast) -> Reference:
    """Positions of a text are its first, middle and last token and its first four masks."""
    longest = model.longest_row
    mask = tok.mask_token
    filler = FILLER.split() * longest
    while (
        len(row := tok(" ".join([*filler, mask]), verbose=False)["input_ids"]) > longest and filler
    ):
        filler = filler[: len(filler) * longest // (len(row) + 1)]  # always fewer
    # fills the positions to the last
    long = " ".join([*filler, *[mask] * (longest - len(row) + 1)])
    texts = [*(text.replace("<mask>", mask) for text in TEXTS), long]
    texts = [text for text in texts if len(tok(text, verbose=False)["input_ids"]) <= longest]
    ids = [tok(text)["input_ids"] for text in texts]
    masks = [
        [place for place, token in enumerate(row) if token == tok.mask_token_id] for row in ids
    ]
    positions = [
        sorted({0, len(row) // 2, len(row) - 1, *places[:4]})
        for row, places in zip(ids, masks, strict=True)
    ]
    top_k = min(TOP_K, model.config.vocab_size)
    columns = zip(texts, ids, positions, FillMask(model, tok, top_k)(texts), strict=True)
    rows = [
        {"text": text, "ids": row, "positions": kept, "fillings": best}
        for text, row, kept, best in columns
    ]
    logits = make_forward(model)(ids, positions)
    return Reference(
        {"top_k": top_k, "rows": rows}, [[text] for text in texts], longest, ids, positions, logits
    )


def _of_classifier(model: Pretrained, tok: PreTrainedTokenizerFast) -> Reference:
    """Texts, or pairs of them; the last is too long for the model."""
    longest = model.longest_row
    plain = [text.replace("<mask>", "none") for text in TEXTS]
    long = " ".join([FILLER] * longest)  # a word is a token at least
    texts = [[text] for text in (*plain, long)]
    if model.run_config is not None and len(model.run_config.classify.text) == 2:
        texts = [*([text, plain[-1]] for text in plain), [plain[1], plain[0]], [plain[0], long]]
    ids = [tok(*row, truncation="longest_first", max_length=longest)["input_ids"] for row in texts]
    task = (
        "token-classification"
        if classifier.kind(model.config) == "tokens"
        else "text-classification"
    )
    rows = [{"texts": row_texts, "ids": row} for row_texts, row in zip(texts, ids, strict=True)]
    labels = [str(model.config.id2label[index]) for index in range(model.config.num_labels)]
    content = {"task": task, "longest": longest, "labels": labels, "rows": rows}
    return Reference(content, texts, longest, ids, None, make_forward(model)(ids))
