"""Reduce: the blocks of a shard -> its rows, without what is left out; and where the text of a record is from.

    {shards}/{split}/dataset-{number}-{records}.tfrecord  rows of <s> document </s>, see rows.py
    {shards}/documents/{split}-{number}.npy               PLACED of its documents, see `find_documents`
    {shards}/documents/parts.json                         [source, name] of all parts, see shards.py
    {base}.counts                                         int64 [V], how often each token is in the documents
    {base}.json                                           what the manifest says of the shard

Dimensions: N rows, L tokens in a row, V vocabulary entries.
"""

import functools
import hashlib
import itertools
import json
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlm.config_rules import CONCATENATED, LINES
from mlm.data import deduplicate, results, rows, tfrecord
from mlm.data.manifest import Manifest, Shard, Split
from mlm.data.map_part import BLOCK, DOCUMENT, token_dtype
from mlm.errors import InputError
from mlm.paths import UPath, of_a_command

PARTS = "documents/parts.json"
ENCODED = 1024  # rows at once: padded, they take more memory than their tokens
# start: a piece's first token in the shard
PLACED = np.dtype([("start", "<u8"), ("part", "<u4"), ("place", "<u4")])


def write_shard(
    base: str,
    name: str,
    blocks: bytes,
    parts: tuple[int, ...],
    *,
    maps: tuple[str, ...],
    duplicates: tuple[str, ...],
    repeated: tuple[int, ...],
    length: int,
    kind: str,
    pad_id: int,
    vocab_size: int,
    shards: str,
) -> dict[str, Any]:
    """Writes the files of a shard, reading its own blocks alone; returns what the manifest says of it.

    Args:
        name: {split}/dataset-{number}, without its records.
        blocks: BLOCK of each, in order.
        parts: the part of each block.
        maps: what `map_part` has written of each part of the corpus.
        duplicates: what `deduplicate` returns.
        repeated: the parts that have duplicates.
        kind: config.shards.rows.
        shards: the folder of the shards.
    """
    counts: Counter[str] = Counter()
    left_out = {
        part: deduplicate.rows_to_leave_out(duplicates, part=part, parts=len(maps))
        for part in set(repeated).intersection(parts)
    }
    read = functools.partial(_read_block, maps, left_out, token_dtype(vocab_size))
    blocks = np.frombuffer(blocks, BLOCK)
    blocks_read = results.at_once(read, zip(parts, blocks, strict=True))
    counts_V = np.zeros(vocab_size, np.int64)  # of the documents
    counts_in_rows_V = np.zeros(vocab_size, np.int64)  # of what lines keep of them
    tables = [np.zeros(0, PLACED)]
    records = 0
    rest_T = np.zeros(0, np.uint16)
    target = UPath(f"{shards}/{name}")
    with results.written(target, lambda: f"{target.name}-{records}.tfrecord") as file:
        with file.open("wb") as out:
            for ids_T, documents, part_D in _join_windows(kind, blocks, blocks_read):
                sizes_D = documents["tokens"].astype(np.int64)
                if kind == CONCATENATED:
                    made, rest_T = rows.concatenate(rest_T, ids_T, sizes_D, length)
                else:
                    made = rows.arrange(kind, ids_T, sizes_D, length=length, pad_id=pad_id)
                table = np.zeros(len(made.start_P), PLACED)
                table["start"] = length * records + made.start_P
                table["part"] = part_D[made.document_P]
                table["place"] = documents["place"][made.document_P]
                tables.append(table)
                records += len(made.ids_NxL)
                counts_V += np.bincount(ids_T, minlength=vocab_size)
                counts_in_rows_V += np.bincount(made.ids_NxL.ravel(), minlength=vocab_size)
                counts.update(
                    documents=len(documents),
                    text_bytes=int(documents["bytes"].sum()),
                    cut_tokens=made.cut_tokens,
                    padding_tokens=int(np.sum(length - made.tokens_N)),
                )
                for first in range(0, len(made.ids_NxL), ENCODED):
                    chunk = slice(first, first + ENCODED)
                    out.writelines(tfrecord.encode(made.ids_NxL[chunk], made.tokens_N[chunk]))
        with file.open("rb") as made_file:
            digest = hashlib.file_digest(made_file, "sha256").hexdigest()
        size = file.stat().st_size
    with (
        results.written(UPath(f"{shards}/{table_name(name)}")) as file,
        file.open("wb") as out,
    ):
        np.save(out, np.concatenate(tables))
    kept_V = counts_in_rows_V if kind == LINES else counts_V
    results.save(UPath(f"{base}.counts"), counts_V, kept_V)
    counts["dropped_tokens"] = len(rest_T)
    shard = [f"{name}-{records}.tfrecord", records, size, digest]
    return {"shard": shard, "counts": counts}


