"""Map: documents -> blocks of tokens, each in a file whose name says what it holds.

A file appears under that name when it is complete, so a listing of the folder shows what is done, to every host and
after a kill. The name has a hash of the block's texts, so that a block of another corpus is never mistaken for it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from mlm.data import tokenizer
from mlm.data.corpus import Document
from mlm.data.manifest_rules import SPLITS
from mlm.data.work import Work
from mlm.errors import DamageError
from mlm.paths import put_file, sizes

BLOCK_BYTES = 4_000_000  # of text, and at most so many documents:
BLOCK_DOCUMENTS = 4096
BATCH_DOCUMENTS = 256  # tokenized in one call


Key = tuple[int, str, str]  # of a block: its number, its split, and a hash of its texts


class Block(NamedTuple):
    """A block that is written."""

    number: int
    split: str
    digest: str
    tokens: int  # special ones included
    text_bytes: int

    @property
    def key(self) -> Key:
        """Identifies the block."""
        return self[:3]

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.number:06d}-{self.split}-{self.digest}-{self.tokens}-{self.text_bytes}"


def written(work: Work) -> dict[Key, Block]:
    """Returns the complete blocks of all hosts."""
    found = {}
    for name, size in sizes(work.blocks).items():
        number, split, digest, tokens, text_bytes = name.split("-")
        block = Block(int(number), split, digest, int(tokens), int(text_bytes))
        if size == block.tokens * work.dtype.itemsize:
            found[block.key] = block
    return found


def read(file: str, dtype: np.dtype) -> np.ndarray:
    """Returns the tokens of a block's file; raises DamageError if it was cut."""
    tokens = np.fromfile(file, dtype)
    if len(tokens) != int(Path(file).name.split("-")[3]):
        raise DamageError(f"{file}: is not what was written; remove it, and start the same command again.")
    return tokens


def write(
    pool: concurrent.futures.Executor, documents: Iterable[Document], work: Work, *, max_pending: int
) -> list[Key]:
    """Writes this host's blocks, except for those that are there; returns the keys of all hosts' blocks, in order.

    Args:
      pool: of workers initialized by `start_worker`.
      documents: of the corpus; read to the end on every host.
      work: for folders and hosts.
      max_pending: blocks of text in memory.
    """
    there = written(work)
    keys: list[Key] = []
    pending: deque[concurrent.futures.Future] = deque()
    with tqdm(unit=" tokens", unit_scale=True, desc="tokenize", disable=not sys.stderr.isatty()) as bar:
        for number, (split, texts) in enumerate(_cut(documents)):
            key = (number, split, _digest(split, texts))
            keys.append(key)
            if key in there:
                bar.update(there[key].tokens)
            elif work.hosts.owns(number):
                pending.append(pool.submit(_tokenize, key, texts, work))
            if len(pending) > max_pending:
                bar.update(pending.popleft().result())
        for task in pending:
            bar.update(task.result())
    return keys


def stream_digest(keys: Iterable[Key]) -> str:
    """Returns a hash of the blocks' keys in order: two corpora with the same one make the same shards."""
    return hashlib.blake2b(repr(list(keys)).encode(), digest_size=16).hexdigest()


def _cut(documents: Iterable[Document]) -> Iterator[tuple[str, list[str]]]:
    """Yields (split, texts) blocks of about BLOCK_BYTES."""
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for document in documents:
        split = document.split
        texts[split].append(document.text)
        sizes[split] += len(document.text)
        if sizes[split] >= BLOCK_BYTES or len(texts[split]) == BLOCK_DOCUMENTS:
            yield split, texts[split]
            texts[split], sizes[split] = [], 0
    yield from ((split, rest) for split, rest in texts.items() if rest)


def _digest(split: str, texts: list[str]) -> str:
    digest = hashlib.blake2b(split.encode(), digest_size=16)
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def start_worker(folder: str) -> None:
    """Initializes a worker process of a tokenizer; it uses one thread, since the processes are the parallelism."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _tokenizer
    _tokenizer = tokenizer.load_fast(folder)
    _tokenizer.no_truncation()
    _tokenizer.no_padding()
    _tokenizer.encode_special_tokens = True


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # otherwise a worker whose parent was killed would wait for work forever


def _tokenize(key: Key, texts: list[str], work: Work) -> int:
    """Writes a block; returns its tokens."""
    ids: list[int] = []
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        for encoding in _tokenizer.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS]):
            ids += encoding.ids
    block = Block(*key, len(ids), sum(len(text.encode()) for text in texts))
    np.array(ids, work.dtype).tofile(work.scratch / block.name)
    put_file(work.scratch / block.name, work.blocks / block.name)
    return block.tokens
