"""The command `predict` of a classifier: the label of texts or pairs of texts, with probabilities, or a number.

Dimensions: B rows, L tokens in a row, C classes.
"""

from __future__ import annotations

import json
from typing import Any, TextIO

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.inference.fill_mask import answer_lines, batches, longest_row, pad, refuse_bytes
from mlm.model import classifier
from mlm.model.roberta import Params
from mlm.pretrained.load import Pretrained
from mlm.text import printable, show

Texts = tuple[str, ...]  # one, or a pair


class Labeller:
    """Classifies with one model, in float32; it is compiled once for every padded length and power of two of rows."""

    def __init__(self, model: Pretrained, tok: PreTrainedTokenizerFast):
        """Puts the parameters on the device."""
        network = model.network

        def logits(params: Params, ids_BxL: jax.Array, attention_BxL: jax.Array) -> jax.Array:
            return classifier.logits(network, params, ids_BxL, attention_BxL)

        self._logits = jax.jit(logits)
        self._params = jax.device_put(model.params)
        self._tok, self._reads = tok, longest_row(model)
        own = model.run_config or {}
        self.names = classifier.class_names(model.config)
        self.columns: Texts = tuple(own.get("classify.text", ()))  # none where they aren't known
        self._length = min(self._reads, own.get("classify.length", self._reads))  # to which it truncates

    def encode(self, texts: Texts, name: str) -> list[int]:
        """Returns the ids of a text or a pair, truncated as in training; raises InputError if it can't be read."""
        if self.columns and len(texts) != len(self.columns):
            wanted = "one text" if len(self.columns) == 1 else "two texts, parted by a tab"
            raise InputError(f"{name}: holds {len(texts)} texts, the model reads {wanted}.")
        for text in texts:
            refuse_bytes(text, name)
        if not all(text.strip() for text in texts):
            raise InputError(f"{name}: is empty; give it a text.")
        ids = self._tok(*texts, truncation="longest_first", max_length=self._length)["input_ids"]
        if self._tok.pad_token_id in ids:
            raise InputError(f"{name}: holds the padding token {self._tok.pad_token}, which no text can; take it out.")
        return ids

    def logits(self, rows: list[list[int]]) -> np.ndarray:
        """Returns float32 logits [rows, C] of rows of ids."""
        found: dict[int, np.ndarray] = {}
        for chosen, batch, length in batches(rows, self._reads):
            with jax.default_matmul_precision("highest"):  # float32 products on a TPU or GPU too
                logits_BxC = self._logits(self._params, *pad(batch, length, self._tok.pad_token_id))
            found |= zip(chosen, jax.device_get(logits_BxC), strict=False)
        return np.stack([found[index] for index in range(len(rows))])

    def label(self, rows: list[list[int]], top_k: int) -> list[dict[str, Any]]:
        """Returns {"label", "probabilities": {label: probability}} of each row, the likeliest `top_k`; or {"value"}."""
        logits = self.logits(rows).astype(np.float64)
        if not self.names:
            return [{"value": float(value)} for value in logits[:, 0]]
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        results = []
        for row in probs:
            best = np.argsort(-row, kind="stable")[:top_k]
            results.append(
                {"label": self.names[best[0]], "probabilities": {self.names[at]: float(row[at]) for at in best}}
            )
        return results


def run(model: Pretrained, *, texts: list[str], top_k: int, stdin: TextIO, stdout: TextIO) -> None:
    """Classifies the texts given, as a table; or, with none given, the lines of `stdin`, as one line of JSON each.

    A pair is two texts parted by a tab. A line of the pipe may be an object of JSON too, with the columns that the
    model was trained on, or "text" and "text_pair". A line of the output is {"text": ...} or {"text", "text_pair"}, and
    what `Labeller.label` returns.

    Raises:
      InputError: neither texts nor a pipe; a text that can't be read. What came before a bad line is written.
    """
    if not texts and stdin.isatty():
        raise InputError("predict: give texts, or lines of them through a pipe; of a pair with a tab between.")
    if top_k < 1:
        raise InputError(f"--top-k={top_k}: must be from 1 up.")
    labeller = Labeller(model, tokenizer.load(model.tokenizer))
    if texts:
        pairs = [tuple(text.split("\t")) for text in texts]
        rows = [labeller.encode(pair, f"the text {pair[0][:60]!r}") for pair in pairs]
        for text, found in zip(texts, labeller.label(rows, top_k), strict=True):
            show(*_table(text, found), out=stdout)
        return

    def read(line: str, name: str) -> tuple[dict[str, Any], list[int]]:
        given = parse(line, labeller.columns, name)
        return dict(zip(("text", "text_pair"), given, strict=False)), labeller.encode(given, name)

    answer_lines(stdin, stdout, read, lambda rows: labeller.label(rows, top_k) if rows else [])


def parse(line: str, columns: Texts, name: str) -> Texts:
    """Returns the texts of a line: an object of JSON with the columns, or with text and text_pair; or parted by tabs.

    Raises:
      InputError: an object that has neither.
    """
    try:
        content = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        content = None  # a text that begins with a brace
    if not isinstance(content, dict):
        return tuple(line.split("\t"))
    for wanted in (columns, ("text", "text_pair"), ("text",)):
        texts = tuple(content.get(column) for column in wanted)
        if wanted and all(isinstance(text, str) for text in texts):
            return texts
    words = " and ".join(columns or ("text",))
    there = printable(", ".join(content))[:200] or "nothing"
    raise InputError(f"{name}: the object has no texts under {words}; it has {there}.")


def _table(text: str, found: dict[str, Any]) -> list[str]:
    """Returns the text and a line for each label, and an empty line."""
    if "value" in found:
        return [*text.split("\n"), f"  {found['value']:.4f}", ""]
    return [*text.split("\n"), *(f"  {prob:7.2%}  {name}" for name, prob in found["probabilities"].items()), ""]
