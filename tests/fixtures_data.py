"""Real text, a tokenizer and shards made from it: once a session, small enough for seconds."""

import itertools
import json
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np
import pytest

from mlm import config as configs
from mlm.cluster.engine import open_engine
from mlm.data import docstrings, shards, tokenizer
from mlm.data.corpus import Corpus
from mlm.data.manifest import Manifest, Shard, Split

LENGTH = 32
COUNTS = {"train": 6, "validation": 2}


def corpus_of(sources: tuple[str, ...], **settings) -> Corpus:
    """With the defaults of configs/base.py, but for a validation split of a tenth."""
    defaults = configs.load("configs/base.py", ["corpus.validation_fraction=0.1"]).corpus.to_dict()
    return Corpus(**defaults | {"sources": sources, "weights": (1.0,) * len(sources)} | settings)


def written_texts(texts: list[str], folder: pathlib.Path) -> Corpus:
    """Some texts in a file of their own beside a folder, one in ten of them for validation."""
    file = folder.with_name(f"{folder.name}.jsonl")
    rows = ({"text": text, "split": "train" if n % 10 else "validation"} for n, text in enumerate(texts))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return corpus_of((f"jsonl:{file}",), group="split", validation_groups=("validation",))


def train_tokenizer(texts: list[str], folder: pathlib.Path, kind: str = "unigram", **settings) -> str:
    settings = {"vocab_size": 600, "sample_megabytes": 0.3, "lowercase": False, "length": 64, **settings}
    tokenizer.train(texts, kind=kind, folder=str(folder), **settings)
    return str(folder)


def write_shards(
    texts: list[str] | Corpus,
    folder: pathlib.Path,
    tokenizer_folder: str,
    *,
    workers: int = 1,
    source: str = "texts",
    length: int = LENGTH,
    counts: dict[str, int] | None = None,
) -> Manifest:
    """Shards of a corpus, or of `written_texts`."""
    corpus = texts if isinstance(texts, Corpus) else written_texts(texts, folder)
    settings = shards.Settings(length, counts or COUNTS)
    with open_engine(workers=workers) as engine:
        shared = {"tokenizer_folder": tokenizer_folder, "folder": str(folder), "source": source}
        return shards.write(corpus, settings, engine=engine, **shared)


def manifest_of(length: int, **splits: dict) -> Manifest:
    """A manifest without shards to read: {split: its counts, and "records" of each shard}."""
    made = {}
    for name, facts in splits.items():
        names = [(f"{name}/dataset-{n}-{count}.tfrecord", count) for n, count in enumerate(facts.pop("records", ()))]
        made[name] = Split(tuple(Shard(file, count, 100 * count, "ab" * 32) for file, count in names), **facts)
    special = {role: number for number, role in enumerate(tokenizer.ROLES)}
    return Manifest("", length, 600, special, tuple(special.values()), "cd" * 32, True, "", "texts", made)


def numbered(count: int, first: int = 0) -> list[str]:
    """Texts that are all different."""
    return [f"This is the text of document number {n}." for n in range(first, first + count)]


def in_epochs(batches: Iterator[dict[str, np.ndarray]], count: int) -> dict[str, np.ndarray]:
    """The columns of the first `count` batches, one after the other."""
    taken = list(itertools.islice(batches, count))
    return {key: np.concatenate([batch[key] for batch in taken]) for key in taken[0]}


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Docstrings of the standard library."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("[a-k]*.py"))
    return list(dict.fromkeys(text for file in files for text in docstrings.of_file(file)))


@pytest.fixture(scope="session")
def tokenizer_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer") / "unigram")


@pytest.fixture(scope="session")
def manifest(texts: list[str], tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of shards that are there to be read; a test that damages them copies the folder first."""
    return write_shards(texts[:400], tmp_path_factory.mktemp("data") / "shards", tokenizer_folder)
