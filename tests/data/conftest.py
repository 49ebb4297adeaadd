import pathlib
import shutil

import pytest

from mlm.data.manifest import Manifest, load_manifest
from tests.data.rows import small_parts


@pytest.fixture
def copied(manifest: Manifest, tmp_path: pathlib.Path) -> Manifest:
    """The shards in a folder that may be damaged."""
    shutil.copytree(manifest.folder, tmp_path / "copied")
    return load_manifest(str(tmp_path / "copied"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts and blocks, so that there are many."""
    small_parts(monkeypatch)
