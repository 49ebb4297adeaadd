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
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlm.data import blocks, rows, tokenizer
from mlm.data.corpus import Document
from mlm.data.hosts import HostFiles, Hosts, available_cores
from mlm.data.manifest import NAME, Manifest, Split, load_manifest
from mlm.data.manifest_rules import SPLITS
from mlm.data.rows import Places, Stream
from mlm.data.work import Work
from mlm.errors import DamageError
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
      length: tokens in a row.
      counts: shards of each split; a small validation split gets fewer.
      source: describes the documents, and changes when they do.
      workers: processes on this host; 0 for one per core.
      hosts: share the work.

    Raises:
      InputError: the folder can't be used, a split has too few rows, or another host reads another corpus.
      PreemptedError: no progress of another host within `hosts.timeout`.
    """
    tokenizer_folder = local_folder(tokenizer_folder)
    vocabulary = tokenizer.manifest_fields(tokenizer_folder)
    work = Work(folder, [source, vocabulary["tokenizer_fingerprint"]], [length, counts], hosts)
    if work.is_done():
        return load_manifest(folder)
    workers = workers or available_cores()
    context = multiprocessing.get_context("spawn")
    with (
        work.opened(),
        concurrent.futures.ProcessPoolExecutor(workers, context, blocks.start_worker, (tokenizer_folder,)) as pool,
    ):
        splits = _Writer(work, hosts, pool, workers, vocabulary).write(documents, length, counts)
        if splits:
            named = {"folder": folder, "length": length, "inputs": work.inputs, "source": source}
            work.publish(Manifest(**named, **vocabulary, full_rows=True, splits=splits))
    return load_manifest(folder)


class _Writer:
    """Writes one host's part of the shards."""

    def __init__(
        self, work: Work, hosts: Hosts, pool: concurrent.futures.Executor, workers: int, vocabulary: dict[str, Any]
    ):
        self._work, self._hosts, self._pool, self._workers = work, hosts, pool, workers
        self._vocabulary, self._dtype = vocabulary, blocks.dtype_of(vocabulary["vocab_size"])
        self._host_files = HostFiles(work.hosts, hosts)

    def write(self, documents: Iterable[Document], length: int, counts: dict[str, int]) -> dict[str, Split] | None:
        """Returns when all hosts have written their part: the splits on the first host, on others None."""
        work, dtype = self._work, self._dtype
        local = {"scratch": work.scratch, "hosts": self._hosts, "max_pending": 2 * self._workers}
        keys = blocks.write(self._pool, documents, work.blocks, **local, dtype=dtype)
        digest = blocks.stream_digest(keys)
        self._host_files.write(digest)
        written = self._wait("blocks", keys, lambda: blocks.written(work.blocks, dtype))
        if written is None:
            return None
        own = {split: [block for block in written if block.key.split == split] for split in SPLITS}
        tokens = {split: sum(block.tokens for block in own[split]) for split in SPLITS}
        names = {split: rows.plan(split, tokens[split], length=length, count=counts[split]) for split in SPLITS}
        streams = {split: Stream(split, work.local_blocks(own[split]), dtype, digest) for split in SPLITS}
        self._reduce(streams, names, length)
        every = [name for split in SPLITS for name in names[split]]
        shards = self._wait("shards", every, lambda: rows.noted(work.notes, work.shards, digest))
        if self._hosts.index:
            self._wait("manifest", [NAME], dict)
            return None
        found = dict(zip(every, shards, strict=True))
        tally = getattr(documents, "counts", None)
        return {
            split: Split(
                shards=tuple(found[name] for name in names[split]),
                documents=tally[f"{split} documents"] if tally else None,
                duplicates=tally[f"{split} duplicates"] if tally else None,
                dropped_tokens=tokens[split] % length,
                text_bytes=sum(block.text_bytes for block in own[split]),
                **self._unigrams(streams[split]),
            )
            for split in SPLITS
        }

    def _reduce(self, streams: dict[str, Stream], names: dict[str, list[str]], length: int) -> None:
        """Writes this host's shards, except for those that are there."""
        work, tasks = self._work, []
        there = rows.noted(work.notes, work.shards, streams[SPLITS[0]].digest)
        places = Places(str(work.shards), str(work.notes), work.scratch)
        every = [(split, shard) for split in SPLITS for shard in range(len(names[split]))]
        own = [item for number, item in enumerate(every) if self._hosts.owns(number)]
        for split, stream in streams.items():
            left = [shard for other, shard in own if other == split and names[split][shard] not in there]
            tasks += rows.submit(self._pool, stream, names[split], left, places, length=length, workers=self._workers)
        for task in tasks:
            task.result()

    def _wait(self, what: str, names: list, poll: Callable[[], dict]) -> list | None:
        """Waits until every host has written its items; returns them by `names`, None if the manifest came first."""
        found = {}

        def missing() -> list[int]:
            found.update(poll())
            numbers = [number for number, name in enumerate(names) if name not in found]
            if numbers and self._hosts.count > 1 and self._work.is_published():
                return []
            if any(map(self._hosts.owns, numbers)):
                raise DamageError(f"{self._work.folder}: {what} just written are not there; check the disk.")
            return numbers

        def describe(numbers: list[int]) -> str:
            owners = Counter(map(self._hosts.owner, numbers))
            absent = self._host_files.not_started(owners)
            no_sign = f" (no sign of host {', '.join(map(str, absent))} in {self._work.hosts})" if absent else ""
            return ", ".join(f"{count} {what} of host {host}" for host, count in sorted(owners.items())) + no_sign

        self._hosts.wait(missing, describe)
        return [found[name] for name in names] if found.keys() >= set(names) else None

    def _unigrams(self, stream: Stream) -> dict[str, float]:
        """Returns the number of ordinary tokens and their unigram entropy in nats."""
        counts_V = self._pool.submit(rows.count_ids, stream, self._vocabulary["vocab_size"]).result()
        counts_V[list(self._vocabulary["all_special_ids"])] = 0
        probs = counts_V[counts_V > 0] / counts_V.sum()
        return {"tokens": int(counts_V.sum()), "unigram_entropy": float(-np.sum(probs * np.log(probs)))}
