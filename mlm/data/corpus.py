"""A corpus as an ordered list of parts, which are listed without being read, and the documents of each part."""

import dataclasses
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from ml_collections import ConfigDict

from mlm.data import data_sets, results, sources
from mlm.errors import InputError
from mlm.paths import UPath

SOURCES = "config.corpus.sources"


class Part(NamedTuple):
    """A piece of a source that one task reads."""

    source: str  # as in config.corpus.sources
    split: str  # "train", "validation" or "test" if the source says so itself, else ""
    name: str  # for messages and for looking up a document
    bytes: int  # about, of what is read; 0 if unknown
    where: tuple[Any, ...]  # what the reader of its kind needs; it changes when the part does
    # without such a split: the held-out splits that take some of its groups
    cut: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The sources of a corpus and how their documents are split: the keys of config.corpus."""

    sources: tuple[str, ...]
    weights: tuple[float, ...]
    field: str
    streaming: bool
    group: str
    validation_fraction: float
    validation_groups: tuple[str, ...]
    max_documents: int
    keep_out: tuple[str, ...]
    test_fraction: float
    test_groups: tuple[str, ...]
    key: str = SOURCES  # the key or flag that names `sources`

    @classmethod
    def from_config(cls, corpus: ConfigDict) -> Self:
        """Returns the corpus of config.corpus."""
        return cls(**corpus)

    def kept_out(self) -> Self:
        """Returns the corpus of the texts to keep out."""
        return self.of_texts(self.keep_out, "config.corpus.keep_out")

    def of_texts(self, names: tuple[str, ...], key: str) -> Self:
        """Returns the corpus of all documents of other sources, which are not trained on."""
        return dataclasses.replace(
            self, sources=names, key=key, keep_out=(), group=sources.DOCUMENT, max_documents=0
        )

    @property
    def named_groups(self) -> tuple[str, ...]:
        """The groups that the config names for a held-out split."""
        return self.validation_groups + self.test_groups

    def parts(self) -> list[Part]:
        """Lists the parts of all sources, none of them read; raises InputError for a source that isn't there.

        The sources' own test splits come first, so that of equal documents theirs stays; the others are in order.
        """
        all_parts = []
        names = {}
        roles = defaultdict(set)
        for source in dict.fromkeys(self.sources):
            with data_sets.readable(source, self.key):
                kind = self._kind(source)
                parts = [Part(source, *part) for part in kind.parts()]
            if not parts:
                raise self.without_text(source)
            names[source] = type(kind), kind.name
            roles[names[source]] |= {part.split for part in parts}
            all_parts += parts
        held_out = (
            ("validation", "test") if self.test_fraction or self.test_groups else ("validation",)
        )
        for number, part in enumerate(all_parts):
            if part.split not in ("validation", "test"):
                cut = tuple(split for split in held_out if split not in roles[names[part.source]])
                all_parts[number] = part._replace(split="" if cut else "train", cut=cut)
        if self.key == SOURCES and not any(part.split in ("", "train") for part in all_parts):
            raise InputError(
                f"config.corpus.sources: {', '.join(self.sources)} holds no split to train on; add one."
            )
        return sorted(all_parts, key=lambda part: part.split != "test")

    def check(self, source: str) -> None:
        """Raises InputError if a source isn't there, or its first row can't be read or lacks a column."""
        with data_sets.readable(source, self.key):
            if self._kind(source).check():
                return
        raise self.without_text(source)

    def without_text(self, source: str) -> InputError:
        """Returns the error of a source without documents."""
        return InputError(f"{self.key}: {source} has no text in it.")

    def limited(self, parts: list[Part], *, texts: str) -> list[tuple[Part, int]]:
        """Returns the parts that hold the first `max_documents` of each split of each source, and how many to read.

        That is 0 for all of a part.
        """
        if not self.max_documents:
            return [(part, 0) for part in parts]
        limits = []
        left = dict.fromkeys(((part.source, part.split) for part in parts), self.max_documents)
        for part in parts:
            if limit := left[part.source, part.split]:
                limits.append((part, limit))
                documents = itertools.islice(self.read(part, texts=texts, keep=True), limit)
                left[part.source, part.split] -= sum(1 for _ in documents)
        return limits

    def read(self, part: Part, *, texts: str, keep: bool = False) -> Iterator[sources.Document]:
        """Yields the documents of a part that have text; raises InputError with the place of what can't be read.

        The folder `texts` holds the text of sources that are slow to read; to `keep` it there, all is read at once.
        """
        kind = self._kind(part.source)
        kept = UPath(f"{texts}/{results.key(part, self.group)}.json")
        if kind.slow and kept.is_file():
            yield from itertools.starmap(sources.Document, results.load_json(kept))
            return
        with data_sets.readable(part.source, self.key):
            documents = (document for document in kind.read(part.where) if document.text.strip())
            if kind.slow and keep:
                documents = list(documents)
                results.save_json(kept, documents)
            yield from documents

    def _kind(self, source: str) -> sources.Kind:
        name, _, rest = source.partition(":")
        return sources.KINDS[name](
            rest, field=self.field, group=self.group, streaming=self.streaming
        )

    def split_of(self, part: Part, group: str, number: int) -> str:
        """Returns the split of a document: its source's, or its group's; `number` is the text's hash."""
        if part.split:
            return part.split
        number = text_hash(group) if group else number
        groups = {"validation": self.validation_groups, "test": self.test_groups}
        by_hash = {
            "validation": number < self.validation_fraction * 2**64,
            "test": number >= (1 - self.test_fraction) * 2**64,
        }
        splits = [split for split in part.cut if group in groups[split]]
        splits += [split for split in part.cut if by_hash[split] and not (group and groups[split])]
        return splits[0] if splits else "train"


def text_hash(text: str) -> int:
    """Returns 64 bits of BLAKE2b of a text: they identify duplicates, and decide the split of a document or group."""
    # a group may be the name of a file, which need not be UTF-8
    data = text.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
