"""Map: a part of the corpus -> its tokens, and tables of its documents and blocks, in files named by what they hold.

    {key}.tokens     uint16 or uint32, special tokens included, block after block
    {key}.documents  DOCUMENT of each document, in that order
    {key}.hashes     uint64 [1025], then ENTRY of each document by hash and place: those of range i of the 1024 of the
                     hashes are the items from the i-th of the numbers up to the next
    {key}.bands      near_duplicates.BAND of the documents, by hash in the same way, if near duplicates are left out
    {key}.kept_out   uint32 places of the documents that are left out since they hold text of corpus.keep_out
    {key}.groups     JSON {group: bytes} of the largest groups, and those that corpus.validation_groups names
    {key}.blocks     BLOCK of each block; written last

A block is about so many bytes of consecutive documents of one split. The key is a hash of the part, the tokenizer and
the settings.
"""

import functools
import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from mlm.data import keep_out, near_duplicates, results, tokenizer
from mlm.data.corpus import Corpus, Part, text_hash
from mlm.data.manifest import SPLITS
from mlm.paths import UPath

RANGES = 1024
BATCH_DOCUMENTS = 256  # tokenized in one call
GROUPS = 1000  # whose sizes are known to messages
DOCUMENT = np.dtype([("place", "<u4"), ("tokens", "<u4"), ("bytes", "<u4")])  # bytes of UTF-8
ENTRY = np.dtype([("hash", "<u8"), ("place", "<u4"), ("row", "<u4"), ("block", "<u4"), ("tokens", "<u4")])
BLOCK = np.dtype(
    [
        ("hash", "<u8"),
        ("split", "<u4"),  # index in SPLITS
        ("row", "<u4"),  # of its first document
        ("documents", "<u4"),
        ("offset", "<u8"),  # of its first token
        ("tokens", "<u8"),
        ("bytes", "<u8"),
    ]
)


class Map(NamedTuple):
    """A task of `map_part`."""

    part: Part
    corpus: Corpus
    most: int  # documents to read; 0 for all
    tokenizer_folder: str
    fingerprint: str  # of the tokenizer
    block_bytes: int
    keep_out: tuple[str, ...]  # keys of what `keep_out.hash_part` has made
    texts: str  # folder for the text of sources that are slow to read
    folder: str
    key: str


def map_part(task: Map) -> None:
    """Writes the files of a part in one pass over its text."""
    base = f"{task.folder}/{task.key}"
    groups: Counter[str] = Counter()
    with results.written(UPath(f"{base}.tokens")) as file, file.open("wb") as out:
        blocks = _Blocks(task, out)
        for place, (text, group) in enumerate(task.corpus.read(task.part, texts=task.texts)):
            if task.most and place == task.most:
                break
            number, size = text_hash(text), len(text.encode())
            split = SPLITS.index(task.corpus.split_of(task.part, group, number))
            if group and not task.part.split:
                groups[group] += size
            blocks.add(split, text, (number, place, size))
        for split in range(len(SPLITS)):
            blocks.flush(split)
    entries, table = (np.concatenate(parts) for parts in (blocks.entries, blocks.documents))
    results.save(UPath(f"{base}.documents"), table)
    entries = entries[np.lexsort((entries["place"], entries["hash"]))]
    results.save_cut(UPath(f"{base}.hashes"), entries, results.hash_stops(entries["hash"], RANGES))
    if task.corpus.near_duplicates:
        bands = np.sort(np.concatenate(blocks.bands), order=["hash", "place"])
        stops = results.hash_stops(bands["hash"], near_duplicates.RANGES)
        results.save_cut(UPath(f"{base}.bands"), bands, stops)
    results.save(UPath(f"{base}.kept_out"), np.array(blocks.kept_out, np.uint32))
    named = {group: groups[group] for group in task.corpus.validation_groups if group in groups}
    results.save_json(UPath(f"{base}.groups"), dict(groups.most_common(GROUPS)) | named)
    results.save(UPath(f"{base}.blocks"), np.array(blocks.made, BLOCK))


class _Blocks:
    """Cuts the documents of each split into blocks, and writes their tokens as they fill."""

    def __init__(self, task: Map, out):
        self._tokenizer, self._most, self._out = _loaded(task.tokenizer_folder, task.fingerprint), task.block_bytes, out
        self._dtype = token_dtype(self._tokenizer.get_vocab_size())
        self._texts: list[list[str]] = [[] for _ in SPLITS]
        self._numbers: list[list[tuple[int, int, int]]] = [[] for _ in SPLITS]  # hash, place and bytes of each
        self._sizes = [0 for _ in SPLITS]
        self._rows = self._offset = 0
        self.made: list[tuple[int, ...]] = []  # BLOCK
        self._keep_out = keep_out.load(task.folder, task.keep_out)
        self._near_duplicates = task.corpus.near_duplicates > 0
        self.bands, self.kept_out = [np.zeros(0, near_duplicates.BAND)], []
        self.entries, self.documents = [np.zeros(0, ENTRY)], [np.zeros(0, DOCUMENT)]

    def add(self, split: int, text: str, numbers: tuple[int, int, int]) -> None:
        self._texts[split].append(text)
        self._numbers[split].append(numbers)
        self._sizes[split] += numbers[2]
        if self._sizes[split] >= self._most:
            self.flush(split)

    def flush(self, split: int) -> None:
        texts, numbers = self._texts[split], np.array(self._numbers[split], np.uint64).reshape(-1, 3)
        self._texts[split], self._numbers[split], self._sizes[split] = [], [], 0
        if SPLITS[split] == "train":
            held = keep_out.holds(texts, self._keep_out)
            self.kept_out += numbers[held, 1].tolist()
            texts, numbers = list(itertools.compress(texts, ~held)), numbers[~held]
        if not texts:
            return
        hashes, places, sizes = numbers.T
        ids, lengths = _tokenize(self._tokenizer, texts)
        self._out.write(np.array(ids, self._dtype).data)
        entries, documents = np.zeros(len(texts), ENTRY), np.zeros(len(texts), DOCUMENT)
        entries["hash"], entries["place"], entries["tokens"] = hashes, places, lengths
        entries["row"], entries["block"] = self._rows + np.arange(len(texts)), len(self.made)
        documents["place"], documents["tokens"], documents["bytes"] = places, lengths, sizes
        number = text_hash(hashes.tobytes().hex())
        self.made.append((number, split, self._rows, len(texts), self._offset, len(ids), int(sizes.sum())))
        self.entries.append(entries)
        self.documents.append(documents)
        if self._near_duplicates:
            self.bands.append(near_duplicates.bands(texts, places, entries["row"]))
        self._rows, self._offset = self._rows + len(texts), self._offset + len(ids)


@functools.lru_cache(1)
def _loaded(folder: str, fingerprint: str) -> Tokenizer:
    """Returns the tokenizer for the parts that this process maps; another one has another fingerprint."""
    return tokenizer.without_limits(folder)


def _tokenize(tok: Tokenizer, texts: list[str]) -> tuple[list[int], list[int]]:
    """Returns the ids of some texts, one after the other, and the tokens of each."""
    ids, lengths = [], []
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        for encoding in tok.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS]):
            ids += encoding.ids
            lengths.append(len(encoding.ids))
    return ids, lengths


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of a token in the files."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
