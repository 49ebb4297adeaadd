import pathlib
import shutil

import pytest

from mlm.data.manifest import Manifest, load_manifest
from tests.data.rows import small_parts
from tests.support.corpora import train_tokenizer


@pytest.fixture
def copied(manifest: Manifest, tmp_path: pathlib.Path) -> Manifest:
    shutil.copytree(manifest.folder, tmp_path / "copied")
    return load_manifest(str(tmp_path / "copied"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)


@pytest.fixture(scope="session")
def tokenizers(
    texts: list[str], tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The folder of a tokenizer of each kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) / "tokenizer" for kind in ("bpe", "wordpiece")}
    return {"unigram": tokenizer_folder} | {
        kind: train_tokenizer(texts, folders[kind], kind) for kind in folders
    }