def _join_windows(
    kind: str, blocks: np.ndarray, blocks_read: Iterator[tuple[np.ndarray, ...]]
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields what `_read_block` returns, of blocks that become rows together."""
    windows = range(len(blocks))
    if kind != CONCATENATED:
        windows = np.cumsum(blocks["tokens"]) // np.uint64(rows.WINDOW)
    pairs = zip(windows, blocks_read, strict=True)
    for _, group in itertools.groupby(pairs, operator.itemgetter(0)):
        yield tuple(map(np.concatenate, zip(*(block for _, block in group), strict=True)))


def _read_block(
    maps: Sequence[str],
    left_out: Mapping[int, np.ndarray],
    dtype: np.dtype,
    part_and_block: tuple[int, np.void],
) -> tuple[np.ndarray, ...]:
    """Returns the tokens, the DOCUMENTs and the part of each document of a block, without those left out."""
    part, block = part_and_block
    first, count, offset, tokens = block[["row", "documents", "offset", "tokens"]].tolist()
    ids = results.load(UPath(f"{maps[part]}.tokens"), dtype, offset, tokens)
    documents = results.load(UPath(f"{maps[part]}.documents"), DOCUMENT, first, count)
    if part in left_out:
        is_kept = ~np.isin(documents["row"], left_out[part])
        ids = ids[np.repeat(is_kept, documents["tokens"])]
        documents = documents[is_kept]
    return ids, documents, np.full(len(documents), part)


def summarize(
    done: Sequence[tuple[str, Any]], vocabulary: Mapping[str, Any], **left_out: int
) -> Split:
    """Returns a split of the manifest from the results of its tasks, and how many documents are `left_out`, and why."""
    bases, notes = zip(*done, strict=True)
    counts_2xV = sum(results.load_each(bases, "counts", np.int64)).reshape(2, -1)
    counts_of_documents: Counter[str] = Counter()
    for note in notes:
        counts_of_documents.update(note["counts"])
    unk_id = vocabulary["special_ids"].get("unk")
    unknown_tokens = 0 if unk_id is None else int(counts_2xV[0, unk_id])
    counts_2xV[:, list(vocabulary["all_special_ids"])] = 0
    counts_V = counts_2xV[1]
    probs = counts_V[counts_V > 0] / counts_V.sum()
    return Split(
        shards=tuple(Shard(*note["shard"]) for note in notes),
        tokens=int(counts_2xV[0].sum()),
        unknown_tokens=unknown_tokens,
        unigram_entropy=float(-np.sum(probs * np.log(probs))),
        **counts_of_documents,
        **left_out,
    )


def table_name(shard: str) -> str:
    """Returns the file, below the folder of the shards, of the table of a shard's documents."""
    split, _, name = shard.partition("/")
    return f"documents/{split}-{name.split('-')[1]}.npy"


class DocumentPlace(NamedTuple):
    """A document of the corpus."""

    source: str
    part: str
    place: int  # in its part, from 0; empty ones don't count


def find_documents(manifest: Manifest, split: str, record: int) -> list[DocumentPlace]:
    """Returns the documents whose tokens a record holds, in order; reads the table of its shard alone, once."""
    total = manifest.splits[split].records
    if not 0 <= record < total:
        raise InputError(f"record {record}: the {split} split has the records 0 to {total - 1}.")
    shards = [
        (folder, shard) for _, _, folder in manifest.parts for shard in folder.splits[split].shards
    ]
    stops = np.cumsum([shard.records for _, shard in shards])
    index = np.searchsorted(stops, record, side="right")
    folder, shard = shards[index]
    first = (record - stops[index] + shard.records) * folder.length
    try:
        table, parts = _documents(folder.folder, shard.file)
    except FileNotFoundError as error:  # of another program's shards
        raise InputError(
            f"{folder.folder}: doesn't say where its records are from ({error.filename})."
        ) from error
    begin, end = np.searchsorted(table["start"], [first, first + folder.length - 1], side="right")
    return [
        DocumentPlace(*map(str, parts[part]), place)
        for _, part, place in table[begin - 1 : end].tolist()
    ]


@of_a_command
@functools.lru_cache(1)
def _documents(folder: str, shard: str) -> tuple[np.ndarray, list[list[str]]]:
    """Returns the table of a shard's documents, and [source, name] of all parts."""
    with UPath(f"{folder}/{table_name(shard)}").open("rb") as file:
        table = np.load(file, allow_pickle=False)
    return table, json.loads((UPath(folder) / PARTS).read_text(encoding="utf-8"))
