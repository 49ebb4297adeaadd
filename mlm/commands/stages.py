"""The data stages of a run: what is there and unchanged is kept; what other settings made is never replaced."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator

from ml_collections import ConfigDict

from mlm import logs
from mlm.data import corpus, shards, tokenizer
from mlm.data.hosts import Hosts, wait
from mlm.data.manifest import NAME, Manifest, holds_foreign_shards, load_manifest, verify
from mlm.data.shards import ALONE
from mlm.errors import InputError
from mlm.paths import UPath, children, is_begun, replacing
from mlm.workdir import Workdir

RECIPE = "recipe.json"  # in the tokenizer's folder, and the last file there: what it was made from


def make_tokenizer(config: ConfigDict, workdir: Workdir, hosts: Hosts = ALONE) -> None:
    """Trains the tokenizer into the workdir, or brings the one that tokenizer.path names there.

    The first host does; the others wait for it.

    Raises:
      InputError: one of other settings is there, or the config asks for what can't be.
      PreemptedError: the first host has not made it in config.shards.patience seconds.
    """
    recipe = workdir.tokenizer / RECIPE
    settings = {"corpus": config.corpus.to_dict(), "tokenizer": config.tokenizer.to_dict()}
    if config.tokenizer.path:
        settings = {"path": config.tokenizer.path}
    if hosts.index:
        wait(
            lambda: (0 if recipe.is_file() else 1, lambda: f"the tokenizer of host 0 in {workdir.tokenizer}"),
            patience=config.shards.patience,
        )
    if children(workdir.tokenizer) and not is_begun(workdir.tokenizer, last=RECIPE):
        if logs.read_object(recipe) != json.loads(json.dumps(settings)):
            raise InputError(
                f"{workdir.tokenizer}: was made with other settings (config.corpus, config.tokenizer); use another "
                "--workdir, or set them back."
            )
        return
    if config.shards.dir and holds_foreign_shards(config.shards.dir) and not config.tokenizer.path:
        raise InputError(f"{config.shards.dir}: its shards were made with a tokenizer that exists; set tokenizer.path.")
    begin = time.monotonic()
    with replacing(workdir.tokenizer, last=RECIPE) as new:
        if config.tokenizer.path:
            tokenizer.load(config.tokenizer.path).save_pretrained(str(new))
        else:
            keys = config.tokenizer.to_dict()
            del keys["path"]
            texts = (document.text for document in documents(config) if document.split == "train")
            tokenizer.train(texts, **keys, length=config.model.positions, folder=str(new))
        (new / RECIPE).write_text(json.dumps(settings))
    _say(f"tokenizer: {workdir.tokenizer}, {time.monotonic() - begin:.1f} s")


def make_shards(config: ConfigDict, workdir: Workdir, hosts: Hosts = ALONE) -> None:
    """Writes the shards of the corpus, unless they are there; each host its part.

    Shards without a manifest in shards.dir, as transformers' TF-TPU example writes them, are used as they are.
    """
    folder = shards_folder(config, workdir)
    if config.shards.dir and holds_foreign_shards(folder):
        _say(f"shards: {folder}, without a manifest, used as they are")
        return
    there = (UPath(folder) / NAME).is_file()
    begin = time.monotonic()
    counts: Counter = Counter()
    manifest = shards.write(
        documents(config, counts),
        tokenizer_folder=str(workdir.tokenizer),
        folder=folder,
        length=config.shards.length,
        counts={"train": config.shards.count, "validation": config.shards.validation_count},
        workers=config.shards.workers,
        source=json.dumps(config.corpus.to_dict()),
        tally=counts,
        hosts=hosts,
        patience=config.shards.patience,
    )
    seconds = time.monotonic() - begin
    tokens = sum(split.tokens for split in manifest.splits.values())
    if there:
        _say(f"shards: {folder}, {tokens:,} tokens, there and unchanged")
        return
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    own, worker = (
        resource.getrusage(who).ru_maxrss * unit / 1e6 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    share = "" if hosts.count == 1 else f" by {hosts.count} hosts"
    _say(
        f"shards: {folder}, {tokens:,} tokens{share}, {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s; peak memory "
        f"{own:.0f} MB, and {worker:.0f} MB in the largest of the workers"
    )


def open_data(config: ConfigDict, workdir: Workdir) -> Manifest:
    """Returns the manifest of the shards, every file of them verified, and the tokenizer known to be theirs.

    Raises:
      InputError: there are no shards, or they were made with another tokenizer or length.
      DamageError: a shard is not what was written.
    """
    folder = shards_folder(config, workdir)
    there = (workdir.tokenizer / "tokenizer.json").is_file()
    manifest = load_manifest(folder, tokenizer_folder=str(workdir.tokenizer) if there else None)
    if manifest.length != config.shards.length:
        raise InputError(
            f"config.shards.length = {config.shards.length}: the shards in {folder} hold {manifest.length}."
        )
    if there and manifest.tokenizer_fingerprint not in (None, tokenizer.fingerprint(str(workdir.tokenizer))):
        raise InputError(
            f"{folder}: was not made with the tokenizer in {workdir.tokenizer}; use those that belong together."
        )
    for split, least, key in (("train", config.data.lanes, "data.lanes"), ("validation", 1, "shards.validation_count")):
        shards_ = [shard for shard in manifest.splits[split].shards if shard.records]
        if len(shards_) < least:
            raise InputError(
                f"{folder}: the {split} split has {len(shards_)} shards with records, config.{key} asks for {least}."
            )
    verify(manifest, deep=True)
    return manifest


def documents(config: ConfigDict, counts: Counter | None = None) -> Iterator[corpus.Document]:
    """Returns the documents of the config's corpus."""
    return corpus.documents(**config.corpus.to_dict(), counts=counts)


def shards_folder(config: ConfigDict, workdir: Workdir) -> str:
    """Returns the folder of the shards."""
    return config.shards.dir or str(workdir.shards)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
