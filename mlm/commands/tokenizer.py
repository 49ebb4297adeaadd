"""`tokenizer`: train a tokenizer on the corpus, or copy the one that config.tokenizer.path names."""

import argparse
import json
import time
from collections.abc import Sequence

from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.commands import common
from mlm.data import tokenizer, tokenizer_checks
from mlm.data.manifest import holds_foreign_shards
from mlm.engine.engine import Engine
from mlm.errors import InputError
from mlm.paths import children, is_begun, replacing
from mlm.text import say
from mlm.workdir import Workdir, work_folder

RECIPE = "recipe.json"  # in the tokenizer's folder, written last: the settings that made it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    common.add_engine_flags(parser, "What reads the corpus; by default, the cores of this machine.")


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides)
    with common.locked(workdir), common.open_engine(args, config, workdir) as engine:
        make_tokenizer(config, workdir, engine)


def make_tokenizer(config: ConfigDict, workdir: Workdir, engine: Engine | None = None) -> None:
    """Makes the workdir's tokenizer, unless it exists; only one that is copied needs no engine."""
    from mlm.data import corpus, sample, train_tokenizer

    path = config.tokenizer.path
    branch = config.train.branch_from
    if branch and not path:
        path = f"{branch.rpartition('@')[0]}/tokenizer"
    if config.data.mixture and not path:
        if workdir.tokenizer_folder is None:
            raise InputError(
                "config.data.mixture: its shards have a tokenizer already; set tokenizer.path to it."
            )
        return
    settings = config.tokenizer
    recipe = json.dumps({"path": path})
    if not path:
        recipe = json.dumps({"corpus": config.corpus.to_dict(), "tokenizer": settings.to_dict()})
    if children(workdir.tokenizer) and not is_begun(workdir.tokenizer, last=RECIPE):
        saved = logs.read_object(workdir.tokenizer / RECIPE)
        if saved != json.loads(recipe):
            changed = "config.tokenizer.path"
            if "corpus" in saved and not path:
                changed = configs.changed_keys(saved, json.loads(recipe))
            raise InputError(
                f"{workdir.tokenizer}: was made with another {changed}; restore it, or use another --workdir."
            )
        return
    if not path and config.shards.dir and holds_foreign_shards(config.shards.dir):
        raise InputError(
            f"{config.shards.dir}: its shards were made with another tokenizer; set tokenizer.path to it."
        )
    begin = time.monotonic()
    with replacing(workdir.tokenizer, last=RECIPE) as new:
        if path:
            tokenizer.load(path).save_pretrained(str(new))
        else:
            documents = corpus.Corpus.from_config(config.corpus)
            kept = work_folder(workdir.shards_of(config)) / "texts"
            texts = sample.draw(
                documents, megabytes=settings.sample_megabytes, engine=engine, texts=str(kept)
            )
            train_tokenizer.train(
                texts,
                kind=settings.kind,
                vocab_size=settings.vocab_size,
                lowercase=settings.lowercase,
                length=config.model.positions,
                folder=str(new),
            )
        (new / RECIPE).write_text(recipe)
    say(f"tokenizer: {workdir.tokenizer}, {time.monotonic() - begin:.1f} s")
    if not path:
        warn_of_unknown_tokens(texts, workdir)
    elif unused := tokenizer_checks.unused_ids(tokenizer.load_fast(str(workdir.tokenizer))):
        say(
            f"tokenizer: {path}: {len(unused):,} of its ids, such as {min(unused)}, have no entry; the model has a row "
            "for each, which no mask draws"
        )


def warn_of_unknown_tokens(texts: Sequence[str], workdir: Workdir) -> None:
    """Says how much of a sample of the corpus is unknown tokens, if it is much, or is left out, if anything is."""
    folder = str(workdir.tokenizer)
    fast = tokenizer.load_for_corpus(folder)
    unk_id = tokenizer.manifest_fields(folder)["special_ids"].get("unk")
    share = tokenizer_checks.unknown_share(fast, texts, unk_id)
    if share > tokenizer_checks.UNKNOWN:
        what = f"{share:.0%} of the tokens are unknown in a sample of the corpus"
        say(f"tokenizer: warning: {what}; {tokenizer_checks.UNKNOWN_FIX}")
    if (share := tokenizer_checks.left_out_share(fast, texts)) > 0:
        say(
            f"tokenizer: warning: {100 * share:.2g}% of the bytes of a sample of the corpus are left out, as it has no "
            "entries for them; train it with initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()"
        )
