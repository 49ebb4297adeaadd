"""Documents -> TFRecord shards: {folder}/{split}/dataset-{shard}-{records}.tfrecord, and manifest.json.

Map: the documents are cut into blocks, a block's tokens are written to a file of their own. Reduce: the blocks in order
are the split's stream of tokens; row r of the stream goes to shard r mod n. So the bytes depend on the documents, the
tokenizer and the settings, never on how many processes did the work; every shard is a uniform sample of the split; and
only the last, partial row of a split is lost.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from mlm.data import cores, tfrecord, tokenizer
from mlm.data.corpus import Document
from mlm.data.manifest import NAME, Manifest, Shard, Split, load_manifest
from mlm.errors import InputError
from mlm.paths import UPath

SPLITS = ("train", "validation")
BLOCK_BYTES = 4_000_000  # of text, and at most so many documents:
BLOCK_DOCUMENTS = 4096
BATCH_DOCUMENTS = 256  # tokenized in one call
OPEN_FILES = 256  # shards that one worker writes at once


class Block(NamedTuple):
    """What the map says of a block of documents."""

    file: str  # of the tokens, uint16 or uint32
    tokens: int  # special ones included
    text_bytes: int
    histogram_V: np.ndarray  # int64: how often each id came


@dataclasses.dataclass
class Stream:
    """What the map says of a split: the files of its tokens in order, and sums over them."""

    files: list[str] = dataclasses.field(default_factory=list)
    tokens: int = 0
    text_bytes: int = 0
    histogram_V: np.ndarray | int = 0

    def add(self, block: Block) -> None:
        """Puts a block at the end."""
        self.files.append(block.file)
        self.tokens += block.tokens
        self.text_bytes += block.text_bytes
        self.histogram_V = self.histogram_V + block.histogram_V


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
) -> Manifest:
    """Writes the shards of both splits, unless the same ones are there.

    Each document is tokenized with its special tokens, <s> ... </s>, and the documents are put end to end and cut into
    rows of `length`, as transformers' TF-TPU example does. What looks like a special token in a text stays text.

    Args:
      documents: of the corpus; not touched if the shards are there.
      tokenizer_folder: local.
      folder: to be made, local or gs://; it appears, or its manifest does, when all is written.
      length: tokens in a row.
      counts: shards of each split; a small validation split gets fewer.
      workers: processes; 0 for one a core.
      source: what the documents are, in words that change when they do.
      tally: counts of documents and duplicates that `corpus.documents` fills.

    Raises:
      InputError: the folder holds something else, or a split has too few rows.
    """
    settings = [source, tokenizer.fingerprint(tokenizer_folder), length, counts]
    inputs = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    root = UPath(folder)
    if root.is_file() or (root.is_dir() and any(root.iterdir())):
        return _existing(folder, inputs)
    temporary = _temporary(folder)
    fast = tokenizer.load_fast(tokenizer_folder)
    named, every = tokenizer.special_ids(tokenizer_folder)
    splits = _make(documents, temporary, tokenizer_folder, length, counts, workers, every, tally)
    shutil.rmtree(temporary / "tokens")
    manifest = Manifest(
        folder=folder,
        length=length,
        vocab_size=fast.get_vocab_size(),
        special_ids=named,
        all_special_ids=every,
        tokenizer_fingerprint=settings[1],
        full_rows=True,
        inputs=inputs,
        source=source,
        splits=splits,
    )
    (temporary / NAME).write_text(manifest.to_json() + "\n")
    _publish(temporary, folder, manifest)
    return manifest


def _make(
    documents: Iterable[Document],
    temporary: Path,
    tokenizer_folder: str,
    length: int,
    counts: dict[str, int],
    workers: int,
    special: tuple[int, ...],
    tally: Counter | None,
) -> dict[str, Split]:
    """Writes the shards into the temporary folder; arguments as of `write`."""
    workers = workers or cores.available()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start, (tokenizer_folder,)) as pool:
        streams = _map(pool, documents, temporary, 2 * workers)
        splits = {}
        for split in SPLITS:
            stream = streams[split]
            shards = _reduce(pool, stream, temporary, split, length, counts[split], workers)
            splits[split] = Split(
                shards=shards,
                documents=None if tally is None else tally[f"{split} documents"],
                duplicates=None if tally is None else tally[f"{split} duplicates"],
                dropped_tokens=stream.tokens % length,
                text_bytes=stream.text_bytes,
                **_ordinary(stream.histogram_V, special),
            )
    return splits


def _temporary(folder: str) -> Path:
    """Makes the folder of the work: beside the target, or, for gs:// and the like, in this machine's own place."""
    if "://" in folder:
        temporary = Path(tempfile.mkdtemp(prefix="mlm-shards-"))
    else:
        temporary = Path(folder).with_name(Path(folder).name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        (temporary / "tokens").mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{folder}: can't be written ({error.strerror}); choose another shards.dir.") from error
    return temporary


def _publish(temporary: Path, folder: str, manifest: Manifest) -> None:
    """Moves the finished shards to their place, the manifest last."""
    if "://" not in folder:
        temporary.rename(folder)
        return
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    for file in [*shards, NAME]:
        target = UPath(folder) / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.fs.put_file(str(temporary / file), target.path)
    shutil.rmtree(temporary)


def _existing(folder: str, inputs: str) -> Manifest:
    if (UPath(folder) / NAME).is_file():
        manifest = load_manifest(folder)
        if manifest.inputs == inputs:
            return manifest
    raise InputError(
        f"{folder}: holds shards of another corpus, tokenizer or setting; use another --workdir or shards.dir, or set "
        "the config back."
    )


# Map ------------------------------------------------------------------------------------------------------------------


def _map(
    pool: concurrent.futures.Executor, documents: Iterable[Document], folder: Path, most: int
) -> dict[str, Stream]:
    """Tokenizes all documents, with at most `most` blocks of text in memory; returns the stream of each split."""
    streams = {split: Stream() for split in SPLITS}
    pending: deque[tuple[str, concurrent.futures.Future]] = deque()
    with tqdm(unit=" tokens", unit_scale=True, desc="tokenize", disable=not sys.stderr.isatty()) as bar:

        def finish() -> None:
            split, future = pending.popleft()
            block = future.result()
            streams[split].add(block)
            bar.update(block.tokens)

        for number, (split, texts) in enumerate(_cut(documents)):
            pending.append((split, pool.submit(_tokenize, texts, str(folder / "tokens" / f"{number:06d}"))))
            if len(pending) > most:
                finish()
        while pending:
            finish()
    return streams


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


def _start(folder: str) -> None:
    """Prepares a worker process: one thread each, the processes are the parallelism."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _tokenizer
    _tokenizer = tokenizer.load_fast(folder)
    _tokenizer.no_truncation()
    _tokenizer.no_padding()
    _tokenizer.encode_special_tokens = True


def _tokenize(texts: list[str], file: str) -> Block:
    ids: list[int] = []
    for start in range(0, len(texts), BATCH_DOCUMENTS):
        for encoding in _tokenizer.encode_batch_fast(texts[start : start + BATCH_DOCUMENTS]):
            ids += encoding.ids
    size = _tokenizer.get_vocab_size()
    tokens = np.array(ids, np.uint16 if size <= 2**16 else np.uint32)
    tokens.tofile(file)
    return Block(file, len(tokens), sum(len(text.encode()) for text in texts), np.bincount(tokens, minlength=size))


def _ordinary(histogram_V: np.ndarray, special: tuple[int, ...]) -> dict[str, float]:
    """Returns the number of ordinary tokens and their unigram entropy in nats."""
    histogram_V = histogram_V.copy()
    histogram_V[list(special)] = 0
    share = histogram_V[histogram_V > 0] / histogram_V.sum()
    return {"tokens": int(histogram_V.sum()), "unigram_entropy": float(-np.sum(share * np.log(share)))}


# Reduce ---------------------------------------------------------------------------------------------------------------


def _reduce(
    pool: concurrent.futures.Executor,
    stream: Stream,
    folder: Path,
    split: str,
    length: int,
    count: int,
    workers: int,
) -> tuple[Shard, ...]:
    """Writes the shards of a split; returns them in order."""
    rows = stream.tokens // length
    if split == "train" and rows < count:
        raise InputError(
            f"config.shards.count = {count}: the corpus makes only {rows} rows of {length} tokens; lower it."
        )
    if rows == 0:
        raise InputError(
            f"the {split} split makes no row of {length} tokens: raise corpus.validation_fraction, or give more text."
        )
    count = min(count, rows)
    (folder / split).mkdir()
    names = [f"{split}/dataset-{shard}-{(rows - shard - 1) // count + 1}.tfrecord" for shard in range(count)]
    group = min(-(-count // workers), OPEN_FILES)
    wide = np.dtype(np.uint16 if len(stream.histogram_V) <= 2**16 else np.uint32)
    tasks = [
        pool.submit(
            _write_shards, stream.files, wide.str, length, count, start, names[start : start + group], str(folder)
        )
        for start in range(0, count, group)
    ]
    return tuple(shard for task in tasks for shard in task.result())


def _write_shards(
    files: list[str], dtype: str, length: int, count: int, start: int, names: list[str], folder: str
) -> list[Shard]:
    """Writes shards `start`, `start` + 1, ... of `count`, called `names`, in one pass over the blocks."""
    records, sizes, hashes = [0] * len(names), [0] * len(names), [hashlib.sha256() for _ in names]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(Path(folder, name).open("wb")) for name in names]
        row, rest = 0, np.zeros(0, dtype)
        for file in files:
            tokens = np.concatenate([rest, np.fromfile(file, dtype)])
            rows = len(tokens) // length
            ids_NxL, rest = tokens[: rows * length].reshape(rows, length), tokens[rows * length :]
            for index, output in enumerate(outputs):
                encoded = tfrecord.encode(ids_NxL[(start + index - row) % count :: count])
                data = b"".join(encoded)
                output.write(data)
                hashes[index].update(data)
                records[index] += len(encoded)
                sizes[index] += len(data)
            row += rows
    digests = (digest.hexdigest() for digest in hashes)
    return [Shard(*facts) for facts in zip(names, records, sizes, digests, strict=True)]
