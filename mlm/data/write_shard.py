"""Reduce: the blocks of a shard -> its rows, without what is left out.

    {shards}/{split}/dataset-{number}-{records}.tfrecord  <s> document </s> <s> ..., cut into rows; the last, partial
                                                          row is lost
    {shards}/documents/{split}-{number}.npy               where each document is from, see `find_documents`
    {folder}/{key}.counts                                 int64 [V], how often each token is in the documents
    {folder}/{key}.json                                   what the manifest says of the shard; written last

Dimensions: N rows, L tokens in a row, V vocabulary entries.
"""

import hashlib
from collections import Counter
from typing import NamedTuple

import numpy as np

from mlm.data import deduplicate, results, tfrecord
from mlm.data.map_part import BLOCK, DOCUMENT, token_dtype
from mlm.errors import DamageError
from mlm.paths import UPath

PLACED = np.dtype([("start", "<u8"), ("part", "<u4"), ("place", "<u4")])  # start: a document's first token in the shard


class WriteShard(NamedTuple):
    """A task of `write_shard`."""

    name: str  # {split}/dataset-{number}-{records}.tfrecord
    blocks: bytes  # BLOCK of each, in order
    parts: tuple[int, ...]  # the part of each block
    maps: dict[int, str]  # the keys of these parts
    sources: dict[int, str]  # and their sources
    deduplicated: tuple[str, ...]  # keys
    all_parts: int
    length: int
    vocab_size: int
    folder: str
    shards: str
    key: str


def write_shard(task: WriteShard) -> None:
    """Writes the files of a shard, reading its own blocks alone."""
    split, _, file_name = task.name.partition("/")
    number, records = file_name.removesuffix(".tfrecord").split("-")[1:]
    counts_V, tokens, written = np.zeros(task.vocab_size, np.int64), Counter(), Counter()
    rest, placed = np.zeros(0, token_dtype(task.vocab_size)), []
    target, digest = UPath(f"{task.shards}/{task.name}"), hashlib.sha256()
    with results.written(target) as file:
        with file.open("wb") as out:
            for part, block in zip(task.parts, np.frombuffer(task.blocks, BLOCK), strict=True):
                ids, documents = _read(task, part, block)
                starts = tokens.total() + np.cumsum(documents["tokens"], dtype=np.uint64) - documents["tokens"]
                placed.append(np.zeros(len(documents), PLACED))
                placed[-1]["start"], placed[-1]["part"], placed[-1]["place"] = starts, part, documents["place"]
                counts_V += np.bincount(ids, minlength=task.vocab_size)
                tokens[task.sources[part]] += len(ids)
                written["documents"] += len(documents)
                written["text_bytes"] += int(documents["bytes"].sum())
                ids = np.concatenate([rest, ids])
                ids, rest = np.split(ids, [len(ids) - len(ids) % task.length])
                data = b"".join(tfrecord.encode(ids.reshape(-1, task.length)))
                out.write(data)
                digest.update(data)
        size = file.stat().st_size
    if tokens.total() // task.length != int(records):
        raise DamageError(f"{task.folder}: holds other blocks than those counted; remove it, and start again.")
    documents = UPath(f"{task.shards}/documents/{split}-{number}.npy")
    results.save(documents, np.concatenate([np.zeros(0, PLACED), *placed]))
    results.save(UPath(f"{task.folder}/{task.key}.counts"), counts_V)
    shard = {"file": task.name, "records": int(records), "bytes": size, "sha256": digest.hexdigest()}
    note = {"shard": shard, "sources": tokens, "dropped_tokens": len(rest), **written}
    results.save_json(UPath(f"{task.folder}/{task.key}.json"), note)


def _read(task: WriteShard, part: int, block: np.void) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the DOCUMENTs of a block, without those left out."""
    base = f"{task.folder}/{task.maps[part]}"
    dtype, first, count = token_dtype(task.vocab_size), int(block["row"]), int(block["documents"])
    ids = results.load(UPath(f"{base}.tokens"), dtype, int(block["offset"]), int(block["tokens"]))
    documents = results.load(UPath(f"{base}.documents"), DOCUMENT, first, count)
    rows = deduplicate.left_out(task.folder, task.deduplicated, part, task.all_parts)
    kept = np.ones(count, bool)
    kept[rows[(rows >= first) & (rows < first + count)] - first] = False
    return ids[np.repeat(kept, documents["tokens"])], documents[kept]
