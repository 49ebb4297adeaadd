"""The command `predict`: fill the masks of texts, as transformers' pipeline("fill-mask") does.

Dimensions: B rows, L tokens in a row, K masks in a row, T fillings of a mask, A target words, V entries.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model.roberta import Params
from mlm.pretrained.load import Pretrained
from mlm.text import is_text, show

# Few shapes, so that the model is compiled few times: a batch has a power of two of rows, up to
ROWS = 8
LENGTHS = 32  # and rows are padded up to a multiple of this.
STREAM = 64  # lines of a pipe that are filled at a time

Filling = dict[str, Any]  # token: its id; token_str: its text; score: its probability


class FillMask:
    """Fills masks with one model, in float32; it is compiled once for every padded length."""

    def __init__(self, model: Pretrained, tok: PreTrainedTokenizerFast, top_k: int, targets: Sequence[str] = ()):
        """Puts the parameters on the device.

        Args:
          top_k: T, fillings of each mask; of fewer targets, all.
          targets: words to choose from, see `target_ids`; none for the whole vocabulary.

        Raises:
          InputError: the model has no such number of entries, or fewer entries than the tokenizer; no target is left.
        """
        size = model.config.vocab_size
        if not 1 <= top_k <= size:
            raise InputError(f"--top-k={top_k}: must be from 1 to {size}, the size of the vocabulary.")
        if len(tok) > size:
            raise InputError(
                f"{model.source}: has {size} vocabulary entries, its tokenizer {model.tokenizer} has {len(tok)}; "
                "use the tokenizer that the model was trained with."
            )
        network = model.network
        allowed_A = np.asarray(target_ids(tok, targets), np.int32) if targets else None

        def fillings(
            params: Params, ids_BxL: jax.Array, attention_BxL: jax.Array, positions_BxK: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits_BxKxV = network.masked_logits(params, ids_BxL, attention_BxL, positions_BxK)
            probs_BxKxV = jax.nn.softmax(logits_BxKxV)
            if allowed_A is None:
                return jax.lax.top_k(probs_BxKxV, top_k)
            probs_BxKxT, indices_BxKxT = jax.lax.top_k(probs_BxKxV[..., allowed_A], min(top_k, len(allowed_A)))
            return probs_BxKxT, jnp.asarray(allowed_A)[indices_BxKxT]

        self._fillings = jax.jit(fillings)
        self._params = jax.device_put(model.params)
        self._tok = tok
        self._longest = longest_row(model)

    def __call__(self, texts: list[str]) -> list[list[list[Filling]]]:
        """Returns the fillings of each mask of each text; raises InputError as `encode` does."""
        return self.fill([self.encode(text, f"the text {_shortened(text)}") for text in texts])

    def encode(self, text: str, name: str) -> list[int]:
        """Returns the ids of a text.

        Args:
          text: with at least one mask token.
          name: what to call it in an error.

        Raises:
          InputError: there is no mask in it, it is too long for the model, or it holds the padding token.
        """
        refuse_bytes(text, name)
        ids = self._tok(text)["input_ids"]
        mask = self._tok.mask_token
        if self._tok.mask_token_id not in ids:
            what = f"has no {mask} in it" if text.strip() else "is empty"
            raise InputError(f"{name}: {what}; write {mask} where a word is to be filled in.")
        if len(ids) > self._longest:
            raise InputError(f"{name}: has {len(ids)} tokens, the model reads {self._longest} at most; shorten it.")
        if self._tok.pad_token_id in ids:
            raise InputError(f"{name}: holds the padding token {self._tok.pad_token}, which no text can; take it out.")
        return ids

    def fill(self, rows: list[list[int]]) -> list[list[list[Filling]]]:
        """Returns, for each row of ids, a list of T fillings for each of its masks, the likeliest first."""
        results: list[list[list[Filling]]] = [[] for _ in rows]
        for chosen, batch, length in batches(rows, self._longest):
            for index, fillings in zip(chosen, self._batch(batch, length), strict=False):
                results[index] = fillings
        return results

    def _batch(self, rows: list[list[int]], length: int) -> Iterator[list[list[Filling]]]:
        ids_BxL, attention_BxL = pad(rows, length, self._tok.pad_token_id)
        masks = [np.flatnonzero(ids_L == self._tok.mask_token_id) for ids_L in ids_BxL]
        count = _power_of_two(max(map(len, masks)))  # K
        positions_BxK = np.stack([np.pad(mask, (0, count - len(mask)), mode="edge") for mask in masks])
        with jax.default_matmul_precision("highest"):  # float32 products on a TPU or GPU too
            found = self._fillings(self._params, ids_BxL, attention_BxL, positions_BxK)
        scores_BxKxT, tokens_BxKxT = (values.tolist() for values in jax.device_get(found))
        for row in range(len(rows)):
            yield [
                [
                    {"token": token, "token_str": self._tok.decode([token]), "score": score}
                    for token, score in zip(tokens_BxKxT[row][index], scores_BxKxT[row][index], strict=True)
                ]
                for index in range(len(masks[row]))
            ]


def fill(model: Pretrained, tok: PreTrainedTokenizerFast, texts: list[str], top_k: int) -> list[list[list[Filling]]]:
    """Returns, for each text, a list of `top_k` fillings for each of its masks, the likeliest first.

    Tokens, their texts and their scores are those of transformers' pipeline: the softmax over the whole vocabulary,
    each mask on its own.

    Raises:
      InputError: a text without a mask, or too long; the model and the tokenizer do not fit together.
    """
    return FillMask(model, tok, top_k)(texts)


def target_ids(tok: PreTrainedTokenizerFast, targets: Sequence[str]) -> list[int]:
    """Returns the token of each word, each once, as transformers' pipeline chooses them for its `targets`.

    A word that is an entry of the vocabulary stands for that entry; of any other, its first piece does, which is said
    on stderr. " word", with its space, is the word that follows another; "word" may be a piece inside of one.

    Raises:
      InputError: no word has any piece.
    """
    entries, ids = tok.get_vocab(), []
    for word in targets:
        refuse_bytes(word, f"--targets: {word!r}")
        pieces = [entries[word]] if word in entries else tok(word, add_special_tokens=False)["input_ids"]
        if not pieces:
            print(f"predict: the target {word!r} has no piece in the vocabulary; it is left out.", file=sys.stderr)
            continue
        if len(pieces) > 1:
            first = tok.convert_ids_to_tokens(pieces[0])
            print(
                f"predict: the target {word!r} is {len(pieces)} pieces; its first, {first!r}, stands for it.",
                file=sys.stderr,
            )
        ids.append(pieces[0])
    if not ids:
        raise InputError("--targets: none of the words is in the vocabulary; name others.")
    return sorted(set(ids))


def run(
    model: Pretrained,
    *,
    texts: list[str] | None,
    top_k: int,
    stdin: TextIO,
    stdout: TextIO,
    targets: Sequence[str] = (),
) -> None:
    """Fills the texts given, as a table; or, with none given, the lines of `stdin`, as one line of JSON each.

    A line of JSON is {"text": ..., "fillings": [[{"token", "token_str", "score"}, ...] for each mask]}.

    Raises:
      InputError: of `FillMask`; neither texts nor a pipe; a line of the pipe that is not UTF-8. What came before a bad
        line is written.
    """
    if not texts and stdin.isatty():
        raise InputError("predict: give texts, each with a mask token, or lines of them through a pipe.")
    tok = tokenizer.load(model.tokenizer)
    filler = FillMask(model, tok, top_k, targets)
    if texts:
        for text, fillings in zip(texts, filler(texts), strict=True):
            show(*_table(text, fillings), out=stdout)
        return

    def answer(rows: list[list[int]]) -> list[dict[str, Any]]:
        return [{"fillings": fillings} for fillings in filler.fill(rows)]

    answer_lines(stdin, stdout, lambda line, name: ({"text": line}, filler.encode(line, name)), answer)


def answer_lines(
    stdin: TextIO,
    stdout: TextIO,
    read: Callable[[str, str], tuple[dict[str, Any], list[int]]],
    answer: Callable[[list[list[int]]], list[dict[str, Any]]],
) -> None:
    """Answers each line of a pipe with a line of JSON, STREAM lines at a time.

    Args:
      stdin, stdout: the pipes.
      read: (line, its name for a person) -> (what of it stands in the answer, its ids); raises InputError.
      answer: rows of ids -> the rest of their answers.

    Raises:
      InputError: of `read`. What came before a bad line is written.
    """
    waiting: list[tuple[dict[str, Any], list[int]]] = []
    if isinstance(stdin, io.TextIOWrapper):  # whatever the locale is; what is not UTF-8 is refused with its line
        stdin.reconfigure(encoding="utf-8", errors="surrogateescape")

    def flush() -> None:
        found = answer([ids for _, ids in waiting])
        answers = (given | each for (given, _), each in zip(waiting, found, strict=True))
        show(*(json.dumps(each, ensure_ascii=False) for each in answers), out=stdout)
        waiting.clear()

    try:
        for number, line in enumerate(stdin, 1):
            waiting.append(read(line.rstrip("\r\n"), f"line {number}"))
            if len(waiting) == STREAM:
                flush()
    except InputError:
        flush()
        raise
    flush()


def refuse_bytes(text: str, name: str) -> None:
    """Raises InputError if the text was not UTF-8 where it came from: no tokenizer can read it."""
    if not is_text(text):
        raise InputError(f"{name}: is not UTF-8; convert it first.")


def batches(rows: list[list[int]], longest: int) -> Iterator[tuple[list[int], list[list[int]], int]]:
    """Yields (indices of some rows, these rows, the length to pad them to): few shapes, however many rows there are.

    A batch is filled up with copies of its first row to a power of two, so it may have more rows than indices.
    """
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(rows):
        by_length.setdefault(min(-(-len(ids) // LENGTHS) * LENGTHS, longest), []).append(index)
    for length, indices in by_length.items():
        for start in range(0, len(indices), ROWS):
            chosen = indices[start : start + ROWS]
            batch = [rows[index] for index in chosen]
            yield chosen, batch + batch[:1] * (_power_of_two(len(batch)) - len(batch)), length


def longest_row(model: Pretrained) -> int:
    """Returns the number of tokens, special ones included, that the model can read: RoBERTa counts from pad id + 1."""
    return model.config.max_position_embeddings - model.config.pad_token_id - 1


def pad(rows: list[list[int]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids_BxL and attention_BxL, int32, of rows padded to `length`."""
    ids_BxL = np.full((len(rows), length), pad_id, np.int32)
    attention_BxL = np.zeros((len(rows), length), np.int32)
    for row, ids in enumerate(rows):
        ids_BxL[row, : len(ids)] = ids
        attention_BxL[row, : len(ids)] = 1
    return ids_BxL, attention_BxL


def _table(text: str, fillings: list[list[Filling]]) -> list[str]:
    """Returns the text and a line for each filling; the masks one after the other, and an empty line."""
    lines = text.split("\n")
    for number, mask in enumerate(fillings, 1):
        if len(fillings) > 1:
            lines.append(f"  mask {number} of {len(fillings)}")
        lines.extend(f"  {f['score']:7.2%}  {f['token_str'].strip() or repr(f['token_str'])}" for f in mask)
    return [*lines, ""]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
