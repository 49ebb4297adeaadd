"""Reduce: the blocks of a shard -> its rows, without what is left out; and where the text of a record is from.

    {shards}/{split}/dataset-{number}-{records}.tfrecord  rows of <s> document </s>, see rows.py
    {shards}/documents/{split}-{number}.npy               PLACED of its documents, see `find_documents`
    {shards}/documents/parts.json                         [source, name] of all parts, see shards.py
    {folder}/{key}.counts                                 int64 [V], how often each token is in the documents
    {folder}/{key}.json                                   what the manifest says of the shard; written last

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
from mlm.data import mixture, results, rows, tfrecord
from mlm.data.manifest import Manifest, Shard, Split
from mlm.data.map_part import BLOCK, DOCUMENT, token_dtype
from mlm.errors import DamageError, InputError
from mlm.memory import of_a_command
from mlm.paths import UPath

PARTS = "documents/parts.json"
ENCODED = 1024  # rows at once: padded, they take more memory than their tokens
# of shards
SUMMED = (
    "documents",
    "dropped_tokens",
    "cut_tokens",
    "padding_tokens",
    "joined_tokens",
    "text_bytes",
)
# start: a piece's first token in the shard
PLACED = np.dtype([("start", "<u8"), ("part", "<u4"), ("place", "<u4")])


class ShardTask(NamedTuple):
    """A task of `write_shard`."""

    name: str  # {split}/dataset-{number}, without its records
    blocks: bytes  # BLOCK of each, in order
    parts: tuple[int, ...]  # the part of each block
    maps: dict[int, str]  # the keys of these parts
    sources: dict[int, str]  # and their sources
    # the files of the rows of documents to leave out, of those that have any
    left_out: dict[int, str]
    tokens: int  # of the others
    length: int
    rows: str  # as config.shards.rows
    pad_id: int
    vocab_size: int
    folder: str
    shards: str
    key: str = ""


def write_shard(task: ShardTask) -> None:
    """Writes the files of a shard, reading its own blocks alone."""
    note: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    counts_V = np.zeros(task.vocab_size, np.int64)  # of the documents
    counts_in_rows_V = np.zeros(task.vocab_size, np.int64)  # of what lines keep of them
    tables = [np.zeros(0, PLACED)]
    tokens_of_rows = [np.zeros(0, np.int64)]
    rest_T = np.zeros(0, np.uint16)
    target = UPath(f"{task.shards}/{task.name}")
    digest = hashlib.sha256()
    with results.written(
        target, lambda: f"{target.name}-{sum(map(len, tokens_of_rows))}.tfrecord"
    ) as file:
        with file.open("wb") as out:
            for ids_T, documents, part_D in _read_windows(task):
                sizes_D = documents["tokens"].astype(np.int64)
                for part in set(part_D.tolist()):
                    sources[task.sources[part]] += int(sizes_D[part_D == part].sum())
                if task.rows == CONCATENATED:
                    made, rest_T = rows.concatenate(rest_T, ids_T, sizes_D, task.length)
                else:
                    made = rows.arrange(
                        task.rows, ids_T, sizes_D, length=task.length, pad_id=task.pad_id
                    )
                table = np.zeros(len(made.start_P), PLACED)
                table["start"] = task.length * sum(map(len, tokens_of_rows)) + made.start_P
                table["part"] = part_D[made.document_P]
                table["place"] = documents["place"][made.document_P]
                tables.append(table)
                tokens_of_rows.append(made.tokens_N)
                counts_V += np.bincount(ids_T, minlength=task.vocab_size)
                counts_in_rows_V += np.bincount(made.ids_NxL.ravel(), minlength=task.vocab_size)
                note.update(
                    documents=len(documents),
                    text_bytes=int(documents["bytes"].sum()),
                    cut_tokens=made.cut_tokens,
                    padding_tokens=int(np.sum(task.length - made.tokens_N)),
                )
                for first in range(0, len(made.ids_NxL), ENCODED):
                    chunk = slice(first, first + ENCODED)
                    data = b"".join(tfrecord.encode(made.ids_NxL[chunk], made.tokens_N[chunk]))
                    out.write(data)
                    digest.update(data)
        size = file.stat().st_size
    # Files of a task are named by what they were made from; were they exchanged, the sums would not agree.
    if sources.total() != task.tokens:
        raise DamageError(
            f"{task.folder}: holds other blocks than those counted; remove it, and start again."
        )
    table = np.concatenate(tables)
    tokens_N = np.concatenate(tokens_of_rows)
    with (
        results.written(UPath(f"{task.shards}/{table_name(task.name)}")) as file,
        file.open("wb") as out,
    ):
        np.save(out, table)
    kept_V = counts_in_rows_V if task.rows == LINES else counts_V
    results.save(UPath(f"{task.folder}/{task.key}.counts"), counts_V, kept_V)
    is_joined_P = table["start"] % task.length > 0  # to a document before it in its row
    joined_N = np.unique(table["start"][is_joined_P] // task.length)
    note["dropped_tokens"] = len(rest_T)
    note["joined_tokens"] = int(tokens_N[joined_N[joined_N < len(tokens_N)]].sum())
    shard = [f"{task.name}-{len(tokens_N)}.tfrecord", len(tokens_N), size, digest.hexdigest()]
    results.save_json(
        UPath(f"{task.folder}/{task.key}.json"), dict(note) | {"shard": shard, "sources": sources}
    )


def _read_windows(task: ShardTask) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields the tokens, the DOCUMENTs and the part of each document, of blocks that become rows together."""
    blocks = np.frombuffer(task.blocks, BLOCK)
    windows = (
        range(len(blocks))
        if task.rows == CONCATENATED
        else np.cumsum(blocks["tokens"]) // np.uint64(rows.WINDOW)
    )
    read = results.at_once(
        functools.partial(_read_block, task), zip(task.parts, blocks, strict=True)
    )
    for _, group in itertools.groupby(zip(windows, read, strict=True), operator.itemgetter(0)):
        yield tuple(map(np.concatenate, zip(*(block for _, block in group), strict=True)))


