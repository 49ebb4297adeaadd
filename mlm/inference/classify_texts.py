"""Classifies texts, pairs of texts or words, or predicts a number for each text.

Dimensions: L tokens in a row, C classes, W words of a text.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerFast

from mlm.data import examples, lines
from mlm.errors import InputError
from mlm.inference.answers import tokenize
from mlm.inference.forward import make_forward
from mlm.model import classifier
from mlm.pretrained.load import Pretrained
from mlm.text import printable

Texts = tuple[str, ...]  # one, or a pair
COUNTS = {1: "one text", 2: "two texts, separated by a tab"}  # what a model reads


class TextClassifier:
    """Classifies with one model, in float32."""

    def __init__(self, model: Pretrained, tok: PreTrainedTokenizerFast, top_k: int):
        """Puts the parameters on the device; a text gets the `top_k` most probable classes."""
        if top_k < 1:
            raise InputError(f"--top-k={top_k}: must be at least 1.")
        self._logits = make_forward(model)
        self._tok = tok
        self._top_k = top_k
        self._length = model.longest_row
        self._columns: Texts = ()  # not known of a folder
        if model.run_config is not None:
            self._length = min(self._length, model.run_config.classify.length)
            self._columns = model.run_config.classify.text
        self._names = classifier.class_names(model.config)
        self._of_tokens = classifier.kind(model.config) == "tokens"

    def read(self, text: str, name: str, *, piped: bool) -> tuple[dict[str, Any], Any]:
        """Returns {"text"}, of a pair "text_pair" too, and its ids as in training; of words (words, ids, first pieces).

        A tab separates the two texts of a pair; what is `piped` may be a JSON object.
        """
        parts = parse(text, self._columns, name) if piped else tuple(text.split("\t"))
        if not self._of_tokens:
            repeated = dict(zip(("text", "text_pair"), parts, strict=False))
            return repeated, self._encode(parts, name)["input_ids"]
        joined = " ".join(parts)
        words = parts if isinstance(parts, list) else lines.split_words(joined)
        if not all(words):
            raise InputError(f"{name}: has an empty word; remove it.")
        encoded = self._encode((" ".join(words),), name)
        first_W = examples.first_pieces(encoded.encodings[0], words)
        return {"text": joined}, (words, encoded["input_ids"], first_W)

    def _encode(self, texts: Texts, name: str) -> BatchEncoding:
        counts = [len(self._columns)] if self._columns else [*COUNTS]
        if len(texts) not in counts:
            expected = " or ".join(COUNTS[count] for count in counts)
            raise InputError(f"{name}: the model reads {expected}, and this has {len(texts)}.")
        return tokenize(self._tok, texts, name, truncation="longest_first", max_length=self._length)

    def answer(self, rows: list[Any]) -> list[dict[str, Any]]:
        """Returns {"label", "probabilities": {label: probability}}, {"value"} or {"words"} of each row of `read`."""
        if self._of_tokens:
            logits = self._logits([ids for _, ids, _ in rows])
            return [{"words": self._words(*pair)} for pair in zip(logits, rows, strict=True)]
        logits = self._logits(rows)
        if not self._names:
            return [{"value": float(logits_C[0])} for logits_C in logits]
        answers = []
        for probs_C in map(_probabilities, logits):
            best = np.argsort(-probs_C, kind="stable")[: self._top_k]
            shown = {self._names[index]: float(probs_C[index]) for index in best}
            answers.append({"label": self._names[best[0]], "probabilities": shown})
        return answers

    def _words(
        self, logits_LxC: np.ndarray, row: tuple[list[str], list[int], np.ndarray]
    ) -> list[dict[str, Any]]:
        """Returns {"word", "label", "probability"} of each word, by its first piece; "O" of one that was cut off."""
        (words, _, first_W) = row
        probs_LxC = _probabilities(logits_LxC)
        answers = []
        for word, piece in zip(words, first_W, strict=True):
            label = "O"
            prob = None
            if piece >= 0:
                label = self._names[int(probs_LxC[piece].argmax())]
                prob = float(probs_LxC[piece].max())
            answers.append({"word": word, "label": label, "probability": prob})
        return answers

    def table(self, answer: dict[str, Any]) -> Iterator[str]:
        """Yields a line for each number, word or class."""
        if "value" in answer:
            yield f"  {answer['value']:.4f}"
        for word in answer.get("words", ()):
            yield f"  {word['label']:12} {word['word']}"
        for label, prob in answer.get("probabilities", {}).items():
            yield f"  {prob:7.2%}  {label}"


def _probabilities(logits: np.ndarray) -> np.ndarray:
    from scipy.special import softmax  # takes a third of a second

    return softmax(logits.astype(np.float64), axis=-1)


def parse(text: str, columns: Texts, name: str) -> Texts | list[str]:
    """Returns the texts of an input line: separated by a tab, or the columns (or text, text_pair) of a JSON object.

    A column of words, as rows with token labels have, is returned as a list.
    """
    try:
        content = lines.json_object(text)
    except ValueError:  # a text, which may begin with a brace
        return tuple(text.split("\t"))
    words = content.get(columns[0]) if columns else None
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return words
    for keys in filter(None, (columns, ("text", "text_pair"), ("text",))):
        texts = tuple(content.get(key) for key in keys)
        if all(isinstance(text, str) for text in texts):
            return texts
    expected = " and ".join(columns or ("text",))
    keys = printable(", ".join(content))[:200]
    raise InputError(f"{name}: the JSON object has no text under {expected}; its keys: {keys}.")
