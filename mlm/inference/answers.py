"""The command `predict`: texts, or the lines of a pipe, and what a model answers to them."""

import io
import json
from collections.abc import Iterator, Sequence
from typing import IO, Any, TextIO

from transformers import BatchEncoding, PreTrainedTokenizerFast

from mlm.data import lines
from mlm.errors import InputError
from mlm.text import is_text, show

STREAM = 64  # lines of a pipe that are answered together


def answer_texts(predictor: Any, texts: list[str], stdin: TextIO, stdout: TextIO) -> None:
    """Answers texts as tables; without texts the lines of `stdin`, as lines of JSON.

    If a line is refused, those before it are still answered.

    Args:
      predictor: a FillMask or TextClassifier. `read` returns what an answer repeats of a text, and
        the text's row, `answer` the answers to rows, `table` an answer as lines.
    """
    if texts:
        rows = [predictor.read(text, shortened(text), piped=False)[1] for text in texts]
        for text, answer in zip(texts, predictor.answer(rows), strict=True):
            show(*text.split("\n"), *predictor.table(answer), "", out=stdout)
        return
    if stdin.isatty():
        raise InputError("predict: give texts as arguments, or one per line through a pipe.")
    file = getattr(stdin, "buffer", None) or io.BytesIO(stdin.read().encode())  # in any locale
    waiting: list[tuple[dict[str, Any], Any]] = []

    def flush() -> None:
        answers = predictor.answer([row for _, row in waiting]) if waiting else []
        for (repeated, _), answer in zip(waiting, answers, strict=True):
            show(json.dumps(repeated | answer, ensure_ascii=False), out=stdout)
        waiting.clear()

    try:
        for number, text in enumerate(_lines(file), 1):
            waiting.append(predictor.read(text, f"line {number}", piped=True))
            if len(waiting) == STREAM:
                flush()
    except InputError:
        flush()
        raise
    flush()


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Yields the lines of standard input; bytes that are not UTF-8 are halves of surrogate pairs, see `check_utf8`."""
    try:
        for line in lines.read_lines(file):
            yield line.decode(errors="surrogateescape").rstrip("\r\n")
    except ValueError as error:
        raise InputError(f"standard input {error}.") from error


def tokenize(
    tok: PreTrainedTokenizerFast, texts: Sequence[str], name: str, **settings: Any
) -> BatchEncoding:
    """Tokenizes a text or a pair; raises InputError, which calls it `name`, for one that no model reads."""
    for text in texts:
        check_utf8(text, name)
    if not any(text.strip() for text in texts):
        raise InputError(f"{name}: is empty; give it a text.")
    encoded = tok(*texts, **settings)
    # RoBERTa's positions in transformers depend on this id, ours on the attention mask
    if tok.pad_token_id in encoded["input_ids"]:
        raise InputError(
            f"{name}: holds the padding token {tok.pad_token}, which no text may; remove it."
        )
    return encoded


def check_utf8(text: str, name: str) -> None:
    """Raises InputError if the text came from bytes that are not UTF-8, which no tokenizer can read."""
    if not is_text(text):
        raise InputError(f"{name}: is not UTF-8; convert it first.")


def shortened(text: str) -> str:
    """Returns the name of a text in an error."""
    return f"the text {text if len(text) <= 60 else text[:57] + '...'!r}"
