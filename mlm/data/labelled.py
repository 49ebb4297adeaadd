"""Labelled texts: one or two columns of text and a column of labels, from a file or a library's data set.

    csv:FILE                  with a header; .tsv: separated by tabs, without quotes, as in GLUE
    jsonl:FILE                an object a line
    hf:NAME[:CONFIG][#SPLIT]  a data set of the Hugging Face hub, or a local folder of one
    tfds:NAME[#SPLIT]         a data set of TensorFlow Datasets

FILEs are local or gs://. SPLIT is written as in its library, for example "train[:90%]"; the default is the split to be
read ("train", "validation", "test"). To add a source: a function here that returns rows, and its name in `READERS`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from mlm.data import batches
from mlm.errors import InputError
from mlm.paths import UPath

Names = list[str] | None  # of the classes by index, where a library has them
Rows = Iterator[tuple[str, dict[str, Any]]]  # (place, row)


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one split, in the order of the source.

    Attributes:
      source: as in the config.
      texts: one or two a row.
      labels: strings, or numbers to be predicted.
      places: where each row is in the source: "line 7".
    """

    source: str
    texts: list[tuple[str, ...]]
    labels: list[str] | list[float]
    places: list[str]

    def where(self, row: int) -> str:
        """Returns the source and the place of a row, for messages."""
        return f"{self.source}, {self.places[row]}"


def read(source: str, *, split: str, text: tuple[str, ...], label: str, kind: str) -> Table:
    """Reads a split.

    Args:
      source: see the top of this file.
      split: "train", "validation" or "test".
      text, label, kind: keys of config.classify. Classes are strings or whole numbers, which become strings.

    Raises:
      InputError: it can't be read, it has no rows, or a row has no valid text or label.
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
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"config.classify.{split}: {source} can't be read: {message[:300]}.") from error
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
        raise InputError(f"{where}: its {column!r} is {text!r}, which is not a string.")
    if not text.strip():
        raise InputError(f"{where}: its {column!r} is empty; fill it in, or remove the row.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: its {column!r} is not valid Unicode (half of a surrogate pair).") from None
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


# Readers take (the source after its colon, the split, the columns, the label's last) and return (Names, Rows).


def _csv(file: str, columns: tuple[str, ...]) -> Rows:
    tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.endswith(".tsv") else {"strict": True}
    with UPath(file).open("r", encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
        reader = csv.reader(lines, **tabs)
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


def _hf(name: str, split: str, columns: tuple[str, ...]) -> tuple[Names, Rows]:
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


def _tfds(name: str, split: str, columns: tuple[str, ...]) -> tuple[Names, Rows]:
    batches.import_tensorflow()
    import tensorflow_datasets as tfds

    name, _, own = name.partition("#")
    builder = tfds.builder(name)
    builder.download_and_prepare()
    _check_columns(columns, list(builder.info.features))
    rows = tfds.as_numpy(builder.as_dataset(split=own or split, shuffle_files=False))
    names = getattr(builder.info.features[columns[-1]], "names", None)
    return names, _numbered({key: _plain(row[key]) for key in columns} for row in rows)


READERS = {
    "csv": lambda file, split, columns: (None, _csv(file, columns)),
    "jsonl": lambda file, split, columns: (None, _jsonl(file)),
    "hf": _hf,
    "tfds": _tfds,
}


def _check_columns(wanted: Iterable[str], there: list[str]) -> None:
    for column in wanted:
        if column not in there:
            raise ValueError(f"there is no column {column!r} (config.classify.text, .label) among {', '.join(there)}")


def _numbered(rows: Iterable[dict]) -> Rows:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value  # numpy scalars
