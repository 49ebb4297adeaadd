"""`tokenizer`: train a tokenizer on the corpus, or copy the one that config.tokenizer.path names."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlm import logs
from mlm.commands import common
from mlm.errors import InputError
from mlm.paths import children, is_begun, replacing
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from mlm.data.hosts import Hosts

RECIPE = "recipe.json"  # in the tokenizer's folder, and the last file there: what it was made from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Makes the tokenizer."""
    config, workdir = common.open_run(args, overrides)
    with workdir.locked():
        make_tokenizer(config, workdir)


def make_tokenizer(config: ConfigDict, workdir: Workdir, hosts: Hosts | None = None) -> None:
    """Trains the tokenizer into the workdir, or copies the one that tokenizer.path names.

    The first host does; the others wait for it.

    Raises:
      InputError: one of other settings is there, or the config asks for what can't be.
      PreemptedError: the first host has not made it in time.
    """
    from mlm.data import corpus, tokenizer
    from mlm.data.manifest import holds_foreign_shards

    path, recipe = config.tokenizer.path, workdir.tokenizer / RECIPE
    settings = {"corpus": config.corpus.to_dict(), "tokenizer": config.tokenizer.to_dict()}
    if path:
        settings = {"path": path}
    if hosts is not None and hosts.index:
        hosts.wait(
            lambda: [] if recipe.is_file() else [0],
            lambda missing: f"the tokenizer of host 0 in {workdir.tokenizer}",
        )
    if children(workdir.tokenizer) and not is_begun(workdir.tokenizer, last=RECIPE):
        if logs.read_object(recipe) != json.loads(json.dumps(settings)):
            raise InputError(
                f"{workdir.tokenizer}: was made with other settings (config.corpus, config.tokenizer); use another "
                "--workdir, or set them back."
            )
        return
    if not path and config.shards.dir and holds_foreign_shards(config.shards.dir):
        raise InputError(f"{config.shards.dir}: its shards were made with a tokenizer that exists; set tokenizer.path.")
    begin = time.monotonic()
    with replacing(workdir.tokenizer, last=RECIPE) as new:
        if path:
            tokenizer.load(path).save_pretrained(str(new))
        else:
            keys = config.tokenizer.to_dict()
            del keys["path"]
            documents = corpus.Corpus(**config.corpus.to_dict())
            texts = (document.text for document in documents if document.split == "train")
            tokenizer.train(texts, **keys, length=config.model.positions, folder=str(new))
        (new / RECIPE).write_text(json.dumps(settings))
    print(f"tokenizer: {workdir.tokenizer}, {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
