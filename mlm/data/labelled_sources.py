"""The sources of labelled texts, as rows of named columns.

    csv:FILE                  with a header; .tsv: separated by tabs, without quotes, as in GLUE
    jsonl:FILE                an object a line
    conll:FILE                a word a line, its label in the last column; a blank line ends a sentence
    hf:NAME[:CONFIG][#SPLIT]  a data set of the Hugging Face hub, or a local folder of one
    tfds:NAME[#SPLIT]         a data set of TensorFlow Datasets, or a prepared folder of one

FILEs are local or gs://, read as `lines.py` says (.gz too). SPLIT is written as in its library, for example
"train[:90%]"; the default is the split to be read ("train", "validation", "test"). For token labels the column of text
holds lists of words, that of labels a list of the same length. To add a source: a function here that returns rows, and
its name in `READERS`.
"""

import csv
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from mlm.data import data_sets, lines
from mlm.errors import InputError
from mlm.files import open_file

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # (place, row)
Names = list[str] | None  # of the classes by index, where a library has them

csv.field_size_limit(2**31 - 1)  # characters; the default of 131,072 is less than long documents have

# Readers take (the source after its colon, the split, the columns that must be there, the label's) -> (Names, Rows).


def _csv(file: str, columns: tuple[str, ...], label: str) -> Rows:
    with open_file(file) as raw:
        rows, begin = lines.decoded(lines.read(raw, file), file), 1
        if file.lower().removesuffix(".gz").endswith(".tsv"):
            reader = csv.reader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(rows, strict=True)
        try:
            head = next(reader, [])
            _check_header(head, columns, label)
            begin = reader.line_num + 1
            for cells in reader:
                place, begin = f"line {begin}", reader.line_num + 1  # a quoted text may span several lines
                if cells and len(cells) != len(head):
                    raise InputError(f"csv:{file}, {place}: has {len(cells)} columns where the header has {len(head)}.")
                if cells:
                    yield place, dict(zip(head, cells, strict=True))
        except csv.Error as error:
            row = f", in the row that begins at line {begin}" if begin < reader.line_num else ""
            place = f"csv:{file}, line {reader.line_num}{row}"
            raise InputError(
                f"{place}: {error}; quote a field that has quotes in it, and double each of them."
            ) from error


def _check_header(head: list[str], columns: tuple[str, ...], label: str) -> None:
    separator = next((mark for mark in ";\t,|" if len(head) == 1 and mark in head[0]), "")
    if separator and not set(columns) <= set(head):
        fix = "separate those of a .csv file by commas, those of a .tsv file by tabs"
        raise ValueError(f"its header {head[0]!r:.80} has {separator!r} between the columns; {fix}")
    data_sets.check_columns(columns, head)
    for column in (*columns, label):
        if head.count(column) > 1:
            raise ValueError(f"{head.count(column)} of its columns are named {column!r}; rename all but one")


def _jsonl(file: str) -> Rows:
    with open_file(file) as raw:
        for number, line in enumerate(lines.decoded(lines.read(raw, file), file), 1):
            if not line.strip(lines.SPACES):
                continue
            try:
                row = lines.json_object(line)
            except ValueError as error:
                raise InputError(f"jsonl:{file}, line {number}: {error}.") from None
            yield f"line {number}", row


def _conll(file: str, columns: tuple[str, ...], label: str) -> Rows:
    """Yields sentences. "# ..." before one is a comment unless it ends in a known label, as the word "#" would.

    Columns are separated by tabs, in a line without one by spaces.
    """
    known, words, labels, start = {"O"}, [], [], 0
    with open_file(file) as raw:
        rows = itertools.chain(lines.decoded(lines.read(raw, file), file), [""])
        for number, line in enumerate(rows, 1):
            cells = [cell.strip(lines.SPACES) for cell in line.split("\t")] if "\t" in line else lines.split_words(line)
            if not any(cells) or cells[0] == "-DOCSTART-":
                if words:
                    row = {columns[0]: words}
                    yield f"line {start}", row | {label: labels} if labels else row
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
    name, named_split = data_sets.named_split(name)
    if kind == "hf":
        loaded = data_sets.load_hf(name, split=named_split or split)
        used = [column for column in loaded.column_names if column in (*columns, label)]  # others may be images
        features, rows = loaded.features, loaded.select_columns(used)
    else:
        info, rows_of = data_sets.load_tfds(name)
        features, rows = info.features, rows_of(named_split or split)
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
