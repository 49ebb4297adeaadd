"""A command that is about to start, as `preflight` sees it."""

import argparse
import dataclasses
import functools

from ml_collections import ConfigDict

from mlm.data import tokenizer
from mlm.data.manifest import load_manifest
from mlm.errors import DamageError, InputError
from mlm.memory import of_a_command
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, locate
from mlm.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Case:
    """A command that is about to start."""

    command: str
    config: ConfigDict
    workdir: Workdir | None  # which may not exist yet
    flags: argparse.Namespace

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to resume from, so that nothing is needed from which a run starts."""
        return bool(checkpoint_files.complete_steps(self.workdir.checkpoints))

    @property
    def tokenizer(self) -> str:
        """The tokenizer that the workdir has, or will be given a copy of; "" for one that is still to be trained."""
        if folder := self.workdir.tokenizer_folder:
            return folder
        path = self.config.tokenizer.path
        branch = self.config.train.branch_from
        trains = self.command == "train"
        if path:
            inherited = trains and "tokenizer.path" in getattr(self.flags, "inherited", {})
            return "" if inherited and not self._made_shards(path) else path
        folder = f"{locate.split_step(branch)[0]}/tokenizer" if branch else ""
        # rows need none
        return "" if trains and not (UPath(folder) / "tokenizer.json").is_file() else folder

    def _made_shards(self, path: str) -> bool:
        """Returns whether the shards that `train` reads were made with the tokenizer at `path`."""
        folder = next(iter(self.config.data.mixture), (self.workdir.shards_of(self.config),))[0]
        try:
            return load_manifest(folder).tokenizer_fingerprint == fingerprint_of(path)
        except (InputError, DamageError):  # reported when they are opened
            return False

    def fingerprint(self) -> str | None:
        """Returns that of `tokenizer`, None without one; raises InputError if it can't be used."""
        if self.workdir.tokenizer_folder:
            return tokenizer.fingerprint(self.tokenizer)
        return fingerprint_of(self.tokenizer) if self.tokenizer else None


@of_a_command
@functools.cache
def fingerprint_of(path: str) -> str:
    """Returns the fingerprint of the copy that `tokenizer` makes; raises InputError if it can't be used."""
    return tokenizer.content_hash(tokenizer.load(path).backend_tokenizer)
