"""Text sources -> documents: streamed, without duplicates, with a validation split that never changes.

    docstrings            of the packages that requirements.txt pins: about 50 MB of English on every machine
    text:GLOB             a document per line (.gz too), as with run_mlm's --line_by_line and in WikiText
    jsonl:GLOB#FIELD      a field of each line (.gz too)
    hf:NAME[:CONFIG]      a data set of the Hugging Face Hub, or a local folder of one
    tfds:NAME             a data set of TensorFlow Datasets

GLOBs are local or gs://. To add a source: a reader like `_jsonl` here, and its name in `READERS`.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import itertools
import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import fsspec
import numpy as np

from mlm.data import batches, docstrings
from mlm.errors import InputError
from mlm.text import is_text

CHUNK = 4096  # documents looked up together among those seen before, unless they have
CHUNK_CHARACTERS = 2**24  # together
SPREAD = 2**25  # characters between two copies of a document: in one row, each would give away the other's masks

Splits = Iterable[tuple[str, Iterator[str]]]  # (split, its texts); "" for texts that are split by their hash


class Document(NamedTuple):
    """A text and its split: "train" or "validation", or "" if its hash decides."""

    text: str
    split: str


@dataclasses.dataclass
class Corpus:
    """The documents of all sources, alternating between them, in an order that is always the same.

    A text that came before is dropped. Whether a document is validation depends on its text alone, unless the source
    says so itself. Training documents come as often as the weight of their source says: 2.5 times is twice, and once
    more for the half of them that their hash picks; the copies are far apart. Validation documents come once.
    """

    sources: tuple[str, ...]  # this and the next five are keys of config.corpus
    weights: tuple[float, ...]
    field: str
    streaming: bool
    validation_fraction: float
    max_documents: int
    counts: Counter = dataclasses.field(default_factory=Counter)  # of "{split} documents" and "{split} duplicates"

    def __iter__(self) -> Iterator[Document]:
        """Reads the sources; raises InputError for one that can't be read or has no text."""
        streams = deque(zip(map(self._read, self.sources), self.weights, strict=True))
        return _spread(self._deduplicated(_alternating(streams)))

    def _read(self, source: str) -> Iterator[Document]:
        """Yields the documents of one source, at most `max_documents` of each of its splits (0: all)."""
        kind, _, rest = source.partition(":")
        found = False
        try:
            for split, texts in READERS[kind](rest, field=self.field, streaming=self.streaming):
                for text in itertools.islice(filter(str.strip, texts), self.max_documents or None):
                    found = True
                    yield Document(text, split)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"config.corpus.sources: {source} can't be read: {reason}") from error
        if not found:
            raise InputError(f"config.corpus.sources: {source} has no text in it.")

    def _deduplicated(self, stream: Iterator[tuple[Document, float]]) -> Iterator[tuple[Document, int]]:
        """Yields (document with its split, number of copies) for (document, weight), without duplicates."""
        seen = Seen()
        for chunk in _chunks(stream):
            hashes = np.array([text_hash(document.text) for document, _ in chunk], np.uint64)
            for (document, weight), number, new in zip(chunk, hashes.tolist(), seen.add(hashes).tolist(), strict=True):
                by_hash = "validation" if number < self.validation_fraction * 2**64 else "train"
                split = document.split or by_hash
                if not new:
                    self.counts[f"{split} duplicates"] += 1
                    continue
                copies = 1 if split == "validation" else int(weight) + (number % 2**32 < (weight % 1) * 2**32)
                self.counts[f"{split} documents"] += copies
                if copies:
                    yield Document(document.text, split), copies


def _alternating(streams: deque[tuple[Iterator[Document], float]]) -> Iterator[tuple[Document, float]]:
    """Yields (document, weight) from each stream in turn."""
    while streams:
        stream, weight = streams.popleft()
        for document in itertools.islice(stream, 1):
            yield document, weight
            streams.append((stream, weight))


def _chunks(stream: Iterable[tuple[Document, float]]) -> Iterator[list[tuple[Document, float]]]:
    """Cuts the stream into lists of few documents and few characters: a document may be a book."""
    chunk, size = [], 0
    for pair in stream:
        chunk.append(pair)
        size += len(pair[0].text)
        if len(chunk) == CHUNK or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _spread(stream: Iterator[tuple[Document, int]]) -> Iterator[Document]:
    """Yields each document as often as it has copies: at once, and again after SPREAD characters of other text."""
    waiting: deque[tuple[Document, int]] = deque()
    size = 0
    for document, copies in itertools.chain(stream, [(None, 0)]):
        if document is not None:
            yield document
        if copies > 1:
            waiting.append((document, copies - 1))
            size += len(document.text)
        while size > (0 if document is None else SPREAD):
            again, left = waiting.popleft()
            yield again
            if left > 1:
                waiting.append((again, left - 1))
            else:
                size -= len(again.text)


