"""Labelled texts: one or two columns of text and one with the label, of CSV, JSON lines, or a data set of a library.

    csv:FILE                  with a header; .tsv: columns parted by tabs, without quotes, as GLUE's
    jsonl:FILE                an object a line
    hf:NAME[:CONFIG][#SPLIT]  a data set of the Hugging Face hub, or a local folder of one
    tfds:NAME[#SPLIT]         a data set of TensorFlow Datasets

FILEs are local or gs://. SPLIT is as its library writes it, "train[:90%]" too; without one it is the one of the role
("train", "validation", "test"). To add a source: a generator of (place, row) here, and its name in `READERS`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlm.errors import InputError
from mlm.paths import UPath

Names = list[str] | None  # what the whole numbers of a label column stand for, where a library says so


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one split, in the order of the source.

    Attributes:
      source: as in the config.
      texts: one or two of each row.
      labels: strings, or numbers to be predicted.
      places: of each row, for a person: "line 7".
    """

    source: str
    texts: list[tuple[str, ...]]
    labels: list[str] | list[float]
    places: list[str]

    def where(self, row: int) -> str:
        """Returns the file and the line of a row."""
        return f"{self.source}, {self.places[row]}"


def read(source: str, *, split: str, text: tuple[str, ...], label: str, kind: str) -> Table:
    """Reads a split.

    Args:
      source: see the top of this file.
      split: its role, and the split of a library's data set where the source names none.
      text: names of one or two columns.
      label: name of the column of labels.
      kind: "classes" (strings or whole numbers, which become strings) or "regression" (numbers).

    Raises:
      InputError: it can't be read, it has no rows, or a row lacks a text or a label that is one.
    """
    reader, _, rest = source.partition(":")
    texts, labels, places = [], [], []
    try:
        names, rows = READERS[reader](rest, split, (*text, label))
        for place, row in rows:
            where = f"{source}, {place}"
            texts.append(tuple(_text(row, column, where) for column in text))
            value = _value(row, label, where)
            labels.append(_number(value, where, label) if kind == "regression" else _class(value, names, where, label))
            places.append(place)
    except (OSError, ValueError, KeyError, ImportError, csv.Error) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"config.classify.{split}: {source} can't be read: {words[:300]}.") from error
    if not texts:
        raise InputError(f"config.classify.{split}: {source} has no rows.")
    return Table(source, texts, labels, places)


def _value(row: dict[str, Any], column: str, where: str) -> Any:
    if row.get(column) is None:
        raise InputError(f"{where}: has no {column!r}; its columns are {', '.join(map(str, row))}.")
    return row[column].decode() if isinstance(row[column], bytes) else row[column]


def _text(row: dict[str, Any], column: str, where: str) -> str:
    text = _value(row, column, where)
    if not isinstance(text, str):
        raise InputError(f"{where}: its {column!r} is {text!r}, which is no text.")
    if not text.strip():
        raise InputError(f"{where}: its {column!r} is empty; take the row out, or fill it in.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: its {column!r} is no valid Unicode (half of a surrogate pair).") from None
    return text


def _class(value: Any, names: Names, where: str, column: str) -> str:
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        if names is None:
            return str(value)
        if 0 <= value < len(names):
            return names[value]
        raise InputError(
            f"{where}: its {column!r} is {value}, which stands for no label; take a split that has labels."
        )
    if isinstance(value, str) and value.strip():
        return value
    raise InputError(f"{where}: its {column!r} is {value!r}; a label is a string or a whole number.")


def _number(value: Any, where: str, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{where}: its {column!r} is {value!r}; config.classify.kind = regression needs a number.")
    return number


# Readers take (what follows the colon, the role of the split, the columns that are needed), and return what whole
# numbers in the label column stand for, and (place, row) of each row.


def _csv(file: str, split: str, columns: tuple[str, ...]) -> tuple[Names, Iterator[tuple[str, dict]]]:
    return None, _csv_rows(file, columns)


def _csv_rows(file: str, columns: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
    tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.endswith(".tsv") else {"strict": True}
    with UPath(file).open("r", encoding="utf-8-sig", newline="") as lines:  # spreadsheets put a mark at the beginning
        reader = csv.DictReader(lines, **tabs)
        _check_columns(columns, reader.fieldnames or [])
        width, before = len(reader.fieldnames), reader.line_num
        for row in reader:
            place = f"line {before + 1}"  # a quoted text may go over several
            before = reader.line_num
            if None in row or None in row.values():
                cells = sum(value is not None for key, value in row.items() if key is not None)
                cells += len(row.get(None, ()))
                raise InputError(f"csv:{file}, {place}: has {cells} columns where the header has {width}.")
            yield place, row


def _jsonl(file: str, split: str, columns: tuple[str, ...]) -> tuple[Names, Iterator[tuple[str, dict]]]:
    return None, _jsonl_rows(file)


def _jsonl_rows(file: str) -> Iterator[tuple[str, dict]]:
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


def _hf(name: str, split: str, columns: tuple[str, ...]) -> tuple[Names, Iterator[tuple[str, dict]]]:
    import datasets

    name, _, own = name.partition("#")
    name, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(name, config or None, split=own or split, trust_remote_code=False)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    _check_columns(columns, loaded.column_names)
    names = getattr(loaded.features[columns[-1]], "names", None)
    return names, _numbered(loaded.select_columns(list(dict.fromkeys(columns))))


def _tfds(name: str, split: str, columns: tuple[str, ...]) -> tuple[Names, Iterator[tuple[str, dict]]]:
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # they are jax's
    import tensorflow_datasets as tfds

    name, _, own = name.partition("#")
    builder = tfds.builder(name)
    builder.download_and_prepare()
    _check_columns(columns, list(builder.info.features))
    rows = tfds.as_numpy(builder.as_dataset(split=own or split, shuffle_files=False))
    names = getattr(builder.info.features[columns[-1]], "names", None)
    return names, _numbered({key: _plain(row[key]) for key in columns} for row in rows)


READERS: dict[str, Callable[..., tuple[Names, Iterator[tuple[str, dict]]]]] = {
    "csv": _csv,
    "jsonl": _jsonl,
    "hf": _hf,
    "tfds": _tfds,
}


def _check_columns(wanted: Iterable[str], there: list[str]) -> None:
    for column in wanted:
        if column not in there:
            raise ValueError(f"there is no column {column!r} (config.classify.text, .label) among {', '.join(there)}")


def _numbered(rows: Iterable[dict]) -> Iterator[tuple[str, dict]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value  # numpy's numbers
