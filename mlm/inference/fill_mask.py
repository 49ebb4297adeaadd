"""Fills the masks of texts, as transformers' pipeline("fill-mask") does.

Dimensions: K masks in a row, V vocabulary entries, A of them that are allowed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from mlm.errors import InputError
from mlm.inference.answers import check_utf8, shortened, tokenize
from mlm.inference.forward import make_forward
from mlm.pretrained.load import Pretrained
from mlm.text import say

Filling = dict[str, Any]  # token: its id; token_str: its text; score: its probability


class FillMask:
    """Fills masks with one model, in float32, by a softmax over the whole vocabulary, each mask on its own."""

    def __init__(
        self,
        model: Pretrained,
        tok: PreTrainedTokenizerFast,
        top_k: int,
        targets: Sequence[str] = (),
    ):
        """Puts the parameters on the device; a mask gets `top_k` fillings, of `targets` alone if there are any."""
        size = model.config.vocab_size
        if not 1 <= top_k <= size:
            raise InputError(
                f"--top-k={top_k}: must be from 1 to {size}, the size of the vocabulary."
            )
        self._allowed_A = np.array(target_ids(tok, targets) if targets else range(size))
        self._tok = tok
        self._top_k = top_k
        self._longest = model.longest_row
        self._probs = make_forward(model, jax.nn.softmax)

    def __call__(self, texts: list[str]) -> list[list[list[Filling]]]:
        """Returns, for each text, the fillings of each of its masks, the most probable first."""
        answers = self.answer([self.read(text, shortened(text))[1] for text in texts])
        return [answer["fillings"] for answer in answers]

    def read(
        self, text: str, name: str, *, piped: bool = False
    ) -> tuple[dict[str, Any], list[int]]:
        """Returns {"text"} and the ids of a text; raises InputError, which calls it `name`, if it can't be filled."""
        ids = tokenize(self._tok, (text,), name)["input_ids"]
        mask = self._tok.mask_token
        if self._tok.mask_token_id not in ids:
            raise InputError(
                f"{name}: has no {mask} in it; write {mask} where a word is to be filled in."
            )
        if len(ids) > self._longest:
            raise InputError(
                f"{name}: has {len(ids)} tokens, the model reads at most {self._longest}; shorten it."
            )
        return {"text": text}, ids

    def answer(self, rows: list[list[int]]) -> list[dict[str, Any]]:
        """Returns {"fillings": [[{"token", "token_str", "score"}, ...] for each mask]} of rows of ids."""
        mask_id = self._tok.mask_token_id
        masks = [[place for place, token in enumerate(ids) if token == mask_id] for ids in rows]
        outputs = self._probs(rows, masks)
        return [{"fillings": list(map(self._fillings, probs_KxV))} for probs_KxV in outputs]

    def _fillings(self, probs_V: np.ndarray) -> list[Filling]:
        order_A = np.argsort(-probs_V[self._allowed_A], kind="stable")
        return [
            {"token": id_, "token_str": self._tok.decode([id_]), "score": float(probs_V[id_])}
            for id_ in self._allowed_A[order_A[: self._top_k]].tolist()
        ]

    def table(self, answer: dict[str, Any]) -> Iterator[str]:
        """Yields a line for each filling."""
        masks = answer["fillings"]
        for number, fillings in enumerate(masks, 1):
            if len(masks) > 1:
                yield f"  mask {number} of {len(masks)}"
            for filling in fillings:
                word = filling["token_str"]
                yield f"  {filling['score']:7.2%}  {word.strip() or repr(word)}"


def target_ids(tok: PreTrainedTokenizerFast, targets: Sequence[str]) -> list[int]:
    """Returns the ids of the words, without duplicates, as transformers' pipeline chooses them for its `targets`.

    A word that is not in the vocabulary is replaced by its first piece, with a warning. " word"
    starts a new word.
    """
    entries = tok.get_vocab()
    ids = set()
    for word in targets:
        check_utf8(word, f"--targets: {word!r}")
        pieces = [entries[word]] if word in entries else tok.encode(word, add_special_tokens=False)
        if len(pieces) != 1:
            first = tok.convert_ids_to_tokens(pieces[:1])
            say(
                f"predict: the target {word!r} is {len(pieces)} pieces; using the first alone, {first}."
            )
        ids.update(pieces[:1])
    if not ids:
        raise InputError("--targets: none of the words is in the vocabulary; name others.")
    return sorted(ids)
