import pathlib
import shutil

import pytest

from mlm.data.manifest import Manifest, load_manifest


@pytest.fixture
def copied(manifest: Manifest, tmp_path: pathlib.Path) -> Manifest:
    """The shards in a folder that may be damaged."""
    shutil.copytree(manifest.folder, tmp_path / "copied")
    return load_manifest(str(tmp_path / "copied"))