def _read_block(task: ShardTask, part_and_block: tuple[int, np.void]) -> tuple[np.ndarray, ...]:
    """Returns the tokens, the DOCUMENTs and the part of each document of a block, without those left out."""
    part, block = part_and_block
    base = f"{task.folder}/{task.maps[part]}"
    first = int(block["row"])
    count = int(block["documents"])
    ids = results.load(
        UPath(f"{base}.tokens"),
        token_dtype(task.vocab_size),
        int(block["offset"]),
        int(block["tokens"]),
    )
    documents = results.load(UPath(f"{base}.documents"), DOCUMENT, first, count)
    if part in task.left_out:
        left_out = results.load(UPath(f"{task.folder}/{task.left_out[part]}"), np.uint32)
        is_kept = ~np.isin(np.arange(first, first + count), left_out)
        ids = ids[np.repeat(is_kept, documents["tokens"])]
        documents = documents[is_kept]
    return ids, documents, np.full(len(documents), part)


def summarize(
    tasks: Sequence[ShardTask], vocabulary: Mapping[str, Any], *, duplicates: int, kept_out: int
) -> Split:
    """Returns a split of the manifest from its tasks' files, and from how many documents are left out, and why."""
    counts_2xV = np.zeros((2, vocabulary["vocab_size"]), np.int64)
    counts_files = (UPath(f"{task.folder}/{task.key}.counts") for task in tasks)
    for counts_of_shard in results.at_once(lambda file: results.load(file, np.int64), counts_files):
        counts_2xV += counts_of_shard.reshape(2, -1)
    notes = list(
        results.at_once(
            results.load_json, (UPath(f"{task.folder}/{task.key}.json") for task in tasks)
        )
    )
    sources: Counter[str] = Counter()
    for note in notes:
        sources.update(note["sources"])
    unk_id = vocabulary["special_ids"].get("unk")
    unknown_tokens = 0 if unk_id is None else int(counts_2xV[0, unk_id])
    counts_2xV[:, list(vocabulary["all_special_ids"])] = 0
    counts_V = counts_2xV[1]
    probs = counts_V[counts_V > 0] / counts_V.sum()
    return Split(
        shards=tuple(Shard(*note["shard"]) for note in notes),
        duplicates=duplicates,
        kept_out=kept_out,
        tokens=int(counts_2xV[0].sum()),
        unknown_tokens=unknown_tokens,
        **{key: sum(note[key] for note in notes) for key in SUMMED},
        unigram_entropy=float(-np.sum(probs * np.log(probs))),
        sources=dict(sources),
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
        (folder, shard)
        for _, _, folder in mixture.parts(manifest)
        for shard in folder.splits[split].shards
    ]
    stops = np.cumsum([shard.records for _, shard in shards])
    index = np.searchsorted(stops, record, side="right")
    folder, shard = shards[index]
    first = (record - stops[index] + shard.records) * folder.length
    try:
        table, parts = _documents(folder.folder, shard.file)
        begin, end = np.searchsorted(
            table["start"], [first, first + folder.length - 1], side="right"
        )
        return [
            DocumentPlace(*map(str, parts[part]), place)
            for _, part, place in table[begin - 1 : end].tolist()
        ]
    except FileNotFoundError as error:
        raise InputError(
            f"{folder.folder}: doesn't say where its records are from ({error.filename})."
        ) from error
    except (ValueError, IndexError, KeyError, TypeError, EOFError) as error:
        raise DamageError(
            f"{folder.folder}/documents: is not what was written; write the shards again."
        ) from error


@of_a_command
@functools.lru_cache(1)
def _documents(folder: str, shard: str) -> tuple[np.ndarray, list[list[str]]]:
    """Returns the table of a shard's documents, and [source, name] of all parts."""
    with UPath(f"{folder}/{table_name(shard)}").open("rb") as file:
        table = np.load(file, allow_pickle=False)
    return table, json.loads((UPath(folder) / PARTS).read_text(encoding="utf-8"))
