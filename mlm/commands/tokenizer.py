"""`tokenizer`: train a tokenizer on the corpus, or copy the one that config.tokenizer.path names."""

import argparse
import json
import time

from ml_collections import ConfigDict

from mlm import logs
from mlm.commands import common
from mlm.data.hosts import Hosts
from mlm.errors import InputError
from mlm.paths import children, is_begun, replacing
from mlm.workdir import Workdir, lock

RECIPE = "recipe.json"  # in the tokenizer's folder, written last: the settings that made it

add_arguments = common.add_config_flags


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides)
    with lock(workdir.root):
        make_tokenizer(config, workdir)


def make_tokenizer(config: ConfigDict, workdir: Workdir, hosts: Hosts | None = None) -> None:
    """Makes the workdir's tokenizer, unless it exists; host 0 does, the others wait for it."""
    from mlm.data import corpus, tokenizer
    from mlm.data.manifest import holds_foreign_shards

    path, recipe = config.tokenizer.path, workdir.tokenizer / RECIPE
    settings = {"corpus": config.corpus.to_dict(), "tokenizer": config.tokenizer.to_dict()}
    settings = {"path": path} if path else settings
    if hosts is not None and hosts.index:
        hosts.wait(lambda: [] if recipe.is_file() else [0], lambda _: f"the tokenizer of host 0 in {workdir.tokenizer}")
    if children(workdir.tokenizer) and not is_begun(workdir.tokenizer, last=RECIPE):
        if logs.read_object(recipe) != json.loads(json.dumps(settings)):
            raise InputError(
                f"{workdir.tokenizer}: was made with other settings (config.corpus, config.tokenizer); restore them, "
                "or use another --workdir."
            )
        return
    if not path and config.shards.dir and holds_foreign_shards(config.shards.dir):
        raise InputError(f"{config.shards.dir}: its shards were made with another tokenizer; set tokenizer.path to it.")
    begin = time.monotonic()
    with replacing(workdir.tokenizer, last=RECIPE) as new:
        if path:
            tokenizer.load(path).save_pretrained(str(new))
        else:
            documents = corpus.Corpus(**config.corpus.to_dict())
            texts = (document.text for document in documents if document.split == "train")
            keys = {key: value for key, value in config.tokenizer.items() if key != "path"}
            tokenizer.train(texts, **keys, length=config.model.positions, folder=str(new))
        (new / RECIPE).write_text(json.dumps(settings))
    common.say(f"tokenizer: {workdir.tokenizer}, {time.monotonic() - begin:.1f} s")
