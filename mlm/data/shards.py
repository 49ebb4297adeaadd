"""Documents -> TFRecord shards: {folder}/{split}/dataset-{shard}-{records}.tfrecord, and manifest.json.

Map (blocks.py): the documents are cut into blocks, and the tokens of each are written to a file. Reduce: the blocks in
order are the split's stream of tokens; row r of the stream goes to shard r mod n. So the bytes depend on the documents,
the tokenizer and the settings, never on how many processes or hosts did the work; every shard is a uniform sample of
the split; and only the last, partial row of a split is lost. Each complete shard has a note, an empty file whose name
says what is in the shard and which stream it came from.

Several hosts share only the folder of the work (work.py). Each reads all documents, which is cheap, writes its blocks,
waits for those of the others, and writes its shards; the first waits for all shards and writes the manifest.

Dimensions: N rows, L tokens in a row.
"""

import concurrent.futures
import contextlib
import hashlib
import multiprocessing
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mlm.data import blocks, tfrecord, tokenizer
from mlm.data.corpus import Corpus, Document
from mlm.data.hosts import Hosts, available_cores
from mlm.data.manifest import NAME, SHARD_NAME, SPLITS, Manifest, Shard, Split, load_manifest
from mlm.data.work import Work
from mlm.errors import InputError
from mlm.paths import local_folder, put_file, sizes

ONE_HOST = Hosts()
OPEN_FILES = 256  # shards that one worker writes at a time


class Stream(NamedTuple):
    """The tokens of a split, and how they become rows."""

    split: str
    files: list[str]  # of its blocks, local, in order
    shards: list[str]  # names, in order
    length: int
    digest: str  # of everything the rows depend on


def write(
    documents: Iterable[Document],
    *,
    tokenizer_folder: str,
    folder: str,
    length: int,
    counts: dict[str, int],
    source: str,
    workers: int = 0,
    hosts: Hosts = ONE_HOST,
) -> Manifest:
    """Writes the shards of both splits, unless the same ones are there; returns when they are complete.

    The tokens of the documents, <s> ... </s> each, are concatenated and cut into rows of `length`, as in transformers'
    TF-TPU example. What looks like a special token in a text stays text.

    Args:
      documents: the same on all hosts; not read if the shards are there. The manifest has the counts of a `Corpus`.
      tokenizer_folder, folder: local or gs://; `folder` appears, or its manifest does, when all is written.
      source: describes the documents, and changes when they do.
      workers: processes on this host; 0 for one per core.
    """
    tokenizer_folder = local_folder(tokenizer_folder)
    vocabulary = tokenizer.manifest_fields(tokenizer_folder)
    texts = [source, vocabulary["tokenizer_fingerprint"]]
    work = Work(folder, texts, [length, counts], hosts, vocabulary["vocab_size"])
    if not work.is_done():
        fields = {"folder": folder, "length": length, **vocabulary, "inputs": work.inputs, "source": source}
        workers = workers or available_cores()
        context = multiprocessing.get_context("spawn")
        with (
            work.opened(),
            concurrent.futures.ProcessPoolExecutor(workers, context, blocks.start_worker, (tokenizer_folder,)) as pool,
        ):
            splits = _write_splits(pool, workers, work, documents, fields, counts)
            if splits:
                work.publish(Manifest(**fields, full_rows=True, splits=splits))
    return load_manifest(folder)


def _write_splits(
    pool: concurrent.futures.Executor,
    workers: int,
    work: Work,
    documents: Iterable[Document],
    fields: dict[str, Any],
    counts: dict[str, int],
) -> dict[str, Split] | None:
    """Returns when all hosts have written their part: the splits on the first host, None on the others."""
    length = fields["length"]
    keys = blocks.write(pool, documents, work, max_pending=2 * workers)
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=16).hexdigest()
    work.has_read(digest)
    written = work.wait("blocks", keys, lambda: blocks.written(work))
    if written is None:
        return None
    own = {split: [block for block in written if block.split == split] for split in SPLITS}
    tokens = {split: sum(block.tokens for block in own[split]) for split in SPLITS}
    streams = {}
    for split in SPLITS:
        names = _names(split, tokens[split], length=length, count=counts[split])
        files = work.local_blocks([block.file for block in own[split]])
        streams[split] = Stream(split, files, names, length, digest)
    every = [name for stream in streams.values() for name in stream.shards]
    there = _read_notes(work, digest)
    mine = {name for number, name in enumerate(every) if work.hosts.owns(number) and name not in there}
    tasks = []
    for stream in streams.values():
        left = [shard for shard, name in enumerate(stream.shards) if name in mine]
        group = min(-(-len(left) // workers), OPEN_FILES) or 1
        parts = (left[start : start + group] for start in range(0, len(left), group))
        tasks += [pool.submit(_write_shards, work, stream, part) for part in parts]
    for task in tasks:
        task.result()
    shards = work.wait("shards", every, lambda: _read_notes(work, digest))
    if work.hosts.index:
        work.wait("manifest", [NAME], dict)
        return None
    found = dict(zip(every, shards, strict=True))
    tally = documents.counts if isinstance(documents, Corpus) else None
    return {
        split: Split(
            shards=tuple(found[name] for name in stream.shards),
            documents=tally[f"{split} documents"] if tally else None,
            duplicates=tally[f"{split} duplicates"] if tally else None,
            dropped_tokens=tokens[split] % length,
            text_bytes=sum(block.text_bytes for block in own[split]),
            **_unigrams(work, stream, fields),
        )
        for split, stream in streams.items()
    }


def _unigrams(work: Work, stream: Stream, fields: dict[str, Any]) -> dict[str, float]:
    """Returns the number of ordinary tokens and their unigram entropy in nats."""
    counts_V = np.zeros(fields["vocab_size"], np.int64)
    for file in stream.files:
        counts_V += np.bincount(blocks.read(file, work.dtype), minlength=len(counts_V))
    counts_V[list(fields["all_special_ids"])] = 0
    probs = counts_V[counts_V > 0] / counts_V.sum()
    return {"tokens": int(counts_V.sum()), "unigram_entropy": float(-np.sum(probs * np.log(probs)))}


def _names(split: str, tokens: int, *, length: int, count: int) -> list[str]:
    """Returns the names of a split's shards, in order; a small validation split gets fewer than `count`."""
    rows = tokens // length
    if split == "train" and rows < count:
        raise InputError(f"config.shards.count = {count}: there are only {rows} rows of {length} tokens; lower it.")
    if rows == 0:
        need = "raise corpus.validation_fraction, or give more text"
        raise InputError(f"the {split} split is shorter than a row of {length} tokens: {need}.")
    count = min(count, rows)
    return [f"{split}/dataset-{shard}-{(rows - shard - 1) // count + 1}.tfrecord" for shard in range(count)]


def _read_notes(work: Work, digest: str) -> dict[str, Shard]:
    """Returns {name: shard} of the complete shards that were made from the streams with this digest."""
    found = {}
    there = {f"{split}/{name}": size for split in SPLITS for name, size in sizes(work.shards / split).items()}
    for note in sizes(work.notes):
        split, number, records, size, sha256, stream = note.split("-")
        name = f"{split}/dataset-{number}-{records}.tfrecord"
        if stream == digest and there.get(name) == int(size):
            found[name] = Shard(name, int(records), int(size), sha256)
    return found


def _write_shards(work: Work, stream: Stream, own: list[int]) -> None:
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
