"""Labelled texts: one or two columns of text and a column of labels, from a file or a library's data set.

    csv:FILE                  with a header; .tsv: separated by tabs, without quotes, as in GLUE
    jsonl:FILE                an object a line
    conll:FILE                a word a line, its label in the last column; a blank line ends a sentence
    hf:NAME[:CONFIG][#SPLIT]  a data set of the Hugging Face hub, or a local folder of one
    tfds:NAME[#SPLIT]         a data set of TensorFlow Datasets, or a prepared folder of one

FILEs are local or gs://. SPLIT is written as in its library, for example "train[:90%]"; the default is the split to be
read ("train", "validation", "test"). For token labels the column of text holds lists of words, that of labels a list of
the same length. To add a source: a function here that returns rows, and its name in `READERS`.
"""

import contextlib
import csv
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlm.data import data_sets
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
    texts: list[tuple[str, ...]]  # one or two a row; the words of a row where each has a label
    labels: list[Any]  # str, float or, of words, a tuple of str; None where the source has none, as in a test split
    places: list[str]  # the source and the line or row of each, for messages
    names: Names = None  # of the classes by index, where a library has them
    is_tokens: bool = False  # whether each word has a label


def read(
    source: str, *, split: str, text: tuple[str, ...], label: str, kind: str, require_labels: bool = True, key: str = ""
) -> Table:
    """Reads a split of a source; `text`, `label` and `kind` are keys of config.classify, `key` is for errors.

    Without `require_labels`, rows may have no label: no such column, an empty one, or the class -1.
    """
    key = key or f"config.classify.{split}"
    reader, _, rest = source.partition(":")
    texts, labels, places, by_word = [], [], [], kind == "tokens"
    try:
        names, rows = READERS[reader](rest, split, (*text, label) if require_labels else text, label)
        read_label = _number if kind == "regression" else functools.partial(_class, names=names)
        for place, row in rows:
            where, own = f"{source}, {place}", row.get(label)
            places.append(where)
            cells = tuple(_read(row, column, where, _text, by_word) for column in text)
            texts.append(cells[0] if by_word else cells)
            absent = not require_labels and all(each in UNKNOWN for each in (own if isinstance(own, list) else [own]))
            labels.append(None if absent else _read(row, label, where, read_label, by_word))
            if by_word and not absent and len(texts[-1]) != len(labels[-1]):
                raise InputError(
                    f"{where}: has {len(texts[-1])} words and {len(labels[-1])} labels; give each word one."
                )
    except (OSError, ValueError, KeyError, ImportError, csv.Error) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{key}: {source} can't be read: {message[:300]}.") from error
    if not texts:
        raise InputError(f"{key}: {source} has no rows.")
    return Table(source, texts, labels, places, names, by_word)


def _read(row: Row, column: str, where: str, read_one: Callable[[Any, str], Any], by_word: bool) -> Any:
    """Returns read_one(value, where) of a cell or, if it is a list, of each of its words."""
    value, where = row.get(column), f"{where}: its {column!r}"
    if value is None:
        raise InputError(f"{where} is missing; the columns are {', '.join(map(str, row))}.")
    value = value.item() if hasattr(value, "item") else value  # of numpy
    if not by_word:
        return read_one(value.decode() if isinstance(value, bytes) else value, where)
    if not isinstance(value, list) or not value:
        raise InputError(f"{where} is {value!r:.80}; config.classify.kind = tokens needs a list, one entry per word.")
    return tuple(read_one(each, f"{where}, word {number},") for number, each in enumerate(value, 1))


def _text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where} is {text!r}, which is not a string.")
    if not text.strip():
        raise InputError(f"{where} is empty; fill it in, or remove the row.")
    if not is_text(text):
        raise InputError(f"{where} is not valid Unicode (half of a surrogate pair).")
    return text


def _number(value: Any, where: str) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(float(value)):
            return float(value)
    raise InputError(f"{where} is {value!r}; config.classify.kind = regression needs a number.")


def _class(value: Any, where: str, names: Names) -> str:
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and names is not None:
        if not 0 <= value < len(names):
            raise InputError(f"{where} is {value}, which is not the index of a label; name a split that has labels.")
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


def _conll(file: str, columns: tuple[str, ...], label: str) -> Rows:
    """Yields sentences. "# ..." before one is a comment unless it ends in a known label, as the word "#" would."""
    known, words, labels, start = {"O"}, [], [], 0
    with UPath(file).open("r", encoding="utf-8-sig") as lines:
        for number, line in enumerate(itertools.chain(lines, [""]), 1):
            cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t" if "\t" in line else None)]
            if not any(cells) or cells[0] == "-DOCSTART-":
                if words:
                    yield f"line {start}", {columns[0]: words, **({label: labels} if labels else {})}
                words, labels = [], []
                continue
            if line.startswith("# ") and not words and cells[-1] not in known:
                continue
            if not cells[0] or not cells[-1] or (len(cells) == 1 and label in columns):
                raise InputError(f"conll:{file}, line {number}: lacks a word or its label; give it both columns.")
            start = start if words else number
            words.append(cells[0])
            labels += cells[1:][-1:]
            known.update(cells[1:][-1:])


def _library(kind: str, name: str, split: str, columns: tuple[str, ...], label: str) -> tuple[Names, Rows]:
    name, named = data_sets.named_split(name)
    if kind == "hf":
        loaded = data_sets.load_hf(name, split=named or split)
        wanted = [column for column in loaded.column_names if column in (*columns, label)]  # others may be images
        features, rows = loaded.features, loaded.select_columns(wanted)
    else:
        info, rows_of = data_sets.load_tfds(name)
        features, rows = info.features, rows_of(named or split)
    _check_columns(columns, features)
    names = None
    if label in features:  # a class, or a list of classes
        names = getattr(getattr(features[label], "feature", features[label]), "names", None)
    return names, ((f"row {n}", row) for n, row in enumerate(rows, 1))


def _check_columns(wanted: Iterable[str], there: Iterable[str]) -> None:
    for column in wanted:
        if column not in there:
            raise ValueError(f"there is no column {column!r} among {', '.join(there)}")


READERS = {
    "csv": lambda file, split, columns, label: (None, _csv(file, columns)),
    "jsonl": lambda file, split, columns, label: (None, _jsonl(file)),
    "conll": lambda file, split, columns, label: (None, _conll(file, columns, label)),
    "hf": functools.partial(_library, "hf"),
    "tfds": functools.partial(_library, "tfds"),
}
