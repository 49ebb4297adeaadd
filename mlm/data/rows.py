"""Reduce: the blocks of a split, in order, are a stream of tokens, whose row r goes to shard r mod n.

Each complete shard has a note, an empty file whose name says what is in the shard and which stream it came from.

Dimensions: N rows, L tokens in a row.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import NamedTuple

import numpy as np

from mlm.data import blocks, tfrecord
from mlm.data.manifest import SHARD_NAME, SPLITS, Shard
from mlm.data.work import Work
from mlm.errors import InputError
from mlm.paths import put_file, sizes

OPEN_FILES = 256  # shards that one worker writes at a time


class Stream(NamedTuple):
    """The tokens of a split, and how they become rows."""

    split: str
    files: list[str]  # of its blocks, local, in order
    shards: list[str]  # names, in order
    length: int
    digest: str  # of everything the rows depend on


def plan(split: str, tokens: int, *, length: int, count: int) -> list[str]:
    """Returns the names of a split's shards, in order; a small validation split gets fewer than `count`."""
    rows = tokens // length
    if split == "train" and rows < count:
        raise InputError(f"config.shards.count = {count}: there are only {rows} rows of {length} tokens; lower it.")
    if rows == 0:
        need = "raise corpus.validation_fraction, or give more text"
        raise InputError(f"the {split} split is shorter than a row of {length} tokens: {need}.")
    count = min(count, rows)
    return [f"{split}/dataset-{shard}-{(rows - shard - 1) // count + 1}.tfrecord" for shard in range(count)]


def read_notes(work: Work, digest: str) -> dict[str, Shard]:
    """Returns {name: shard} of the complete shards that were made from the streams with this digest."""
    found = {}
    there = {f"{split}/{name}": size for split in SPLITS for name, size in sizes(work.shards / split).items()}
    for note in sizes(work.notes):
        split, number, records, size, sha256, stream = note.split("-")
        name = f"{split}/dataset-{number}-{records}.tfrecord"
        if stream == digest and there.get(name) == int(size):
            found[name] = Shard(name, int(records), int(size), sha256)
    return found


def write(work: Work, stream: Stream, own: list[int]) -> None:
    """Writes the shards with the indices `own` in one pass over the blocks."""
    digests = [hashlib.sha256() for _ in own]
    files = [work.scratch / stream.shards[shard].replace("/", "-") for shard in own]
    count = len(stream.shards)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(file.open("wb")) for file in files]
        row, rest = 0, np.zeros(0, work.dtype)
        for file in stream.files:
            tokens = np.concatenate([rest, blocks.read(file, work.dtype)])
            rows = len(tokens) // stream.length
            ids_NxL, rest = np.split(tokens, [rows * stream.length])
            ids_NxL = ids_NxL.reshape(rows, stream.length)
            for shard, output, digest in zip(own, outputs, digests, strict=True):
                data = b"".join(tfrecord.encode(ids_NxL[(shard - row) % count :: count]))
                output.write(data)
                digest.update(data)
            row += rows
    for shard, file, digest in zip(own, files, digests, strict=True):
        size, records = file.stat().st_size, SHARD_NAME.search(stream.shards[shard])[2]
        put_file(file, work.shards / stream.shards[shard])
        note = f"{stream.split}-{shard}-{records}-{size}-{digest.hexdigest()}-{stream.digest}"
        (work.notes / note).write_text("")
