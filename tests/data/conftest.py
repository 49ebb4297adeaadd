import shutil

import pytest

from mlm.data.manifest import load_manifest
from tests.data.rows import small_parts
from tests.support.corpora import train_tokenizer


@pytest.fixture
def copied(manifest, tmp_path):
    return load_manifest(str(shutil.copytree(manifest.folder, tmp_path / "copied")))


@pytest.fixture
def small(monkeypatch):
    small_parts(monkeypatch)


@pytest.fixture(scope="session")
def tokenizers(texts, tokenizer_folder, tmp_path_factory) -> dict[str, str]:
    """The folder of a tokenizer of each kind."""
    made = {
        kind: train_tokenizer(texts, tmp_path_factory.mktemp(kind) / "tokenizer", kind)
        for kind in ("bpe", "wordpiece")
    }
    return {"unigram": tokenizer_folder} | made
