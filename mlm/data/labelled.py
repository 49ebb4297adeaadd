"""Labelled texts: one or two columns of text and a column of labels.

    csv:FILE                  with a header; .tsv: separated by tabs, without quotes, as in GLUE
    jsonl:FILE                an object a line
    conll:FILE                a word a line, its label in the last column; a blank line ends a sentence
    hf:NAME[:CONFIG][#SPLIT]  a data set of the Hugging Face hub, or a local folder of one
    tfds:NAME[#SPLIT]         a data set of TensorFlow Datasets, or a prepared folder of one

FILEs are local or gs://, read as `lines.py` says (.gz too). SPLIT is written as in its library, for example
"train[:90%]"; the default is the split to be read ("train", "validation", "test"). For token labels the column of text
holds lists of words, that of labels a list of the same length. To add a source: a function here that returns rows, and
its name in `READERS`.

A class is named by the text of its label, a number as Python and pandas write it: 3, 1.0, true. Labels that are the
same by `spelling` are one class, as 1 and 1.0. A row has no label if that is missing, null or blank, or if it is NaN or
-1 and the training rows have no such class; in a regression -1 is a number. A word has none if it is -100, as in
transformers: it is not trained on, nor scored.
"""

import contextlib
import csv
import dataclasses
import functools
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from mlm.data import data_sets, lines
from mlm.errors import InputError
from mlm.files import open_file
from mlm.text import is_text

FLOAT_MAX = 3.4e38  # of float32
Row = dict[str, Any]
PlacedRows = Iterator[tuple[str, Row]]  # (place, row)
Names = list[str] | None  # of the classes by index, where a library has them

# characters; the default of 131,072 is less than long documents have
csv.field_size_limit(2**31 - 1)


class Columns(NamedTuple):
    """What is read of each row: keys of config.classify."""

    text: tuple[str, ...]
    label: str
    kind: str = "classes"


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one split, in the order of the source."""

    source: str  # as in the config
    texts: list[tuple[str, ...]]  # one or two a row; the words of a row where each has a label
    # str, float or, of words, a tuple; None where the source has none, as in a test split
    labels: list[Any]
    places: list[str]  # the source and the line or row of each, for messages
    names: Names = None  # of the classes by index, where a library has them
    is_tokens: bool = False  # whether each word has a label


def check(
    source: str, columns: Columns, *, split: str, require_labels: bool = True, key: str = ""
) -> None:
    """Raises InputError if a source isn't there, or its first row can't be read or lacks a column."""
    kind, _, rest = source.partition(":")
    key = key or f"config.classify.{split}"
    if kind in ("hf", "tfds"):
        with data_sets.readable(source, key):
            name, named_split = data_sets.named_split(rest)
            required = (*columns.text, columns.label) if require_labels else columns.text
            data_sets.check_first_row(kind, name, named_split or split, required)
    else:
        read_table(source, columns, split=split, require_labels=require_labels, key=key, limit=1)


def read_table(
    source: str,
    columns: Columns,
    *,
    split: str,
    require_labels: bool = True,
    classes: Collection[str] = (),
    key: str = "",
    limit: int | None = None,
) -> Table:
    """Reads a split of a source, or the first `limit` rows of it; errors name the `key` of the config.

    Without `require_labels`, rows may have no label; `classes` are those of training.
    """
    reader, _, rest = source.partition(":")
    key = key or f"config.classify.{split}"
    by_word = columns.kind == "tokens"
    texts = []
    labels = []
    places = []
    with data_sets.readable(source, key):
        required = (*columns.text, columns.label) if require_labels else columns.text
        names, rows = READERS[reader](rest, split, required, columns.label)
        no_label = {"nan"} if columns.kind == "regression" else {"nan", "-1"}  # as a CSV writes it
        if names is None:
            no_label -= {spelling(name).lower() for name in classes}
        for place, row in itertools.islice(rows, limit):
            places.append(f"{source}, {place}")
            cells = [
                [_text(*cell, by_word) for cell in _cells(row, column, place, by_word)]
                for column in columns.text
            ]
            texts.append(tuple(itertools.chain(*cells)))
            # one of a pair may be, as in two rows of QQP
            if not by_word and not any(map(str.strip, texts[-1])):
                names_of_texts = " and ".join(map(repr, columns.text))
                raise ValueError(
                    f"{place}: its {names_of_texts} is empty; fill it in, or remove the row"
                )
            if not require_labels and _is_missing(_plain(row.get(columns.label)), no_label):
                labels.append(None)
                continue
            label = tuple(
                _label(*cell, columns.kind, names)
                for cell in _cells(row, columns.label, place, by_word)
            )
            if by_word and len(texts[-1]) != len(label):
                raise ValueError(
                    f"{place}: has {len(texts[-1])} words, {len(label)} labels; give each word one"
                )
            labels.append(label if by_word else label[0])
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


def _is_missing(value: Any, no_label: Collection[str]) -> bool:
    """Returns whether a row's label, or all of those of its words, are missing: null, NaN, blank, or in `no_label`."""
    if isinstance(value, list):
        return all(_is_missing(label, no_label) for label in value)
    text = str(value).strip()
    return value is None or value != value or text == "" or spelling(text).lower() in no_label


