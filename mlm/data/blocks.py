"""Map: documents -> blocks of tokens, each in a file whose name says what it holds.

A file appears under that name when it is complete, so a listing of the folder shows what is done, to every host and
after a kill. The name has a hash of the block's texts, so that a block of another corpus is never mistaken for it.
"""

import concurrent.futures
import hashlib
import json
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
from mlm.data.manifest import SPLITS
from mlm.data.work import Work
from mlm.errors import DamageError
from mlm.paths import put_file, sizes

BLOCK_BYTES = 4_000_000  # of text, and at most so many documents:
BLOCK_DOCUMENTS = 4096
BATCH_DOCUMENTS = 256  # tokenized in one call


class Block(NamedTuple):
    """A block that is written; its file is named {key}-{tokens}-{text_bytes}, its key {number}-{split}-{hash}."""

    file: str
    split: str
    tokens: int  # special ones included
    text_bytes: int


def written(work: Work) -> dict[str, Block]:
    """Returns {key: block} of the complete blocks of all hosts."""
    found = {}
    for file, size in sizes(work.blocks).items():
        key, tokens, text_bytes = file.rsplit("-", 2)
        if size == int(tokens) * work.dtype.itemsize:
            found[key] = Block(file, key.split("-")[1], int(tokens), int(text_bytes))
    return found


def read(file: str, dtype: np.dtype) -> np.ndarray:
    """Returns the tokens of a block's file; raises DamageError if it was cut."""
    tokens = np.fromfile(file, dtype)
    if len(tokens) != int(Path(file).name.split("-")[3]):
        raise DamageError(f"{file}: is not what was written; remove it, and start the same command again.")
    return tokens


def write(
    pool: concurrent.futures.Executor, documents: Iterable[Document], work: Work, *, max_pending: int
) -> list[str]:
    """Writes this host's blocks, except for those that are there; returns the keys of all hosts' blocks, in order."""
    there = written(work)
    keys: list[str] = []
    pending: deque[concurrent.futures.Future] = deque()
    with tqdm(unit=" tokens", unit_scale=True, desc="tokenize", disable=not sys.stderr.isatty()) as bar:
        for number, (split, texts) in enumerate(_cut(documents)):
            digest = hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
            key = f"{number:06d}-{split}-{digest}"
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


def _cut(documents: Iterable[Document]) -> Iterator[tuple[str, list[str]]]:
    """Yields (split, texts) blocks of about BLOCK_BYTES."""
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for text, split in documents:
        texts[split].append(text)
        sizes[split] += len(text)
        if sizes[split] >= BLOCK_BYTES or len(texts[split]) == BLOCK_DOCUMENTS:
            yield split, texts[split]
            texts[split], sizes[split] = [], 0
    yield from ((split, rest) for split, rest in texts.items() if rest)


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


def _tokenize(key: str, texts: list[str], work: Work) -> int:
    """Writes a block; returns its tokens."""
    ids: list[int] = []
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        for encoding in _tokenizer.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS]):
            ids += encoding.ids
    file = f"{key}-{len(ids)}-{sum(len(text.encode()) for text in texts)}"
    np.array(ids, work.dtype).tofile(work.scratch / file)
    put_file(work.scratch / file, work.blocks / file)
    return len(ids)
