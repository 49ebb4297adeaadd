"""The kinds of sources of a corpus: their parts, listed without reading them, and the documents of a part.

    docstrings            of the packages that requirements.txt pins: about 40 MB of English on every machine
    text:GLOB             a document per line (.gz too), as with run_mlm's --line_by_line and in WikiText
    jsonl:GLOB#FIELD      a field of each line (.gz too)
    hf:NAME[:CONFIG]      a data set of the Hugging Face Hub, or a local folder of one
    tfds:NAME             a data set of TensorFlow Datasets, or a prepared folder of one

Of a data set, #SPLIT names one split, or a slice of it ("train[:90%]"). See data_sets.py for what splits are used as.
GLOBs are local or gs://. To add a source: a class like `_Lines` here, and its name in `KINDS`.
"""

import functools
import itertools
import numbers
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mlm.data import data_sets, docstrings, lines
from mlm.files import find_files, read_stat, split_field, split_pattern
from mlm.paths import of_a_command
from mlm.text import is_text

PART_BYTES = (10**6, 256 * 10**6)  # of a part, if its source can be cut: the least and the most
PARTS = 1024  # of a corpus between those two, so that there is work for many
DOCUMENT = "document"
FILE = "file"  # values of corpus.group that are not a field


# of a source: (the role of its split, name, bytes, where), see `corpus.Part`
Parts = Iterable[tuple[str, str, int, tuple]]


class Document(NamedTuple):
    """A text and its group; "" if it is a group of its own."""

    text: str
    group: str


class Kind:
    """A kind of source."""

    slow = False  # to read, so that the tokenizer and the shards share its text
    files = False
    fields = True  # whether documents can be grouped by them

    def __init__(self, rest: str, *, field: str, group: str, streaming: bool):
        """Takes the text of the source after its colon, and keys of config.corpus."""
        self.rest = rest
        self.group = group
        self.streaming = streaming
        self.name = rest  # without the split of a data set
        self.columns = [field]  # of a document: its text and, if corpus.group names a field, that
        if group not in ("", DOCUMENT, FILE):
            self.columns.append(group)
        if (group == FILE and not self.files) or (len(self.columns) > 1 and not self.fields):
            raise ValueError(f"its documents can't be grouped by corpus.group = {group}")

    def parts(self) -> Parts:
        """Lists the parts, without reading them."""

    def read(self, where: tuple) -> Iterator[Document]:
        """Yields the documents of a part; what a document is, each kind decides for itself."""

    def check(self) -> bool:
        """Returns whether there is text; raises ValueError if the first row can't be read, or lacks a column."""
        return any(
            document.text.strip() for part in self.parts() for document in self.read(part[3])
        )

    def from_row(self, row: dict[str, Any], group: str = "") -> Document:
        """Returns the document of a row; its group is `group` or, if corpus.group names a field, in that.

        A text that is null is empty.
        """
        values = []
        for name in self.columns:
            if name not in row:
                raise ValueError(f"has no field {name!r}")
            value = "" if row[name] is None else row[name]
            value = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
            # the group: many data sets number their documents
            if values and isinstance(value, numbers.Integral):
                value = str(int(value))
            if not is_text(value):
                raise ValueError(f"the field {name!r} is not a string of valid Unicode")
            values.append(value)
        return Document(values[0], values[1] if self.columns[1:] else group)

    def from_rows(
        self, rows: Iterable[dict[str, Any]], place: str, first: int = 0
    ) -> Iterator[Document]:
        """Yields the documents of a library's rows, of which `first` come before."""
        for number, row in enumerate(rows, first + 1):
            try:
                yield self.from_row(row)
            except ValueError as error:
                raise ValueError(f"{place}, row {number}: {error}") from None


class _Docstrings(Kind):
    slow = files = True

    def parts(self) -> Parts:
        return (
            ("", f"{m.package} {m.version}[{m.first}:]", m.bytes, m) for m in docstrings.parts()
        )

    def read(self, where: tuple) -> Iterator[Document]:
        modules = docstrings.Modules(*where)
        for file, text in docstrings.read_docstrings(modules):
            yield Document(text, {DOCUMENT: "", FILE: file}.get(self.group, modules.package))


