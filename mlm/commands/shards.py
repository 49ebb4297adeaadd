"""`shards`: tokenize the corpus, chunk it and write TFRecord shards, on a process pool or a cluster."""

import argparse
import time

from ml_collections import ConfigDict

from mlm.commands import common
from mlm.commands.tokenizer import make_tokenizer, warn_of_unknown_tokens
from mlm.data.manifest import NAME, holds_foreign_shards
from mlm.engine.engine import Engine
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.text import say
from mlm.workdir import Workdir, work_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    common.add_host_flags(parser)
    common.add_engine_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides)
    if config.data.mixture:
        raise InputError(
            "config.data.mixture: its shards are written folder by folder; use a config for each."
        )
    with common.locked(workdir), common.open_engine(args, config, workdir) as engine:
        if engine is not None:
            make_tokenizer(config, workdir, engine)
            make_shards(config, workdir, engine)


def make_shards(config: ConfigDict, workdir: Workdir, engine: Engine) -> None:
    """Writes the shards, unless they exist or are a mixture's. Those of shards.dir may lack a manifest, and stay."""
    from mlm.data import corpus, sample, shards

    if config.data.mixture:
        return
    folder = workdir.shards_of(config)
    if config.shards.dir and holds_foreign_shards(folder):
        say(f"shards: {folder}, without a manifest, used as they are")
        return
    counts = {"train": config.shards.count, "validation": config.shards.validation_count}
    complete = (UPath(folder) / NAME).is_file()
    begin = time.monotonic()
    documents = corpus.Corpus.from_config(config.corpus)
    # `make_tokenizer` warns of a new one
    if (config.tokenizer.path or config.train.branch_from) and not complete:
        texts = str(work_folder(folder) / "texts")
        warn_of_unknown_tokens(
            sample.draw(documents, megabytes=1.0, engine=engine, texts=texts), workdir
        )
    # a key of earlier versions, whose shards are the same
    source = config.corpus.to_dict() | {"near_duplicates": 0.0}
    manifest = shards.write(
        documents,
        shards.Settings(config.shards.length, counts, config.shards.rows),
        tokenizer_folder=str(workdir.tokenizer),
        folder=folder,
        source=source,
        engine=engine,
    )
    seconds = time.monotonic() - begin
    tokens = sum(split.tokens for split in manifest.splits.values())
    how = f"{seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    if complete:
        how = "there already, for this config; its texts were not read again"
    say(f"shards: {folder}, {tokens:,} tokens, {how}")
