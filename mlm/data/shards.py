"""Documents -> TFRecord shards: {folder}/{split}/dataset-{shard}-{records}.tfrecord, and manifest.json.

Map (blocks.py): the documents are cut into blocks, and the tokens of each are written to a file. Reduce (rows.py): the
blocks in order are the split's stream of tokens; row r of the stream goes to shard r mod n. So the bytes depend on the
documents, the tokenizer and the settings, never on how many processes or hosts did the work; every shard is a uniform
sample of the split; and only the last, partial row of a split is lost.

Several hosts share only the folder of the work (work.py). Each reads all documents, which is cheap, writes its blocks,
waits for those of the others, and writes its shards; the first waits for all shards and writes the manifest.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import multiprocessing
from collections.abc import Iterable
from typing import Any

import numpy as np

from mlm.data import blocks, rows, tokenizer
from mlm.data.corpus import Corpus, Document
from mlm.data.hosts import Hosts, available_cores
from mlm.data.manifest import NAME, SPLITS, Manifest, Split, load_manifest
from mlm.data.rows import Stream
from mlm.data.work import Work
from mlm.paths import local_folder

ONE_HOST = Hosts()


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
      counts: shards of each split; a small validation split gets fewer.
      source: describes the documents, and changes when they do.
      workers: processes on this host; 0 for one per core.

    Raises:
      InputError: the folder can't be used, a split has too few rows, or another host reads another corpus.
      PreemptedError: no progress of another host within `hosts.timeout`.
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
            splits = _write(pool, workers, work, documents, fields, counts)
            if splits:
                work.publish(Manifest(**fields, full_rows=True, splits=splits))
    return load_manifest(folder)


def _write(
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
        names = rows.plan(split, tokens[split], length=length, count=counts[split])
        files = work.local_blocks([block.file for block in own[split]])
        streams[split] = Stream(split, files, names, length, digest)
    every = [name for stream in streams.values() for name in stream.shards]
    there = rows.read_notes(work, digest)
    mine = {name for number, name in enumerate(every) if work.hosts.owns(number) and name not in there}
    tasks = []
    for stream in streams.values():
        left = [shard for shard, name in enumerate(stream.shards) if name in mine]
        group = min(-(-len(left) // workers), rows.OPEN_FILES) or 1
        parts = (left[start : start + group] for start in range(0, len(left), group))
        tasks += [pool.submit(rows.write, work, stream, part) for part in parts]
    for task in tasks:
        task.result()
    shards = work.wait("shards", every, lambda: rows.read_notes(work, digest))
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
