"""Fill the masks of texts, as transformers' pipeline("fill-mask") does: the command `predict`.

Dimensions: B rows, L tokens in a row, K masks in a row, T fillings of a mask, A target words, V vocabulary entries.
"""

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerFast

from mlm.data import lines, tokenizer
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.errors import InputError
from mlm.model.module import Params
from mlm.pretrained.load import Pretrained
from mlm.text import is_text, show

# To compile few programs, a batch has a power of two of rows, at most ROWS, padded to a multiple of LENGTHS tokens.
ROWS, LENGTHS = 8, 32
STREAM = 64  # lines of a pipe that are answered together

Filling = dict[str, Any]  # token: its id; token_str: its text; score: its probability


class FillMask:
    """Fills masks with one model, in float32, by a softmax over the whole vocabulary, each mask on its own."""

    def __init__(self, model: Pretrained, tok: PreTrainedTokenizerFast, top_k: int, targets: Sequence[str] = ()):
        """Puts the parameters on the device; a mask gets `top_k` fillings, of `targets` alone if there are any."""
        size = model.config.vocab_size
        if not 1 <= top_k <= size:
            raise InputError(f"--top-k={top_k}: must be from 1 to {size}, the size of the vocabulary.")
        check_vocabulary(model, tok)
        module = model.module
        allowed_A = np.asarray(target_ids(tok, targets), np.int32) if targets else None

        def fillings(
            params: Params, ids_BxL: jax.Array, attention_BxL: jax.Array, positions_BxK: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            probs_BxKxV = jax.nn.softmax(module.logits(params, ids_BxL, attention_BxL, positions_BxK))
            if allowed_A is None:
                return jax.lax.top_k(probs_BxKxV, top_k)
            probs_BxKxT, indices_BxKxT = jax.lax.top_k(probs_BxKxV[..., allowed_A], min(top_k, len(allowed_A)))
            return probs_BxKxT, jnp.asarray(allowed_A)[indices_BxKxT]

        self._fillings = jax.jit(fillings)
        self._params = jax.device_put(model.params)
        self._tok, self._longest = tok, model.longest_row

    def __call__(self, texts: list[str]) -> list[list[list[Filling]]]:
        """Returns, for each text, the fillings of each of its masks, the most probable first."""
        return self.fill([self.encode(text, shortened(text)) for text in texts])

    def encode(self, text: str, name: str) -> list[int]:
        """Returns the ids of a text; raises InputError, which calls it `name`, if it can't be filled."""
        ids, mask = tokenize(self._tok, (text,), name)["input_ids"], self._tok.mask_token
        if self._tok.mask_token_id not in ids:
            raise InputError(f"{name}: has no {mask} in it; write {mask} where a word is to be filled in.")
        if len(ids) > self._longest:
            raise InputError(f"{name}: has {len(ids)} tokens, the model reads at most {self._longest}; shorten it.")
        return ids

    def fill(self, rows: list[list[int]]) -> list[list[list[Filling]]]:
        """Returns the fillings of rows of ids, as `__call__` does."""
        return in_batches(rows, self._longest, self._tok.pad_token_id, self._batch)

    def _batch(self, ids_BxL: np.ndarray, attention_BxL: np.ndarray) -> Iterator[list[list[Filling]]]:
        masks = [np.flatnonzero(ids_L == self._tok.mask_token_id) for ids_L in ids_BxL]
        count = _power_of_two(max(map(len, masks)))  # K
        positions_BxK = np.stack([np.pad(mask, (0, count - len(mask)), mode="edge") for mask in masks])
        fillings = self._fillings(self._params, ids_BxL, attention_BxL, positions_BxK)
        probs_BxKxT, tokens_BxKxT = (values_BxKxT.tolist() for values_BxKxT in jax.device_get(fillings))
        for mask, probs_KxT, tokens_KxT in zip(masks, probs_BxKxT, tokens_BxKxT, strict=True):
            best = [zip(*pair, strict=True) for pair in zip(tokens_KxT, probs_KxT, strict=True)]
            yield [
                [{"token": token, "token_str": self._tok.decode([token]), "score": prob} for token, prob in best_T]
                for best_T in best[: len(mask)]
            ]


def target_ids(tok: PreTrainedTokenizerFast, targets: Sequence[str]) -> list[int]:
    """Returns the ids of the words, without duplicates, as transformers' pipeline chooses them for its `targets`.

    A word that is not in the vocabulary is replaced by its first piece, with a warning. " word" starts a new word.
    """
    entries, ids = tok.get_vocab(), set()
    for word in targets:
        check_utf8(word, f"--targets: {word!r}")
        pieces = [entries[word]] if word in entries else tok(word, add_special_tokens=False)["input_ids"]
        if len(pieces) > 1:
            first = tok.convert_ids_to_tokens(pieces[0])
            print(f"predict: the target {word!r} is {len(pieces)} pieces; using the first, {first!r}.", file=sys.stderr)
        elif not pieces:
            print(f"predict: the target {word!r} has no piece in the vocabulary; ignoring it.", file=sys.stderr)
        ids.update(pieces[:1])
    if not ids:
        raise InputError("--targets: none of the words is in the vocabulary; name others.")
    return sorted(ids)


def run(
    model: Pretrained, *, texts: list[str], top_k: int, stdin: TextIO, stdout: TextIO, targets: Sequence[str] = ()
) -> None:
    """Fills the texts, or the lines of `stdin`, as `answer_texts` does.

    A JSON answer is {"text": ..., "fillings": [[{"token", "token_str", "score"}, ...] for each mask]}.
    """
    filler = FillMask(model, tokenizer.load(model.tokenizer), top_k, targets)

    def read(text: str, name: str) -> tuple[dict[str, Any], list[int]]:
        return {"text": text}, filler.encode(text, name)

    def table(answer: dict[str, Any]) -> Iterator[str]:
        for number, mask in enumerate(answer["fillings"], 1):
            if len(answer["fillings"]) > 1:
                yield f"  mask {number} of {len(answer['fillings'])}"
            yield from (f"  {f['score']:7.2%}  {f['token_str'].strip() or repr(f['token_str'])}" for f in mask)

    answer_texts(texts, stdin, stdout, read, lambda rows: [{"fillings": masks} for masks in filler.fill(rows)], table)


def answer_texts(
    texts: list[str],
    stdin: TextIO,
    stdout: TextIO,
    read: Callable[[str, str], tuple[dict[str, Any], Any]],
    answer: Callable[[list[Any]], list[dict[str, Any]]],
    table: Callable[[dict[str, Any]], Iterator[str]],
) -> None:
    """Answers texts as tables, whose lines `table` returns; without texts the lines of `stdin`, as lines of JSON.

    `read` takes a text and its name in errors, and returns what the answer repeats of it, and the row for `answer`.
    If it refuses a line, those before it are still answered.
    """
    if texts:
        answers = answer([read(text, shortened(text))[1] for text in texts])
        for text, result in zip(texts, answers, strict=True):
            show(*text.split("\n"), *table(result), "", out=stdout)
        return
    if stdin.isatty():
        raise InputError("predict: give texts as arguments, or one per line through a pipe.")
    file = getattr(stdin, "buffer", None) or io.BytesIO(stdin.read().encode())  # in any locale
    waiting: list[tuple[dict[str, Any], Any]] = []

    def flush() -> None:
        answers = answer([row for _, row in waiting]) if waiting else []
        results = [repeated | result for (repeated, _), result in zip(waiting, answers, strict=True)]
        show(*(json.dumps(result, ensure_ascii=False) for result in results), out=stdout)
        waiting.clear()

    try:
        for number, text in enumerate(_lines(file), 1):
            waiting.append(read(text, f"line {number}"))
            if len(waiting) == STREAM:
                flush()
    except InputError:
        flush()
        raise
    flush()


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Yields the lines of standard input; bytes that are not UTF-8 are halves of surrogate pairs, see `check_utf8`."""
    try:
        for line in lines.read(file, "standard input"):
            yield line.decode(errors="surrogateescape").rstrip("\r\n")
    except ValueError as error:
        raise InputError(f"{error}.") from error


def tokenize(tok: PreTrainedTokenizerFast, texts: Sequence[str], name: str, **settings: Any) -> BatchEncoding:
    """Tokenizes a text or a pair; raises InputError, which calls it `name`, for one that no model reads."""
    for text in texts:
        check_utf8(text, name)
    if not all(text.strip() for text in texts):
        raise InputError(f"{name}: is empty; give it a text.")
    encoded = tok(*texts, **settings)
    if tok.pad_token_id in encoded["input_ids"]:
        raise InputError(f"{name}: holds the padding token {tok.pad_token}, which no text may; remove it.")
    return encoded


def check_utf8(text: str, name: str) -> None:
    """Raises InputError if the text came from bytes that are not UTF-8, which no tokenizer can read."""
    if not is_text(text):
        raise InputError(f"{name}: is not UTF-8; convert it first.")


def in_batches(
    rows: list[list[int]], longest: int, pad_id: int, compute: Callable[[np.ndarray, np.ndarray], Iterable[Any]]
) -> list:
    """Returns the results of `compute(ids_BxL, attention_BxL)` for all rows of ids, from batches of few shapes."""
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(rows):
        by_length.setdefault(min(-(-len(ids) // LENGTHS) * LENGTHS, longest), []).append(index)
    results: list[Any] = [None] * len(rows)
    for length, indices in by_length.items():
        for start in range(0, len(indices), ROWS):
            chosen = indices[start : start + ROWS]
            batch = [rows[index] for index in chosen]
            batch += batch[:1] * (_power_of_two(len(batch)) - len(batch))  # copies, whose results nobody reads
            with jax.default_matmul_precision("highest"):  # float32 products on a TPU or GPU too
                computed = list(compute(*pad(batch, length, pad_id)))
            for index, result in zip(chosen, computed, strict=False):
                results[index] = result
    return results


def pad(rows: list[list[int]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids_BxL and attention_BxL, int32, of rows padded to `length`."""
    ids_BxL = np.array([ids + [pad_id] * (length - len(ids)) for ids in rows], np.int32)
    attention_BxL = np.arange(length) < np.array([len(ids) for ids in rows])[:, None]
    return ids_BxL, attention_BxL.astype(np.int32)


def check_vocabulary(model: Pretrained, tok: PreTrainedTokenizerFast, *, exact: bool = False) -> None:
    """Raises InputError if the tokenizer has more entries than the model; `exact`: or fewer."""
    size, needed = model.config.vocab_size, vocabulary_size(tok.backend_tokenizer)
    if needed > size or (exact and needed < size):
        sizes = f"has {size} vocabulary entries, its tokenizer {model.tokenizer} has {needed}"
        raise InputError(f"{model.source}: {sizes}; use the tokenizer that the model was trained with.")


def shortened(text: str) -> str:
    """Returns the name of a text in an error."""
    return f"the text {text if len(text) <= 60 else text[:57] + '...'!r}"


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
