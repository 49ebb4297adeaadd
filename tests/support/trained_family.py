"""A run of twelve steps with its tokenizer and shards; its checkpoints are 4 and 8, which are milestones, and 12."""

import pathlib
import shutil

from mlm.data.manifest import Manifest
from mlm.workdir import Workdir
from tests.support.tiny import meshes_of, pretrain, tiny_config

SETTINGS = (
    "data.lanes=4",
    "checkpoint.every=4",
    "evaluate.every=4",
    "checkpoint.milestones=('4', 8)",
)


def train_family(folder: pathlib.Path, manifest: Manifest, tokenizer_folder: str) -> Workdir:
    workdir = Workdir(str(folder))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    shutil.copytree(manifest.folder, str(workdir.shards))
    with meshes_of(1):
        pretrain(tiny_config(*SETTINGS), workdir, manifest)
    return workdir