# What a document is, each reader decides for itself.


def _jsonl(pattern: str, *, field: str, **_options: Any) -> Splits:
    pattern, _, name = pattern.partition("#")
    yield "", (_field(line, name or field, where) for where, line in _lines(pattern) if line.strip())


def _hf(name: str, *, field: str, streaming: bool) -> Splits:
    loaded = load_hf(name, streaming=streaming)
    for split, own in _own_splits(loaded):
        yield own, (_string(row[field], field) for row in loaded[split].select_columns([field]))


def _tfds(name: str, *, field: str, **_options: Any) -> Splits:
    info, rows = load_tfds(name)
    for split, own in _own_splits(info.splits):
        yield own, (_string(row[field], field) for row in rows(split))


READERS = {
    "docstrings": lambda rest, **_: [("", docstrings.read())],
    "text": lambda pattern, **_: [("", (line.strip() for _, line in _lines(pattern)))],
    "jsonl": _jsonl,
    "hf": _hf,
    "tfds": _tfds,
}


def _own_splits(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (split of the source, ours), validation first, so that it keeps a text that train has too.

    The test split is not read; without a validation split, the texts of the others are split by their hash.
    """
    if "validation" in names:
        yield "validation", "validation"
    for name in sorted(set(names) - {"validation", "test"}):
        yield name, "train" if "validation" in names else ""


def load_hf(name: str, **options: Any) -> Any:
    """Returns what `datasets.load_dataset` does for NAME[:CONFIG]; raises ValueError for a bad data set."""
    import datasets

    name, _, config = name.partition(":")
    try:
        return datasets.load_dataset(name, config or None, trust_remote_code=False, **options)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def load_tfds(name: str) -> tuple[Any, Callable[[str], Iterable[dict[str, Any]]]]:
    """Returns a data set of TensorFlow Datasets: its `info`, and a function from a split to its rows, in order."""
    batches.import_tensorflow()
    import tensorflow_datasets as tfds

    builder = tfds.builder(name)
    builder.download_and_prepare()
    return builder.info, lambda split: tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False))


def _string(value: str | bytes | None, field: str) -> str:
    """Returns the text of a data set's field; a missing one is empty."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str | None):
        raise ValueError(f"the field {field!r} is not a string")
    return value or ""


def _field(line: str, name: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON") from error
    if not isinstance(row, dict) or name not in row:
        raise ValueError(f"{where}: has no field {name!r}")
    if not is_text(row[name]):
        raise ValueError(f"{where}: the field {name!r} is not a string of valid Unicode")
    return row[name]


def _lines(pattern: str) -> Iterator[tuple[str, str]]:
    """Yields (file and number, line) of the files of a glob, in an order that mixes them but is always the same."""
    system, path = fsspec.core.url_to_fs(pattern)
    paths = [p for p in system.glob(path) if not system.isdir(p)]
    if not paths:
        raise FileNotFoundError("no such file")
    for name in sorted(paths, key=lambda p: hashlib.sha256(p.rpartition("/")[2].encode()).digest()):
        unpack = gzip.open if name.endswith(".gz") else contextlib.nullcontext
        with system.open(name, "rb") as file, unpack(file) as lines:
            number = 0
            try:
                for number, line in enumerate(lines, 1):
                    yield f"{name}, line {number}", line.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{name}, line {number}: is not UTF-8") from error
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"{name}, after line {number}: {error}") from error


def text_hash(text: str) -> int:
    """Returns 64 bits of BLAKE2b of a text: they identify duplicates, and decide a document's split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Seen:
    """A set of 64-bit hashes in 8 bytes each: a log-structured merge-tree (O'Neil et al., 1996) in memory."""

    def __init__(self) -> None:
        self._levels: list[np.ndarray] = []

    def add(self, hashes_N: np.ndarray) -> np.ndarray:
        """Adds uint64 hashes; returns bool [N]: True for the first time that a hash comes."""
        values, first = np.unique(hashes_N, return_index=True)
        known = np.zeros(len(values), bool)
        for level in self._levels:
            index = np.minimum(np.searchsorted(level, values), len(level) - 1)
            known |= level[index] == values
        new_N = np.zeros(len(hashes_N), bool)
        new_N[first[~known]] = True
        level = values[~known]
        while self._levels and len(self._levels[-1]) <= 2 * len(level):
            level = np.sort(np.concatenate([self._levels.pop(), level]), kind="stable")
        if len(level):
            self._levels.append(level)
        return new_N
