"""Map: a part of the corpus -> its tokens, and tables of its documents and blocks, in files named by what they hold.

    {key}.tokens     uint16 or uint32, special tokens included, block after block
    {key}.documents  DOCUMENT of each document, in that order
    {key}.hashes     ENTRY of each document by hash and place, in RANGES pieces, see `results.save_cut`
    {key}.bands      near_duplicates.BAND of the documents, in the same way, if near duplicates are left out
    {key}.kept_out   uint32 places of the documents that are left out since they hold text of corpus.keep_out
    {key}.groups     JSON {group: bytes} of the largest groups, and those that the config names
    {key}.blocks     BLOCK of each block; written last

A block is consecutive documents of one split. The key is a hash of the part, the tokenizer and the settings.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from mlm.data import keep_out, near_duplicates, results, tokenizer
from mlm.data.corpus import Corpus, Part, text_hash
from mlm.data.manifest import SPLITS
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.paths import UPath

RANGES = 1024
WIDTH = np.uint64(2**64 // RANGES)
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
    limit: int  # documents to read; 0 for all
    tokenizer_folder: str
    fingerprint: str  # of the tokenizer
    block_bytes: int
    keep_out: tuple[str, ...]  # keys of what `keep_out.hash_part` has written
    texts: str  # folder for the text of sources that are slow to read
    folder: str
    key: str


def map_part(task: Map) -> None:
    """Writes the files of a part in one pass over its text."""
    base, groups, block_rows, kept_out = f"{task.folder}/{task.key}", Counter(), [], []
    columns, bands = [np.zeros((0, 4), np.uint64)], [np.zeros(0, near_duplicates.BAND)]
    fast, keep_out_S = _loaded(task.tokenizer_folder, task.fingerprint), keep_out.load(task.folder, task.keep_out)
    row, offset, dtype = 0, 0, token_dtype(vocabulary_size(fast))
    with results.written(UPath(f"{base}.tokens")) as file, file.open("wb") as out:
        for split, block in _cut(task, groups):
            texts = [text for text, *_ in block]
            numbers = np.array([document[1:] for document in block], np.uint64).reshape(-1, 3)
            if SPLITS[split] == "train":
                is_kept_out = keep_out.holds(texts, keep_out_S)
                kept_out += numbers[is_kept_out, 1].tolist()
                texts, numbers = list(itertools.compress(texts, ~is_kept_out)), numbers[~is_kept_out]
            if not texts:
                continue
            ids, lengths = [], []
            for first in range(0, len(texts), BATCH_DOCUMENTS):
                for encoding in fast.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS]):
                    ids += encoding.ids
                    lengths.append(len(encoding.ids))
            out.write(np.array(ids, dtype).data)
            hashes, places, sizes = numbers.T
            block_hash = text_hash(hashes.tobytes().hex())
            block_rows.append((block_hash, split, row, len(texts), offset, len(ids), int(sizes.sum())))
            columns.append(np.column_stack([numbers, np.array(lengths, np.uint64)]))
            if task.corpus.near_duplicates:
                bands.append(near_duplicates.bands(texts, places, np.arange(row, row + len(texts))))
            row, offset = row + len(texts), offset + len(ids)
    hashes, places, sizes, lengths = np.concatenate(columns).T
    documents, entries, blocks = np.zeros(row, DOCUMENT), np.zeros(row, ENTRY), np.array(block_rows, BLOCK)
    documents["place"], documents["tokens"], documents["bytes"] = places, lengths, sizes
    entries["hash"], entries["place"], entries["tokens"] = hashes, places, lengths
    entries["row"], entries["block"] = np.arange(row), np.repeat(np.arange(len(blocks)), blocks["documents"])
    results.save(UPath(f"{base}.documents"), documents)
    entries = entries[np.lexsort((entries["place"], entries["hash"]))]
    results.save_cut(UPath(f"{base}.hashes"), entries, entries["hash"] // WIDTH, RANGES)
    if task.corpus.near_duplicates:
        bands = np.sort(np.concatenate(bands), order=["hash", "place"])
        results.save_cut(UPath(f"{base}.bands"), bands, bands["hash"] // WIDTH, RANGES)
    results.save(UPath(f"{base}.kept_out"), np.array(kept_out, np.uint32))
    group_names = task.corpus.validation_groups + task.corpus.test_groups
    named_groups = {group: groups[group] for group in group_names if group in groups}
    results.save_json(UPath(f"{base}.groups"), dict(groups.most_common(GROUPS)) | named_groups)
    results.save(UPath(f"{base}.blocks"), blocks)


def _cut(task: Map, groups: Counter[str]) -> Iterator[tuple[int, list[tuple[str, int, int, int]]]]:
    """Yields each block's split and documents (text, hash, place, bytes); counts the bytes of the groups."""
    blocks, sizes = [[] for _ in SPLITS], [0 for _ in SPLITS]
    documents = task.corpus.read(task.part, texts=task.texts)
    for place, (text, group) in enumerate(itertools.islice(documents, task.limit or None)):
        number, size = text_hash(text), len(text.encode())
        split = SPLITS.index(task.corpus.split_of(task.part, group, number))
        if group and not task.part.split:
            groups[group] += size
        blocks[split].append((text, number, place, size))
        sizes[split] += size
        if sizes[split] >= task.block_bytes:
            yield split, blocks[split]
            blocks[split], sizes[split] = [], 0
    yield from enumerate(blocks)


@functools.lru_cache(1)
def _loaded(folder: str, fingerprint: str) -> Tokenizer:
    return tokenizer.load_for_corpus(folder)


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of a token in the files."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