class _Lines(Kind):
    """Files of lines: small ones are read together, large ones that are not compressed are cut at line ends."""

    files = True
    fields = False

    def parts(self) -> Parts:
        # 0 bytes of a part mean that they are unknown
        files = [file for file in find_files(self.rest) if file.size]
        limit = part_bytes(sum(file.size for file in files))
        pieces_of_parts = [[]]
        size_of_part = 0
        for name, size, stamp in files:
            whole = lines.is_gzip(name) or size <= limit
            cuts = [0, size] if whole else [*range(0, size - limit // 2, limit), size]
            for start, stop in itertools.pairwise(cuts):
                if pieces_of_parts[-1] and size_of_part + stop - start > limit:
                    pieces_of_parts.append([])
                    size_of_part = 0
                pieces_of_parts[-1].append((name, start, stop, stamp))
                size_of_part += stop - start
        for pieces in filter(None, pieces_of_parts):
            (first, start, stop, _) = pieces[0]
            others = len(pieces) - 1
            name = f"{first} and {others} more files" if others else f"{first}[{start}:{stop}]"
            yield "", name, sum(piece[2] - piece[1] for piece in pieces), tuple(pieces)

    def read(self, where: tuple) -> Iterator[Document]:
        folder = split_pattern(self.rest)[0]
        for name, start, stop, stamp in where:
            status = read_stat(name)
            if status is None or status.stamp != stamp:
                raise ValueError(
                    f"{name} has changed since it was listed; start the same command again"
                )
            group = name.removeprefix(f"{folder}/") if self.group == FILE else ""
            parse = functools.partial(self.from_line, group=group)
            yield from lines.read_file(name, parse, start, stop)

    def from_line(self, line: str, group: str) -> Document:
        return Document(line.strip(), group)


class _JsonLines(_Lines):
    fields = True

    def __init__(self, rest: str, *, field: str, **settings: Any):
        pattern, name = split_field(rest)
        super().__init__(pattern, field=name or field, **settings)

    def from_line(self, line: str, group: str) -> Document:
        if not line.strip():
            return Document("", "")
        return self.from_row(lines.json_object(line), group)


class _HuggingFace(Kind):
    """A data set with splits of its own, or one of them."""

    library = "hf"

    def __init__(self, rest: str, **settings: Any):
        super().__init__(rest, **settings)
        self.name, self.split = data_sets.named_split(rest)

    def check(self) -> bool:
        data_sets.check_first_row(self.library, self.name, self.split, self.columns)
        return True

    def parts(self) -> Parts:
        import datasets

        loaded = _loaded_hf(self.name, streaming=self.streaming)
        builder = datasets.load_dataset_builder(*data_sets.hf_name(self.name))
        version = f"{builder.config_id} {builder.hash}"  # changes with the data
        if self.streaming:
            if re.search(r"[\[+]", self.split):
                raise ValueError(
                    f"corpus.streaming reads whole splits, not {self.split}; set it to false"
                )
            for split, _, _, role in data_sets.splits_to_read(dict.fromkeys(loaded, 0), self.split):
                for n in range(loaded[split].num_shards):
                    yield (
                        role,
                        f"{split}, shard {n}",
                        0,
                        (split, n, loaded[split].num_shards, version),
                    )
            return
        rows = {split: data.num_rows for split, data in loaded.items()}
        for split, first, last, role in data_sets.splits_to_read(rows, self.split):
            size = getattr((loaded[split].info.splits or {}).get(split), "num_bytes", None) or 0
            step = max(1, rows[split] * part_bytes(size) // size if size else rows[split])
            for start, stop in itertools.pairwise([*range(first, last, step), last]):
                part_size = size * (stop - start) // rows[split]
                yield role, f"{split}[{start}:{stop}]", part_size, (split, start, stop, version)

    def read(self, where: tuple) -> Iterator[Document]:
        split, first, second, _ = where
        data_set = _loaded_hf(self.name, streaming=self.streaming)[split]
        if self.streaming:
            rows = data_set.shard(second, first)
            place = f"{split}, shard {first}"
            before = 0
        else:
            rows = data_set.select(range(first, second))
            place = split
            before = first
        with data_sets.hf_errors():
            yield from self.from_rows(
                rows.select_columns(list(dict.fromkeys(self.columns))), place, before
            )


class _TensorFlow(_HuggingFace):
    library = "tfds"

    def parts(self) -> Parts:
        info, _ = data_sets.load_tfds(self.name)
        rows = {split: details.num_examples for split, details in info.splits.items()}
        for split, first, last, role in data_sets.splits_to_read(rows, self.split):
            ends = list(itertools.accumulate(info.splits[split].shard_lengths))
            size = info.splits[split].num_bytes // max(1, len(ends))
            cuts = [first, *(end for end in ends if first < end < last), last]
            for start, stop in itertools.pairwise(cuts if first < last else ()):
                yield (
                    role,
                    f"{split}[{start}:{stop}]",
                    size,
                    (f"{split}[{start}:{stop}]", info.full_name),
                )

    def read(self, where: tuple) -> Iterator[Document]:
        return self.from_rows(data_sets.load_tfds(self.name)[1](where[0]), where[0])


KINDS = {
    "docstrings": _Docstrings,
    "text": _Lines,
    "jsonl": _JsonLines,
    "hf": _HuggingFace,
    "tfds": _TensorFlow,
}


def part_bytes(total: int) -> int:
    """Returns the bytes of a part of a source of `total` bytes: it depends on nothing else, so neither do the parts."""
    return min(max(total // PARTS, PART_BYTES[0]), PART_BYTES[1])


_loaded_hf = of_a_command(functools.lru_cache(1)(data_sets.load_hf))
