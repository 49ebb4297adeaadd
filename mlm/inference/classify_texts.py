"""Classify texts or pairs of texts, or predict a number for each: the command `predict` of a classifier.

Dimensions: B rows, L tokens in a row, C classes.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any, TextIO

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.inference.fill_mask import answer_texts, check_utf8, in_batches, longest_row
from mlm.model import classifier
from mlm.pretrained.load import Pretrained
from mlm.text import printable

Texts = tuple[str, ...]  # one, or a pair


class TextClassifier:
    """Classifies with one model, in float32; compiles once for each padded length and power of two of rows."""

    def __init__(self, model: Pretrained, tok: PreTrainedTokenizerFast):
        """Puts the parameters on the device."""
        self._logits = jax.jit(functools.partial(classifier.logits, model.network))
        self._params = jax.device_put(model.params)
        self._tok, self._longest = tok, longest_row(model)
        run = model.run_config or {}
        self.names = classifier.class_names(model.config)
        self.columns: Texts = tuple(run.get("classify.text", ()))  # empty if unknown
        self._truncated = min(self._longest, run.get("classify.length", self._longest))

    def encode(self, texts: Texts, name: str) -> list[int]:
        """Returns the ids of a text or a pair, truncated as in training; errors call it `name`."""
        if self.columns and len(texts) != len(self.columns):
            wanted = "one text" if len(self.columns) == 1 else "two texts, separated by a tab"
            raise InputError(f"{name}: the model reads {wanted}, this has {len(texts)}.")
        for text in texts:
            check_utf8(text, name)
        if not all(text.strip() for text in texts):
            raise InputError(f"{name}: is empty; give it a text.")
        ids = self._tok(*texts, truncation="longest_first", max_length=self._truncated)["input_ids"]
        if self._tok.pad_token_id in ids:
            raise InputError(f"{name}: holds the padding token {self._tok.pad_token}, which no text can; take it out.")
        return ids

    def logits(self, rows: list[list[int]]) -> np.ndarray:
        """Returns float32 logits [rows, C] of rows of ids."""

        def compute(*batch: np.ndarray) -> np.ndarray:
            return jax.device_get(self._logits(self._params, *batch))

        return np.stack(in_batches(rows, self._longest, self._tok.pad_token_id, compute))

    def classify(self, rows: list[list[int]], top_k: int) -> list[dict[str, Any]]:
        """Returns {"label", "probabilities": {label: probability}} of each row, the `top_k` best; or {"value"}."""
        logits = self.logits(rows).astype(np.float64)
        if not self.names:
            return [{"value": float(value)} for value in logits[:, 0]]
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        results = []
        for probs_C in probs:
            best = np.argsort(-probs_C, kind="stable")[:top_k]
            shown = {self.names[index]: float(probs_C[index]) for index in best}
            results.append({"label": self.names[best[0]], "probabilities": shown})
        return results


def run(model: Pretrained, *, texts: list[str], top_k: int, stdin: TextIO, stdout: TextIO) -> None:
    """Classifies the texts, or the lines of `stdin`, see `answer_texts`; a tab separates the two texts of a pair.

    In JSON, an answer is {"text"} or {"text", "text_pair"}, and what `TextClassifier.classify` returns.
    """
    if top_k < 1:
        raise InputError(f"--top-k={top_k}: must be at least 1.")
    predictor = TextClassifier(model, tokenizer.load(model.tokenizer))

    def read(text: str, name: str) -> tuple[dict[str, Any], list[int]]:
        given = tuple(text.split("\t")) if texts else parse(text, predictor.columns, name)
        return dict(zip(("text", "text_pair"), given, strict=False)), predictor.encode(given, name)

    def table(answer: dict[str, Any]) -> Iterator[str]:
        if "value" in answer:
            yield f"  {answer['value']:.4f}"
        yield from (f"  {prob:7.2%}  {label}" for label, prob in answer.get("probabilities", {}).items())

    answer_texts(texts, stdin, stdout, read, lambda rows: predictor.classify(rows, top_k), table)


def parse(line: str, columns: Texts, name: str) -> Texts:
    """Returns the texts of a line: separated by a tab, or a JSON object with the columns, or text and text_pair."""
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
    wanted, found = " and ".join(columns or ("text",)), printable(", ".join(content))[:200] or "nothing"
    raise InputError(f"{name}: the object has no texts under {wanted}; it has {found}.")
