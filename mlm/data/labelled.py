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
            row = {column: _plain(value) for column, value in row.items()}
            try:
                texts.append(_texts(row, columns))
                label = None
                if require_labels or not _is_missing(row.get(columns.label), no_label):
                    label = _labels(row, columns, names)
                if by_word and label is not None and len(texts[-1]) != len(label):
                    raise ValueError(f"has {len(texts[-1])} words, {len(label)} labels")
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            labels.append(label)
            places.append(f"{source}, {place}")
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


def _cells(row: Row, column: str, columns: Columns) -> list[Any]:
    """Returns the value of a row in a column, in a list; of words, the list that it is."""
    value = row.get(column)
    if value is None:
        raise ValueError(
            f"its {column!r} is missing; the columns are {', '.join(map(str, row)) or 'none'}"
        )
    if columns.kind != "tokens":
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"its {column!r} is {value!r:.80}; config.classify.kind = tokens needs a list, one entry per word"
        )
    return value


def _texts(row: Row, columns: Columns) -> tuple[str, ...]:
    texts = []
    for column in columns.text:
        for text in _cells(row, column, columns):
            if not is_text(text):
                raise ValueError(f"its {column!r} has {text!r:.80}, no string of valid Unicode")
            if columns.kind == "tokens" and not text.strip(lines.SPACES):
                raise ValueError(f"its {column!r} has {text!r:.80}, no word")
            texts.append(text)
    # one text of a pair may be, as in two rows of QQP
    if not any(map(str.strip, texts)):
        raise ValueError(
            f"its {' and '.join(map(repr, columns.text))} is empty; fill it in, or remove the row"
        )
    return tuple(texts)


def _labels(row: Row, columns: Columns, names: Names) -> Any:
    labels = []
    for value in _cells(row, columns.label, columns):
        try:
            labels.append(_label(value, columns.kind, names))
        except (TypeError, ValueError, OverflowError):
            kind = "number" if columns.kind == "regression" else "label"
            raise ValueError(f"its {columns.label!r} is {value!r:.80}, no {kind}") from None
    return tuple(labels) if columns.kind == "tokens" else labels[0]


def _label(value: Any, kind: str, names: Names) -> str | float | None:
    """Returns the name of a class, or a number that float32 can hold; raises ValueError or the like."""
    if kind == "regression":
        if abs(float(value)) <= FLOAT_MAX:
            return float(value)
        raise ValueError
    # neither trained on nor scored, as in transformers; in CoNLL it is a string
    if kind == "tokens" and str(value) in ("-100", "-100.0"):
        return None
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float) and names is not None:
        return names[range(len(names)).index(value)]
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise ValueError
    text = str(value + 0.0 if isinstance(value, float) else value)  # -0.0 is 0.0
    if not isinstance(value, int | float | Decimal | str) or not text.strip() or not is_text(text):
        raise ValueError
    return text


# Readers take (source after its colon, split, columns that must be there, the label's) -> (Names, PlacedRows).
# Their errors are ValueErrors that begin with the place; `data_sets.readable` adds the source and the key.


def _csv(file: str, columns: tuple[str, ...], label: str) -> PlacedRows:
    text = lines.read_file(file, str)
    if file.lower().removesuffix(".gz").endswith(".tsv"):
        reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(text, strict=True)
    begin = 1
    try:
        head = next(reader, [])
        data_sets.check_columns(columns, head)
        for column in (*columns, label):
            if (count := head.count(column)) > 1:
                raise ValueError(f"{count} of its columns are named {column!r}; rename all but one")
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
    def parse(line: str) -> Row | None:
        return lines.json_object(line) if line.strip(lines.SPACES) else None

    for number, row in enumerate(lines.read_file(file, parse), 1):
        if row is not None:
            yield f"line {number}", row


def _conll(file: str, columns: tuple[str, ...], label: str) -> PlacedRows:
    """Yields sentences. "# ..." before one is a comment unless it ends in a known label, as the word "#" would.

    Columns are separated by tabs, in a line without one by spaces.
    """
    known = {"O"}
    words = []
    labels = []
    start = 0
    rows = itertools.chain(lines.read_file(file, str), [""])
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
