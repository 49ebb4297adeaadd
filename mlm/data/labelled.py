"""Labelled texts: one or two columns of text and a column of labels, from a file or a library's data set.

    csv:FILE                  with a header; .tsv: separated by tabs, without quotes, as in GLUE
    jsonl:FILE                an object a line
    hf:NAME[:CONFIG][#SPLIT]  a data set of the Hugging Face hub, or a local folder of one
    tfds:NAME[#SPLIT]         a data set of TensorFlow Datasets

FILEs are local or gs://. SPLIT is written as in its library, for example "train[:90%]"; the default is the split to be
read ("train", "validation", "test"). To add a source: a function here that returns rows, and its name in `READERS`.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from mlm.data import sources
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.text import is_text

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # (place, row)
UNKNOWN = (None, "", -1, "-1")  # labels of rows that have none
Names = list[str] | None  # of the classes by index, where a library has them


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one split, in the order of the source."""

    source: str  # as in the config
    texts: list[tuple[str, ...]]  # one or two a row
    labels: list[str | None] | list[float | None]  # None where the source has none, as in a test split
    places: list[str]  # of the rows in the source: "line 7"
    names: Names = None  # of the classes by index, where a library has them

    def where(self, row: int) -> str:
        """Returns the source and the place of a row, for messages."""
        return f"{self.source}, {self.places[row]}"


def read(
    source: str, *, split: str, text: tuple[str, ...], label: str, kind: str, labelled: bool = True, key: str = ""
) -> Table:
    """Reads a split of a source; `text`, `label` and `kind` are keys of config.classify, `key` is for errors.

    Unless they must be `labelled`, rows may have no label: no such column, an empty one, or the class -1.
    """
    key = key or f"config.classify.{split}"
    reader, _, rest = source.partition(":")
    texts, labels, places = [], [], []
    try:
        names, rows = READERS[reader](rest, split, (*text, label) if labelled else text, label)
        for place, row in rows:
            places.append(place)
            texts.append(tuple(_text(row, column, f"{source}, {place}: its {column!r}") for column in text))
            absent = not labelled and row.get(label) in UNKNOWN
            labels.append(None if absent else _label(row, label, f"{source}, {place}: its {label!r}", kind, names))
    except (OSError, ValueError, KeyError, ImportError, csv.Error) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{key}: {source} can't be read: {message[:300]}.") from error
    if not texts:
        raise InputError(f"{key}: {source} has no rows.")
    return Table(source, texts, labels, places, names)


def _value(row: Row, column: str, where: str) -> Any:
    value = row.get(column)
    if value is None:
        raise InputError(f"{where} is missing; the columns are {', '.join(map(str, row))}.")
    value = value.item() if hasattr(value, "item") else value  # of numpy
    return value.decode() if isinstance(value, bytes) else value


def _text(row: Row, column: str, where: str) -> str:
    text = _value(row, column, where)
    if not isinstance(text, str):
        raise InputError(f"{where} is {text!r}, which is not a string.")
    if not text.strip():
        raise InputError(f"{where} is empty; fill it in, or remove the row.")
    if not is_text(text):
        raise InputError(f"{where} is not valid Unicode (half of a surrogate pair).")
    return text


def _label(row: Row, column: str, where: str, kind: str, names: Names) -> str | float:
    value = _value(row, column, where)
    if kind == "regression":
        try:
            if math.isfinite(float(value)):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise InputError(f"{where} is {value!r}; config.classify.kind = regression needs a number.")
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and names is not None:
        if not 0 <= value < len(names):
            raise InputError(f"{where} is {value}, which is the index of no label; take a split that has labels.")
        return names[value]
    if isinstance(value, int | str) and str(value).strip():
        return str(value)
    raise InputError(f"{where} is {value!r}; a label is a string or a whole number.")


# Readers take (the source after its colon, the split, the columns that must be there, the label's) -> (Names, Rows).


def _csv(file: str, columns: tuple[str, ...]) -> Rows:
    dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.endswith(".tsv") else {"strict": True}
    with UPath(file).open("r", encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
        reader = csv.reader(lines, **dialect)
        head = next(reader, [])
        _check_columns(columns, head)
        end = reader.line_num
        for cells in reader:
            place, end = f"line {end + 1}", reader.line_num  # a quoted text may span several lines
            if cells and len(cells) != len(head):
                raise InputError(f"csv:{file}, {place}: has {len(cells)} columns where the header has {len(head)}.")
            if cells:
                yield place, dict(zip(head, cells, strict=True))


def _jsonl(file: str) -> Rows:
    with UPath(file).open("r", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise InputError(f"jsonl:{file}, line {number}: is not a JSON object.")
            yield f"line {number}", row


def _hf(name: str, split: str, columns: tuple[str, ...], label: str) -> tuple[Names, Rows]:
    name, _, own = name.partition("#")
    loaded = sources.load_hf(name, split=own or split)
    wanted = [column for column in loaded.column_names if column in (*columns, label)]  # others may be images
    return _of_library(loaded.features, columns, label, loaded.select_columns(wanted))


def _tfds(name: str, split: str, columns: tuple[str, ...], label: str) -> tuple[Names, Rows]:
    name, _, own = name.partition("#")
    info, rows = sources.load_tfds(name)
    return _of_library(info.features, columns, label, rows(own or split))


def _of_library(features: Any, columns: tuple[str, ...], label: str, rows: Iterable[Row]) -> tuple[Names, Rows]:
    _check_columns(columns, features)
    names = getattr(features[label], "names", None) if label in features else None
    return names, ((f"row {n}", row) for n, row in enumerate(rows, 1))


def _check_columns(wanted: Iterable[str], there: Iterable[str]) -> None:
    for column in wanted:
        if column not in there:
            raise ValueError(f"there is no column {column!r} among {', '.join(there)}")


READERS = {
    "csv": lambda file, split, columns, label: (None, _csv(file, columns)),
    "jsonl": lambda file, split, columns, label: (None, _jsonl(file)),
    "hf": _hf,
    "tfds": _tfds,
}