def _plain(value: Any) -> Any:
    """Returns a value of numpy as Python's, and bytes as a string."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return list(map(_plain, value))
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def _cells(row: Row, column: str, place: str, by_word: bool) -> list[tuple[Any, str]]:
    """Returns (value, where) of a cell or, if it is a list, of each of its words."""
    value = _plain(row.get(column))
    where = f"{place}: its {column!r}"
    if value is None:
        raise ValueError(f"{where} is missing; the columns are {', '.join(map(str, row))}")
    if not by_word:
        return [(value, where)]
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where} is {value!r:.80}; config.classify.kind = tokens needs a list, one entry per word"
        )
    return [(word, f"{where}, word {number},") for number, word in enumerate(value, 1)]


def _text(text: Any, where: str, by_word: bool) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where} is {text!r:.80}, which is not a string")
    if by_word and not text.strip(lines.SPACES):
        raise ValueError(f"{where} is empty; fill it in, or remove the row")
    if not is_text(text):
        raise ValueError(
            f"{where} is not valid Unicode: it has bytes that are not UTF-8, or half of a surrogate pair"
        )
    return text


def _label(value: Any, where: str, kind: str, names: Names) -> str | float | None:
    if kind == "regression":
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if abs(float(value)) <= FLOAT_MAX:
                return float(value)
        raise ValueError(
            f"{where} is {value!r:.80}; config.classify.kind = regression needs a number"
        )
    if kind == "tokens" and str(value) in ("-100", "-100.0"):
        return None
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float) and names is not None:
        if value not in range(len(names)):
            raise ValueError(
                f"{where} is {value}, which is not the index of a label; name a split that has labels"
            )
        return names[int(value)]
    if isinstance(value, int | str) or (
        isinstance(value, float | Decimal) and math.isfinite(value)
    ):
        text = str(value + 0.0 if isinstance(value, float) else value)  # -0.0 is 0.0
        if text.strip() and is_text(text):
            return text
    raise ValueError(f"{where} is {value!r:.80}; a label is a string or a number")


# Readers take (source after its colon, split, columns that must be there, the label's) -> (Names, PlacedRows).
# Their errors are ValueErrors that begin with the place; `data_sets.readable` adds the source and the key.


def _csv(file: str, columns: tuple[str, ...], label: str) -> PlacedRows:
    with open_file(file) as raw:
        text = lines.decoded(lines.read_lines(raw, file), file)
        begin = 1
        if file.lower().removesuffix(".gz").endswith(".tsv"):
            reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(text, strict=True)
        try:
            head = next(reader, [])
            data_sets.check_columns(columns, head)
            if twice := next(
                (column for column in (*columns, label) if head.count(column) > 1), None
            ):
                raise ValueError(
                    f"{head.count(twice)} of its columns are named {twice!r}; rename all but one"
                )
            begin = reader.line_num + 1
            for cells in reader:
                place = f"line {begin}"
                begin = reader.line_num + 1  # a quoted text may span several lines
                if cells and len(cells) != len(head):
                    raise ValueError(
                        f"{place}: has {len(cells)} columns where the header has {len(head)}"
                    )
                if cells:
                    yield place, dict(zip(head, cells, strict=True))
        except csv.Error as error:
            fix = "quote a field that has quotes in it, and double each of them"
            raise ValueError(f"the row that begins at line {begin}: {error}; {fix}") from error


def _jsonl(file: str) -> PlacedRows:
    with open_file(file) as raw:
        for number, line in enumerate(lines.decoded(lines.read_lines(raw, file), file), 1):
            try:
                if line.strip(lines.SPACES):
                    yield f"line {number}", lines.json_object(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def _conll(file: str, columns: tuple[str, ...], label: str) -> PlacedRows:
    """Yields sentences. "# ..." before one is a comment unless it ends in a known label, as the word "#" would.

    Columns are separated by tabs, in a line without one by spaces.
    """
    known = {"O"}
    words = []
    labels = []
    start = 0
    with open_file(file) as raw:
        rows = itertools.chain(lines.decoded(lines.read_lines(raw, file), file), [""])
        for number, line in enumerate(rows, 1):
            cells = (
                [cell.strip(lines.SPACES) for cell in line.split("\t")]
                if "\t" in line
                else lines.split_words(line)
            )
            if not any(cells) or cells[0] == "-DOCSTART-":
                if words:
                    row = {columns[0]: words}
                    yield f"line {start}", row | {label: labels} if labels else row
                words = []
                labels = []
                continue
            if line.startswith("# ") and not words and cells[-1] not in known:
                continue
            if not cells[0] or not cells[-1] or (len(cells) == 1 and label in columns):
                raise ValueError(f"line {number}: lacks a word or its label; give it both columns")
            start = start if words else number
            words.append(cells[0])
            labels += cells[1:][-1:]
            known.update(cells[1:][-1:])


def _library(
    kind: str, name: str, split: str, columns: tuple[str, ...], label: str
) -> tuple[Names, PlacedRows]:
    name, named_split = data_sets.named_split(name)
    if kind == "hf":
        loaded = data_sets.load_hf(name, split=named_split or split)
        # others may be images
        used = [column for column in loaded.column_names if column in (*columns, label)]
        features = loaded.features
        rows = loaded.select_columns(used)
    else:
        info, rows_of = data_sets.load_tfds(name)
        features = info.features
        rows = rows_of(named_split or split)
    data_sets.check_columns(columns, features)
    names = None
    if label in features:  # a class, or a list of classes
        names = getattr(getattr(features[label], "feature", features[label]), "names", None)
    return names, ((f"row {n}", row) for n, row in enumerate(rows, 1))


READERS = {
    "csv": lambda file, split, columns, label: (None, _csv(file, columns, label)),
    "jsonl": lambda file, split, columns, label: (None, _jsonl(file)),
    "conll": lambda file, split, columns, label: (None, _conll(file, columns, label)),
    "hf": functools.partial(_library, "hf"),
    "tfds": functools.partial(_library, "tfds"),
}
