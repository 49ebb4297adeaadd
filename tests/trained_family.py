"""A run of twelve steps whose checkpoints after 4, 8 and 12 are all there, with its tokenizer and its shards."""

import functools
import shutil

import jax
import pytest

from mlm.data.manifest import Manifest
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.fixtures import pretrain, tiny_config

SETTINGS = ("data.lanes=4", "checkpoint.every=4", "evaluate.every=4", "checkpoint.keep=9")


@pytest.fixture(scope="session")
def family(manifest: Manifest, tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Workdir:
    workdir = Workdir(str(tmp_path_factory.mktemp("family") / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    shutil.copytree(manifest.folder, str(workdir.shards))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", functools.partial(sharding.make_mesh, devices=jax.devices()[:1]))
        pretrain(tiny_config(*SETTINGS), workdir, manifest)
    return workdir
