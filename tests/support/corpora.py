"""Real text, a tokenizer and shards made from it: once a session, small enough for seconds."""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer

from mlm import config as configs
from mlm.data import corpus, docstrings, shards, tokenizer
from mlm.data.corpus import Corpus, Part
from mlm.data.manifest import Manifest, Shard, Split
from mlm.data.sources import Document
from mlm.data.train_tokenizer import train
from mlm.engine.engine import open_pool
from mlm.paths import UPath
from tests.support import labelled_texts

LENGTH = 32
COUNTS = {"train": 6, "validation": 2}


def corpus_of(sources: tuple[str, ...], **settings) -> Corpus:
    """With the defaults of configs/base.py, but for a validation split of a tenth."""
    defaults = configs.load(str(configs.BASE), ["corpus.validation_fraction=0.1"]).corpus.to_dict()
    return Corpus(**defaults | {"sources": sources, "weights": (1.0,) * len(sources)} | settings)


def read_documents(corpus: Corpus) -> list[tuple[Part, Document]]:
    """All documents in order, read in this process."""
    return [(part, document) for part in corpus.parts() for document in corpus.read(part, texts="")]


def texts_of(*sources: str, **settings) -> list[str]:
    return [text for _, (text, _) in read_documents(corpus_of(sources, **settings))]


def write_jsonl(
    path: pathlib.Path, texts: list[str], field: str = "text", **columns: list[str]
) -> str:
    """A file of a source, which is returned."""
    columns = {field: texts} | columns
    table = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return labelled_texts.write_jsonl(path, table)


def written_texts(texts: list[str], folder: pathlib.Path) -> Corpus:
    """Some texts in a file of their own beside a folder, one in ten of them for validation."""
    splits = ["train" if n % 10 else "validation" for n in range(len(texts))]
    source = write_jsonl(folder.with_name(f"{folder.name}.jsonl"), texts, split=splits)
    sizes = [len(text.encode()) for text in texts]
    share = sum(sizes[::10]) / max(1, sum(sizes))
    return corpus_of(
        (source,),
        group="split",
        validation_groups=("validation",),
        validation_fraction=min(share, 0.99),
    )


def train_tokenizer(
    texts: list[str], folder: pathlib.Path, kind: str = "unigram", **settings
) -> str:
    """Of the first 0.3 megabytes of some texts."""
    settings = {"vocab_size": 600, "lowercase": False, "length": 64, **settings}
    sizes = itertools.accumulate((len(text) for text in texts), initial=0)
    first = [text for text, before in zip(texts, sizes, strict=False) if before < 0.3e6]
    train(first, kind=kind, folder=str(folder), **settings)
    return str(folder)


def write_shards(
    texts: list[str] | Corpus,
    folder: pathlib.Path,
    tokenizer_folder: str,
    *,
    workers: int = 0,
    source: str = "texts",
    length: int = LENGTH,
    counts: dict[str, int] | None = None,
    rows: str = "concatenated",
) -> Manifest:
    """Shards of a corpus, or of `written_texts`, by `workers` processes of their own or in this one."""
    corpus = texts if isinstance(texts, Corpus) else written_texts(texts, folder)
    settings = shards.Settings(length, counts or COUNTS, rows)
    with open_pool(workers=workers) if workers else contextlib.nullcontext(InProcess()) as engine:
        names = {
            "tokenizer_folder": tokenizer_folder,
            "folder": str(folder),
            "source": {"sources": source},
        }
        return shards.write(corpus, settings, engine=engine, **names)


def ids_of(texts: Iterable[str], tokenizer_folder: str) -> list[list[int]]:
    """<s> ... </s> of each text, one by one, with special tokens as text."""
    tokenizer = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json")
    tokenizer.encode_special_tokens = True
    return [tokenizer.encode(text).ids for text in texts]


def shard_rows(manifest: Manifest, split: str) -> list[np.ndarray]:
    """The rows [N, L] of each shard, parsed as transformers' TF-TPU example does; padding is -1."""
    import tensorflow as tf

    feature = tf.io.FixedLenFeature((manifest.length,), tf.int64)
    found = []
    for shard in manifest.splits[split].shards:
        records = (
            tf.data.TFRecordDataset(f"{manifest.folder}/{shard.file}")
            .batch(10**6)
            .get_single_element()
        )
        rows = tf.io.parse_example(records, {"input_ids": feature, "attention_mask": feature})
        ids, real = (rows[name].numpy() for name in ("input_ids", "attention_mask"))
        assert (real.all() or not manifest.full_rows) and (
            ids[real == 0] == manifest.special_ids["pad"]
        ).all()
        found.append(np.where(real, ids, -1))
    return found


def contents(folder: pathlib.Path | UPath | str) -> dict[str, str]:
    """{file below the folder: SHA-256} of a folder, local or not."""
    files = [path for path in UPath(folder).rglob("*") if path.is_file()]
    return {
        str(path)[len(str(folder)) :]: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def manifest_of(length: int, **splits: dict) -> Manifest:
    """A manifest without shards to read: {split: its counts, and "records" of each shard}."""
    made = {}
    for name, split_info in splits.items():
        names = [
            (f"{name}/dataset-{n}-{count}.tfrecord", count)
            for n, count in enumerate(split_info.pop("records", ()))
        ]
        made[name] = Split(
            tuple(Shard(file, count, 100 * count, "ab" * 32) for file, count in names), **split_info
        )
    special = {role: number for number, role in enumerate(tokenizer.ROLES)}
    return Manifest(
        "", length, 600, special, tuple(special.values()), "cd" * 32, True, "", "texts", made
    )


def numbered(count: int, first: int = 0) -> list[str]:
    """Texts that are all different."""
    return [f"This is the text of document number {n}." for n in range(first, first + count)]


def in_epochs(batches: Iterator[dict[str, np.ndarray]], count: int) -> dict[str, np.ndarray]:
    """The columns of the first `count` batches, one after the other."""
    taken = list(itertools.islice(batches, count))
    return {key: np.concatenate([batch[key] for batch in taken]) for key in taken[0]}


@functools.cache
def real_texts() -> list[str]:
    """Different docstrings of transformers, 0.3 megabytes: the same with every version of Python and jax."""
    files = sorted(
        pathlib.Path(importlib.util.find_spec("transformers").origin).parent.glob("*.py")
    )
    found = dict.fromkeys(text for file in files for text in docstrings.of_file(file))
    return [text for text in found if len(text) < 1200]


def split_of(found: Corpus) -> dict[str, str]:
    splits = {}
    for part, (text, group) in read_documents(found):
        split = found.split_of(part, group, corpus.text_hash(text))
        assert splits.setdefault(text, split) == split
    return splits


class InProcess:
    """Runs tasks here, where monkeypatch reaches them."""

    workers = 1

    def each(self, function, items, *, label):
        return enumerate(map(function, items))
