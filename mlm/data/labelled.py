"""Labelled texts: one or two columns of text and a column of labels, from a source of `labelled_sources`.

A class is named by the text of its label, a number as Python and pandas write it: 3, 1.0, true. Labels that are the
same by `spelling` are one class, as 1 and 1.0. A row has no label if that is missing, null, NaN or blank, or if it is
-1 and the training rows have no class -1; in a regression -1 is a number. A word has none if it is -100, as in
transformers: it is not trained on, nor scored.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from typing import Any

from mlm.data import data_sets
from mlm.data.labelled_sources import READERS, Names, Row
from mlm.data.lines import SPACES
from mlm.errors import InputError
from mlm.text import is_text

FLOAT_MAX = 3.4e38  # of float32


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one split, in the order of the source."""

    source: str  # as in the config
    texts: list[tuple[str, ...]]  # one or two a row; the words of a row where each has a label
    labels: list[Any]  # str, float or, of words, a tuple; None where the source has none, as in a test split
    places: list[str]  # the source and the line or row of each, for messages
    names: Names = None  # of the classes by index, where a library has them
    is_tokens: bool = False  # whether each word has a label


def check(
    source: str, *, split: str, text: tuple[str, ...], label: str, kind: str, require_labels: bool = True, key: str = ""
) -> None:
    """Raises InputError if a source isn't there, or its first row can't be read or lacks a column; takes `read`'s."""
    reader, _, rest = source.partition(":")
    key = key or f"config.classify.{split}"
    if reader not in ("hf", "tfds"):
        try:
            read(
                source, split=split, text=text, label=label, kind=kind, require_labels=require_labels, key=key, limit=1
            )
        except InputError as error:
            raise InputError(str(error) if key in str(error) else f"{key}: {error}") from None
        return
    with _readable(source, key):
        name, named_split = data_sets.named_split(rest)
        columns = data_sets.hf_columns(name, named_split or split) if reader == "hf" else data_sets.tfds_columns(name)
        data_sets.check_columns((*text, label) if require_labels else text, columns)


@contextlib.contextmanager
def _readable(source: str, key: str) -> Iterator[None]:
    """Turns what a reader raises into an InputError that names the key and the source."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{key}: {source} can't be read: {message[:400].rstrip('.')}.") from error


def read(
    source: str,
    *,
    split: str,
    text: tuple[str, ...],
    label: str,
    kind: str,
    require_labels: bool = True,
    classes: Collection[str] = (),
    key: str = "",
    limit: int | None = None,
) -> Table:
    """Reads a split of a source; `text`, `label` and `kind` are keys of config.classify, `key` is for errors.

    Without `require_labels`, rows may have no label; `classes` are those of training. `limit` is of rows.
    """
    key = key or f"config.classify.{split}"
    reader, _, rest = source.partition(":")
    texts, labels, places, by_word = [], [], [], kind == "tokens"
    with _readable(source, key):
        names, rows = READERS[reader](rest, split, (*text, label) if require_labels else text, label)
        read_class = _word_class if by_word else _class
        read_label = _number if kind == "regression" else functools.partial(read_class, names=names)
        read_text = functools.partial(_text, spaces=SPACES if by_word else None)
        no_label = "nan" if kind == "regression" else "-1"
        if names is None and no_label in map(spelling, classes):
            no_label = ""
        for place, row in itertools.islice(rows, limit):
            where = f"{source}, {place}"
            places.append(where)
            cells = tuple(_read(row, column, where, read_text, by_word) for column in text)
            texts.append(cells[0] if by_word else cells)
            if not require_labels and _is_missing(_plain(row.get(label)), no_label):
                labels.append(None)
                continue
            labels.append(_read(row, label, where, read_label, by_word))
            if by_word and len(texts[-1]) != len(labels[-1]):
                raise InputError(f"{where}: has {len(texts[-1])} words, {len(labels[-1])} labels; give each word one.")
    if not texts:
        raise InputError(f"{key}: {source} has no rows.")
    if by_word and require_labels and limit is None and not any(map(any, labels)):
        raise InputError(f"{key}: {source} has no word with a label: all are -100.")
    return Table(source, texts, labels, places, names, by_word)


def spelling(label: str) -> str:
    """Returns a label as it is written most simply: "1" for " 1.0", "true" for "True", "é" in one way of two."""
    label = unicodedata.normalize("NFC", label).strip()
    if re.fullmatch(r"-?\d+\.0+", label):
        return label.partition(".")[0]
    return label.lower() if label.lower() in ("true", "false") else label


def _is_missing(value: Any, no_label: str) -> bool:
    """Returns whether a row's label, or all of those of its words, are missing: null, NaN, blank, or `no_label`."""
    if isinstance(value, list):
        return all(_is_missing(label, no_label) for label in value)
    text = str(value).strip()
    return value is None or value != value or text == "" or no_label in (spelling(text), text.lower())


def _plain(value: Any) -> Any:
    """Returns a value of numpy as Python's, and bytes as a string."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return list(map(_plain, value))
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def _read(row: Row, column: str, where: str, read_one: Callable[[Any, str], Any], by_word: bool) -> Any:
    """Returns read_one(value, where) of a cell or, if it is a list, of each of its words."""
    value, where = _plain(row.get(column)), f"{where}: its {column!r}"
    if value is None:
        raise InputError(f"{where} is missing; the columns are {', '.join(map(str, row))}.")
    if not by_word:
        return read_one(value, where)
    if not isinstance(value, list) or not value:
        raise InputError(f"{where} is {value!r:.80}; config.classify.kind = tokens needs a list, one entry per word.")
    return tuple(read_one(word, f"{where}, word {number},") for number, word in enumerate(value, 1))


def _text(text: Any, where: str, spaces: str | None) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where} is {text!r:.80}, which is not a string.")
    if not text.strip(spaces):
        raise InputError(f"{where} is empty; fill it in, or remove the row.")
    if not is_text(text):
        raise InputError(f"{where} is not valid Unicode: it has bytes that are not UTF-8, or half of a surrogate pair.")
    return text


def _number(value: Any, where: str) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if abs(float(value)) <= FLOAT_MAX:
            return float(value)
    raise InputError(f"{where} is {value!r:.80}; config.classify.kind = regression needs a number.")


def _class(value: Any, where: str, names: Names) -> str:
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float) and names is not None:
        if value not in range(len(names)):
            raise InputError(f"{where} is {value}, which is not the index of a label; name a split that has labels.")
        return names[int(value)]
    if isinstance(value, int | str) or (isinstance(value, float | Decimal) and math.isfinite(value)):
        text = str(value + 0.0 if isinstance(value, float) else value)  # -0.0 is 0.0
        if text.strip() and is_text(text):
            return text
    raise InputError(f"{where} is {value!r:.80}; a label is a string or a number.")


def _word_class(value: Any, where: str, names: Names) -> str | None:
    return None if str(value) in ("-100", "-100.0") else _class(value, where, names)
