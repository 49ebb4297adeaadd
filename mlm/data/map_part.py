"""Map: a part of the corpus -> its tokens, and tables of its documents and blocks, in files named by what they hold.

    {base}.tokens     uint16 or uint32, special tokens included, block after block
    {base}.documents  DOCUMENT of each document, in that order
    {base}.hashes     the same, by hash and place, in RANGES pieces, see `results.save_cut`
    {base}.json       {"blocks": BLOCK of each block, "kept_out": how many documents are left out by corpus.keep_out,
                      "has_groups": whether documents have groups, "named_groups": those that the config names}

A block is consecutive documents of one split.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from mlm.data import keep_out, results, tokenizer
from mlm.data.corpus import Corpus, Part, text_hash
from mlm.data.manifest import SPLITS
from mlm.data.sources import Document
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.paths import UPath

RANGES = 1024  # of the hash: a task of `deduplicate` reads some of them, of all parts
WIDTH = np.uint64(2**64 // RANGES)
DOCUMENT = np.dtype(
    [
        ("hash", "<u8"),
        ("row", "<u4"),  # counted through the blocks of the part
        ("place", "<u4"),  # in the part, as it was read
        ("block", "<u4"),
        ("tokens", "<u4"),
        ("bytes", "<u4"),  # of UTF-8
    ]
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


class ReadDocument(NamedTuple):
    """A document as it was read."""

    text: str
    hash: int
    place: int
    bytes: int


def map_part(
    base: str,
    part: Part,
    limit: int,
    *,
    corpus: Corpus,
    tokenizer_folder: str,
    fingerprint: str,
    block_bytes: int,
    banned: tuple[str, ...],
    texts: str,
) -> dict[str, Any]:
    """Writes the files of a part in one pass over its text; returns what is in the last one.

    Args:
        limit: documents to read; 0 for all.
        fingerprint: of the tokenizer.
        banned: what `keep_out.hash_parts` returns.
        texts: the folder for the text of sources that are slow to read.
    """
    fast = _load_tokenizer(tokenizer_folder, fingerprint)
    index = keep_out.load_index(banned)
    dtype = token_dtype(vocabulary_size(fast))
    groups: set[str] = set()
    kept_out = 0
    blocks: list[tuple[int, ...]] = []
    tables = [np.zeros(0, DOCUMENT)]
    row = offset = 0
    with results.written(UPath(f"{base}.tokens")) as file, file.open("wb") as out:
        documents = itertools.islice(corpus.read(part, texts=texts), limit or None)
        for split, block in _cut_blocks(documents, part, corpus, block_bytes, groups):
            if SPLITS[split] == "train":
                is_banned = index.is_in_texts([document.text for document in block])
                kept_out += int(is_banned.sum())
                block = list(itertools.compress(block, ~is_banned))
            if not block:
                continue
            texts_of_block, hashes, places, sizes = zip(*block, strict=True)
            ids_of_texts = [
                encoding.ids for encoding in fast.encode_batch_fast(list(texts_of_block))
            ]
            table = np.zeros(len(block), DOCUMENT)
            table["hash"] = hashes
            table["row"] = np.arange(row, row + len(block))
            table["place"] = places
            table["block"] = len(blocks)
            table["tokens"] = list(map(len, ids_of_texts))
            table["bytes"] = sizes
            tables.append(table)
            tokens = np.fromiter(itertools.chain.from_iterable(ids_of_texts), dtype)
            out.write(tokens.data)
            # The hash of a block decides its shard and place: of its texts alone, so that other parts don't move it.
            block_hash = text_hash(table["hash"].tobytes().hex())
            blocks.append((block_hash, split, row, len(block), offset, len(tokens), sum(sizes)))
            row += len(block)
            offset += len(tokens)
    documents = np.concatenate(tables)
    results.save(UPath(f"{base}.documents"), documents)
    by_hash = documents[np.lexsort((documents["place"], documents["hash"]))]
    results.save_cut(UPath(f"{base}.hashes"), by_hash, by_hash["hash"] // WIDTH, RANGES)
    return {
        "blocks": blocks,
        "kept_out": kept_out,
        "has_groups": bool(groups),
        "named_groups": sorted(groups.intersection(corpus.named_groups)),
    }


def _cut_blocks(
    documents: Iterable[Document],
    part: Part,
    corpus: Corpus,
    block_bytes: int,
    groups: set[str],
) -> Iterator[tuple[int, list[ReadDocument]]]:
    """Yields the split and the documents of each block; adds to the groups that are cut."""
    blocks: list[list[ReadDocument]] = [[] for _ in SPLITS]
    sizes = [0 for _ in SPLITS]
    for place, (text, group) in enumerate(documents):
        document = ReadDocument(text, text_hash(text), place, len(text.encode()))
        split = SPLITS.index(corpus.split_of(part, group, document.hash))
        if group and not part.split:
            groups.add(group)
        blocks[split].append(document)
        sizes[split] += document.bytes
        if sizes[split] >= block_bytes:
            yield split, blocks[split]
            blocks[split] = []
            sizes[split] = 0
    yield from enumerate(blocks)


@functools.lru_cache(1)
def _load_tokenizer(folder: str, fingerprint: str) -> Tokenizer:
    return tokenizer.load_for_corpus(folder)


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of a token in the files."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
