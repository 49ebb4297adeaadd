"""Documents -> TFRecord shards: {folder}/{split}/dataset-{shard}-{records}.tfrecord, and manifest.json.

Map (blocks.py): the documents are cut into blocks, a block's tokens are written to a file of their own. Reduce
(rows.py): the blocks in order are the split's stream of tokens; row r of the stream goes to shard r mod n. So the bytes
depend on the documents, the tokenizer and the settings, never on how many processes or hosts did the work; every shard
is a uniform sample of the split; and only the last, partial row of a split is lost.

Several hosts share the folder of the work (work.py) and nothing else. Each reads all documents, which is cheap, writes
its blocks, waits for those of the others, writes its shards; the first waits for the others' and writes the manifest.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mlm.data import blocks, cores, rows, tokenizer
from mlm.data.blocks import SPLITS, Block
from mlm.data.corpus import Document
from mlm.data.hosts import Hosts, Notes, Words, wait
from mlm.data.manifest import Manifest, Shard, Split, load_manifest
from mlm.data.rows import Places, Stream
from mlm.data.work import Work
from mlm.errors import DamageError
from mlm.paths import local_folder, sizes

ALONE = Hosts()


def write(
    documents: Iterable[Document],
    *,
    tokenizer_folder: str,
    folder: str,
    length: int,
    counts: dict[str, int],
    workers: int,
    source: str,
    tally: Counter | None = None,
    hosts: Hosts = ALONE,
    patience: float = math.inf,
) -> Manifest:
    """Writes the shards of both splits, unless the same ones are there; returns when they are complete.

    Each document is tokenized with its special tokens, <s> ... </s>, and the documents are put end to end and cut into
    rows of `length`, as transformers' TF-TPU example does. What looks like a special token in a text stays text.

    Args:
      documents: of the corpus, the same on all hosts; not touched if the shards are there.
      tokenizer_folder: local or gs://.
      folder: to be made, local or gs://; it appears, or its manifest does, when all is written.
      length: tokens in a row.
      counts: shards of each split; a small validation split gets fewer.
      workers: processes on this host; 0 for one a core.
      source: what the documents are, in words that change when they do.
      tally: counts of documents and duplicates that `corpus.documents` fills.
      hosts: how many hosts share the work, and which of them this is.
      patience: seconds without a sign of the other hosts after which this one gives up.

    Raises:
      InputError: the folder holds something else or can't be written, a split has too few rows, or another host reads
        another corpus.
      PreemptedError: nothing came from another host for `patience` seconds.
    """
    tokenizer_folder = local_folder(tokenizer_folder)
    vocabulary = _Vocabulary(
        tokenizer.load_fast(tokenizer_folder).get_vocab_size(),
        tokenizer.fingerprint(tokenizer_folder),
        *tokenizer.special_ids(tokenizer_folder),
    )
    work = Work(folder, [source, vocabulary.fingerprint], [length, counts], hosts)
    if work.is_done():
        return load_manifest(folder)
    workers = workers or cores.available()
    context = multiprocessing.get_context("spawn")
    with work.opened():
        with concurrent.futures.ProcessPoolExecutor(workers, context, blocks.start, (tokenizer_folder,)) as pool:
            maker = _Maker(work, hosts, patience, pool, workers, vocabulary)
            splits = maker.make(documents, length, counts, tally)
        if splits is None:
            maker.wait_for_manifest()
        else:
            work.publish(maker.manifest(splits, length, source))
    return load_manifest(folder)


class _Vocabulary(NamedTuple):
    """What the manifest says of the tokenizer."""

    size: int
    fingerprint: str
    special_ids: dict[str, int]
    all_special_ids: tuple[int, ...]


class _Maker:
    """Makes one host's part of the shards."""

    def __init__(
        self,
        work: Work,
        hosts: Hosts,
        patience: float,
        pool: concurrent.futures.Executor,
        workers: int,
        vocabulary: _Vocabulary,
    ):
        self._work, self._hosts, self._patience = work, hosts, patience
        self._pool, self._workers, self._vocabulary = pool, workers, vocabulary
        self._dtype = blocks.dtype_of(vocabulary.size)
        self._notes = Notes(work.hosts, hosts)

    def make(
        self, documents: Iterable[Document], length: int, counts: dict[str, int], tally: Counter | None
    ) -> dict[str, Split] | None:
        """Returns the splits when every host has done its part; None on other hosts than the first."""
        found = self._map(documents)
        if found is None:
            return None
        own = {split: [block for block in found if block.key.split == split] for split in SPLITS}
        tokens = {split: sum(block.tokens for block in own[split]) for split in SPLITS}
        names = {split: rows.plan(split, tokens[split], length=length, count=counts[split]) for split in SPLITS}
        digest = blocks.stream_digest(block.key for block in found)
        streams = {split: Stream(split, self._work.local_blocks(own[split]), self._dtype, digest) for split in SPLITS}
        self._reduce(streams, names, length)
        if self._hosts.index:
            return None
        shards = self._wait_for_shards(digest, names)
        return {
            split: Split(
                shards=tuple(shards[name] for name in names[split]),
                documents=None if tally is None else tally[f"{split} documents"],
                duplicates=None if tally is None else tally[f"{split} duplicates"],
                dropped_tokens=tokens[split] % length,
                text_bytes=sum(block.text_bytes for block in own[split]),
                **self._ordinary(streams[split]),
            )
            for split in SPLITS
        }

    def manifest(self, splits: dict[str, Split], length: int, source: str) -> Manifest:
        """Returns the manifest of complete splits."""
        return Manifest(
            folder=self._work.folder,
            length=length,
            vocab_size=self._vocabulary.size,
            special_ids=self._vocabulary.special_ids,
            all_special_ids=self._vocabulary.all_special_ids,
            tokenizer_fingerprint=self._vocabulary.fingerprint,
            full_rows=True,
            inputs=self._work.inputs,
            source=source,
            splits=splits,
        )

    def _map(self, documents: Iterable[Document]) -> list[Block] | None:
        """Writes this host's blocks and waits for the others'; returns all of them, None if the manifest is there."""
        keys = blocks.write(
            self._pool,
            documents,
            self._work.blocks,
            scratch=self._work.scratch,
            hosts=self._hosts,
            most=2 * self._workers,
            dtype=self._dtype,
        )
        self._notes.say(blocks.stream_digest(keys))
        found = {}

        def look() -> tuple[int, Words]:
            if self._hosts.count > 1 and self._work.is_published():
                return 0, str
            found.update(blocks.written(self._work.blocks, self._dtype))
            missing = [key.number for key in keys if key not in found]
            self._refuse_own(missing, "blocks")
            return len(missing), lambda: self._words(missing, "blocks")

        wait(look, patience=self._patience)
        return [found[key] for key in keys] if all(key in found for key in keys) else None

    def _reduce(self, streams: dict[str, Stream], names: dict[str, list[str]], length: int) -> None:
        """Writes this host's shards, but for those that are there."""
        there = rows.noted(self._work.notes, self._work.shards, streams[SPLITS[0]].digest)
        places = Places(str(self._work.shards), str(self._work.notes), self._work.scratch)
        tasks = []
        for split, stream in streams.items():
            all_ = names[split]
            own = [shard for shard in range(len(all_)) if self._hosts.owns(shard) and all_[shard] not in there]
            tasks += rows.submit(self._pool, stream, all_, own, places, length=length, workers=self._workers)
        for task in tasks:
            task.result()

    def _wait_for_shards(self, digest: str, names: dict[str, list[str]]) -> dict[str, Shard]:
        found = {}

        def look() -> tuple[int, Words]:
            found.update(rows.noted(self._work.notes, self._work.shards, digest))
            missing = [n for split in SPLITS for n, name in enumerate(names[split]) if name not in found]
            self._refuse_own(missing, "shards")
            return len(missing), lambda: self._words(missing, "shards")

        wait(look, patience=self._patience)
        return found

    def wait_for_manifest(self) -> None:
        """Waits until the first host has published the shards."""

        def look() -> tuple[int, Words]:
            if self._work.is_published():
                return 0, str
            left = len(sizes(self._work.notes)) + 1  # changes as the others go on
            return left, lambda: self._words([0], "manifest")

        wait(look, patience=self._patience)

    def _refuse_own(self, missing: list[int], what: str) -> None:
        """Raises DamageError if something is missing that this host has just written: nobody else will."""
        if any(map(self._hosts.owns, missing)):
            raise DamageError(f"{self._work.folder}: {what} that were just written are not there; look at the disk.")

    def _words(self, missing: list[int], what: str) -> str:
        """Returns what is missing, by host."""
        absent = self._notes.check(map(self._hosts.owner, missing))
        gone = f" (no sign of host {', '.join(map(str, absent))} in {self._work.hosts})" if absent else ""
        return self._hosts.share(missing, what) + gone

    def _ordinary(self, stream: Stream) -> dict[str, float]:
        """Returns the number of ordinary tokens and their unigram entropy in nats."""
        counts_V = self._pool.submit(rows.count_ids, stream, self._vocabulary.size).result()
        counts_V[list(self._vocabulary.all_special_ids)] = 0
        share = counts_V[counts_V > 0] / counts_V.sum()
        return {"tokens": int(counts_V.sum()), "unigram_entropy": float(-np.sum(share * np.log(share)))}
