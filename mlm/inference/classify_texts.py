"""Classify texts, pairs of texts or words, or predict a number for each text: the command `predict` of a classifier.

Dimensions: B rows, L tokens in a row, C classes, W words of a text.
"""

import json
from collections.abc import Iterator
from typing import Any, TextIO

import jax
import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerFast

from mlm.data import examples, lines, tokenizer
from mlm.errors import InputError
from mlm.inference.fill_mask import answer_texts, in_batches, tokenize
from mlm.model import classifier
from mlm.pretrained.load import Pretrained
from mlm.text import printable

Texts = tuple[str, ...]  # one, or a pair


class TextClassifier:
    """Classifies with one model, in float32; compiles once for each padded length and power of two of rows."""

    def __init__(self, model: Pretrained, tok: PreTrainedTokenizerFast):
        """Puts the parameters on the device."""
        self._logits = jax.jit(model.module.logits)
        self._params = jax.device_put(model.params)
        self._tok, self._longest = tok, model.longest_row
        run = model.run_config
        self.names = classifier.class_names(model.config)
        self.of_tokens = classifier.kind(model.config) == "tokens"
        self.columns: Texts = () if run is None else run.classify.text  # empty if unknown
        self._truncated = self._longest if run is None else min(self._longest, run.classify.length)

    def encode(self, texts: Texts, name: str) -> BatchEncoding:
        """Returns a text or a pair tokenized and truncated as in training; errors call it `name`."""
        if self.columns and len(texts) != len(self.columns):
            expected = "one text" if len(self.columns) == 1 else "two texts, separated by a tab"
            raise InputError(f"{name}: the model reads {expected}, and this has {len(texts)}.")
        return tokenize(self._tok, texts, name, truncation="longest_first", max_length=self._truncated)

    def encode_words(self, words: list[str], name: str) -> tuple[list[str], list[int], np.ndarray]:
        """Returns the words of a text, its ids as in training, and the first piece of each word (-1: cut off)."""
        if not all(words):
            raise InputError(f"{name}: has an empty word; remove it.")
        encoded = self.encode((" ".join(words),), name)
        return words, encoded["input_ids"], examples.first_pieces(encoded.encodings[0], words)

    def logits(self, rows: list[list[int]]) -> list[np.ndarray]:
        """Returns float32 logits of rows of ids: [C] for each row, or [L, C] for token labels."""

        def compute(ids_BxL: np.ndarray, attention_BxL: np.ndarray) -> np.ndarray:
            return jax.device_get(self._logits(self._params, ids_BxL, attention_BxL))

        logits = in_batches(rows, self._longest, self._tok.pad_token_id, compute)
        if not self.of_tokens:
            return logits
        return [logits_LxC[: len(ids)] for logits_LxC, ids in zip(logits, rows, strict=True)]

    def classify(self, rows: list[list[int]], top_k: int) -> list[dict[str, Any]]:
        """Returns {"label", "probabilities": {label: probability}} of each row, the `top_k` best; or {"value"}."""
        logits = self.logits(rows)
        if not self.names:
            return [{"value": float(logits_C[0])} for logits_C in logits]
        results = []
        for probs_C in map(_softmax, logits):
            best = np.argsort(-probs_C, kind="stable")[:top_k]
            shown = {self.names[index]: float(probs_C[index]) for index in best}
            results.append({"label": self.names[best[0]], "probabilities": shown})
        return results

    def label_tokens(self, rows: list[list[int]]) -> list[list[dict[str, Any]]]:
        """Returns {"label", "probability"} of each token of each row."""
        return [
            [{"label": self.names[int(probs_C.argmax())], "probability": float(probs_C.max())} for probs_C in probs_LxC]
            for probs_LxC in map(_softmax, self.logits(rows))
        ]

    def label_words(self, rows: list[tuple[list[str], list[int], np.ndarray]]) -> list[dict[str, Any]]:
        """Returns {"words": [{"word", "label", "probability"}, ...]} of texts; a word that was cut off has "O"."""
        results, cut = [], {"label": "O", "probability": None}
        for tokens, (words, _, first_W) in zip(self.label_tokens([ids for _, ids, _ in rows]), rows, strict=True):
            labels = [cut if piece < 0 else tokens[piece] for piece in first_W]
            results.append({"words": [{"word": word} | label for word, label in zip(words, labels, strict=True)]})
        return results


def _softmax(logits: np.ndarray) -> np.ndarray:
    probs = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return probs / probs.sum(axis=-1, keepdims=True)


def run(model: Pretrained, *, texts: list[str], top_k: int, stdin: TextIO, stdout: TextIO) -> None:
    """Classifies the texts, or the lines of `stdin`, as `answer_texts` does; a tab separates the two texts of a pair.

    A JSON answer repeats "text" (and "text_pair") beside the result of `TextClassifier.classify` or `label_words`.
    """
    if top_k < 1:
        raise InputError(f"--top-k={top_k}: must be at least 1.")
    predictor = TextClassifier(model, tokenizer.load(model.tokenizer))

    def read(text: str, name: str) -> tuple[dict[str, Any], Any]:
        parts = tuple(text.split("\t")) if texts else parse(text, predictor.columns, name)
        if predictor.of_tokens:
            words = parts if isinstance(parts, list) else lines.split_words(" ".join(parts))
            return {"text": " ".join(parts)}, predictor.encode_words(words, name)
        return dict(zip(("text", "text_pair"), parts, strict=False)), predictor.encode(parts, name)["input_ids"]

    def table(answer: dict[str, Any]) -> Iterator[str]:
        if "value" in answer:
            yield f"  {answer['value']:.4f}"
        yield from (f"  {word['label']:12} {word['word']}" for word in answer.get("words", ()))
        yield from (f"  {prob:7.2%}  {label}" for label, prob in answer.get("probabilities", {}).items())

    answer = predictor.label_words if predictor.of_tokens else lambda rows: predictor.classify(rows, top_k)
    answer_texts(texts, stdin, stdout, read, answer, table)


def parse(text: str, columns: Texts, name: str) -> Texts | list[str]:
    """Returns the texts of an input line: separated by a tab, or the columns (or text, text_pair) of a JSON object.

    A column of words, as rows with token labels have, is returned as a list.
    """
    try:
        content = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        content = None  # a text that begins with a brace
    if not isinstance(content, dict):
        return tuple(text.split("\t"))
    words = content.get(columns[0]) if columns else None
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return words
    for keys in filter(None, (columns, ("text", "text_pair"), ("text",))):
        texts = tuple(content.get(key) for key in keys)
        if all(isinstance(text, str) for text in texts):
            return texts
    expected, keys = " and ".join(columns or ("text",)), printable(", ".join(content))[:200] or "none"
    raise InputError(f"{name}: the JSON object has no text under {expected}; its keys: {keys}.")
