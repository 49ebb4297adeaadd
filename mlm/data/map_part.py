"""Map: a part of the corpus -> its tokens, and tables of its documents and blocks, in files named by what they hold.

    {key}.tokens     uint16 or uint32, special tokens included, block after block
    {key}.documents  DOCUMENT of each document, in that order
    {key}.hashes     ENTRY of each document by hash and place, in RANGES pieces, see `results.save_cut`
    {key}.kept_out   uint32 places of the documents that are left out since they hold text of corpus.keep_out
    {key}.groups     JSON {group: bytes} of the largest groups, and those that the config names
    {key}.blocks     BLOCK of each block; written last

A block is consecutive documents of one split. The key is a hash of the part, the tokenizer and the settings.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from mlm.data import keep_out, results, tokenizer
from mlm.data.corpus import Corpus, Part, text_hash
from mlm.data.manifest import SPLITS
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.paths import UPath

RANGES = 1024  # of the hash: a task of `deduplicate` reads some of them, of all parts
WIDTH = np.uint64(2**64 // RANGES)
BATCH_DOCUMENTS = 256  # tokenized in one call
GROUPS = 1000  # whose sizes are known to messages
DOCUMENT = np.dtype([("place", "<u4"), ("tokens", "<u4"), ("bytes", "<u4")])  # bytes of UTF-8
ENTRY = np.dtype(
    [("hash", "<u8"), ("place", "<u4"), ("row", "<u4"), ("block", "<u4"), ("tokens", "<u4")]
)
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


class MapTask(NamedTuple):
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


class ReadDocument(NamedTuple):
    """A document as it was read."""

    text: str
    hash: int
    place: int  # in its part
    bytes: int


def map_part(task: MapTask) -> None:
    """Writes the files of a part in one pass over its text."""
    base = f"{task.folder}/{task.key}"
    fast = _load_tokenizer(task.tokenizer_folder, task.fingerprint)
    banned = keep_out.load_index(task.folder, task.keep_out)
    dtype = token_dtype(vocabulary_size(fast))
    groups: Counter[str] = Counter()
    kept_out: list[int] = []
    blocks: list[tuple[int, ...]] = []
    entries = [np.zeros(0, ENTRY)]
    documents = [np.zeros(0, DOCUMENT)]
    row = offset = 0
    with results.written(UPath(f"{base}.tokens")) as file, file.open("wb") as out:
        for split, block in _read_blocks(task, groups):
            if SPLITS[split] == "train":
                is_banned = banned.is_in_texts([document.text for document in block])
                kept_out += [document.place for document in itertools.compress(block, is_banned)]
                block = list(itertools.compress(block, ~is_banned))
            if not block:
                continue
            ids, lengths = _encode(fast, [document.text for document in block])
            out.write(np.array(ids, dtype).data)
            _, hashes, places, sizes = zip(*block, strict=True)

            table = np.zeros(len(block), DOCUMENT)
            table["place"] = places
            table["tokens"] = lengths
            table["bytes"] = sizes
            documents.append(table)

            entry = np.zeros(len(block), ENTRY)
            entry["hash"] = hashes
            entry["place"] = places
            entry["row"] = np.arange(row, row + len(block))
            entry["block"] = len(blocks)
            entry["tokens"] = lengths
            entries.append(entry)

            # The hash of a block decides its shard and place: of its texts alone, so that other parts don't move it.
            block_hash = text_hash(entry["hash"].tobytes().hex())
            blocks.append((block_hash, split, row, len(block), offset, len(ids), sum(sizes)))
            row += len(block)
            offset += len(ids)
    results.save(UPath(f"{base}.documents"), np.concatenate(documents))
    by_hash = np.concatenate(entries)
    by_hash = by_hash[np.lexsort((by_hash["place"], by_hash["hash"]))]
    results.save_cut(UPath(f"{base}.hashes"), by_hash, by_hash["hash"] // WIDTH, RANGES)
    results.save(UPath(f"{base}.kept_out"), np.array(kept_out, np.uint32))
    named = {group: groups[group] for group in task.corpus.named_groups if group in groups}
    results.save_json(UPath(f"{base}.groups"), dict(groups.most_common(GROUPS)) | named)
    results.save(UPath(f"{base}.blocks"), np.array(blocks, BLOCK))


def _read_blocks(task: MapTask, groups: Counter[str]) -> Iterator[tuple[int, list[ReadDocument]]]:
    """Yields the split and the documents of each block; counts the bytes of the groups."""
    blocks: list[list[ReadDocument]] = [[] for _ in SPLITS]
    sizes = [0 for _ in SPLITS]
    documents = itertools.islice(task.corpus.read(task.part, texts=task.texts), task.limit or None)
    for place, (text, group) in enumerate(documents):
        document = ReadDocument(text, text_hash(text), place, len(text.encode()))
        split = SPLITS.index(task.corpus.split_of(task.part, group, document.hash))
        if group and not task.part.split:
            groups[group] += document.bytes
        blocks[split].append(document)
        sizes[split] += document.bytes
        if sizes[split] >= task.block_bytes:
            yield split, blocks[split]
            blocks[split] = []
            sizes[split] = 0
    yield from enumerate(blocks)


def _encode(fast: Tokenizer, texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns the ids of all texts, one after the other, and how many each has."""
    ids: list[int] = []
    lengths: list[int] = []
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        for encoding in fast.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS]):
            ids += encoding.ids
            lengths.append(len(encoding.ids))
    return ids, lengths


@functools.lru_cache(1)
def _load_tokenizer(folder: str, fingerprint: str) -> Tokenizer:
    return tokenizer.load_for_corpus(folder)


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of a token in the files."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
