"""`classify`: fine-tune for text classification or regression, in the loop that pretrains."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm import config as configs
from mlm.commands import common
from mlm.commands.export import write_export
from mlm.commands.tokenizer import make_tokenizer
from mlm.errors import InputError
from mlm.text import printable
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from transformers import RobertaConfig

    from mlm.data.examples import Examples
    from mlm.data.hosts import Hosts
    from mlm.model.roberta import Params
    from mlm.pretrained.load import Pretrained

CONFUSED = 5  # pairs shown at the end of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser)
    common.add_host_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Trains from wherever the workdir's checkpoints are; then scores, reports and exports the best checkpoint."""
    config, workdir = common.open_run(args, overrides, task=configs.CLASSIFICATION)
    from mlm.cluster import distributed
    from mlm.data.hosts import Hosts
    from mlm.inference import evaluate_classifier
    from mlm.report import report
    from mlm.tasks import classification
    from mlm.training import loop

    with common.locked(workdir):
        examples = open_examples(config, workdir, Hosts(args.processes, args.process_id, config.shards.patience))
        distributed.initialize(config, workdir, examples.fingerprint, examples.tokenizer_fingerprint, saves=True)
        common.keep_compiled(workdir)
        config, body, start = _model(config, workdir, examples)
        task = classification.Classification(config, examples, body, start)
        if cluster.is_primary():
            _describe(config, examples, body)
        loop.run_task(config, workdir, task)
        best = write_export(workdir, torch_python="")
        split = "test" if "test" in examples.splits else "validation"
        scores = evaluate_classifier.score(config, workdir, examples, best, split)
        if cluster.is_primary():
            report.write(workdir)
            _summarize(workdir, best, scores)
        cluster.barrier("finished")


def open_examples(config: ConfigDict, workdir: Workdir, hosts: Hosts) -> Examples:
    """Reads and checks the rows, copies the tokenizer into the workdir, and tokenizes.

    Raises:
      InputError: a row that can't be right, no source, or no tokenizer.
    """
    from mlm.data import examples as data
    from mlm.pretrained import checkpoint_files, locate

    own = config.classify
    for key in ("train", "validation"):
        if not own[key]:
            raise InputError(f"config.classify.{key}: say where the rows are, such as csv:{key}.csv.")
    sources = {split: own[split] for split in data.SPLITS if own[split]}
    tables, names = data.read_tables(sources, text=own.text, label=own.label, kind=own.kind)
    if not checkpoint_files.complete_steps(workdir.checkpoints):
        path = config.tokenizer.path
        start = config.train.init_from
        if start:
            path = f"{start}/tokenizer" if locate.is_workdir(start) else start
        if path:
            config = configs.replace(config, {"tokenizer.path": path}, task=configs.CLASSIFICATION)
            make_tokenizer(config, workdir, hosts)
        elif not (workdir.tokenizer / "tokenizer.json").is_file():
            raise InputError("config.train.init_from is empty: then set config.tokenizer.path, for its tokenizer.")
    folder = str(workdir.tokenizer)
    return data.tokenize(tables, names, tokenizer_folder=folder, length=own.length, multiple=own.multiple)


def _model(
    config: ConfigDict, workdir: Workdir, examples: Examples
) -> tuple[ConfigDict, RobertaConfig, Callable[[], Params] | None]:
    """Returns (the config with the sizes of the model, the config of its body, a function that gives its parameters).

    A run that resumes has the model that it began with, another the one of train.init_from, or that of the config.
    """
    from transformers import RobertaConfig

    from mlm.data import tokenizer
    from mlm.model import roberta
    from mlm.pretrained import checkpoint_files, load, warm_start

    if config.model.init != "stock":
        raise InputError(f"config.model.init = {config.model.init}: is for pretraining; classify starts from stock.")
    init_from, multiple = config.train.init_from, config.model.vocab_multiple
    source = functools.cache(lambda: load.load(init_from, head=None, flag=load.INIT_FROM).padded(multiple))
    begun = checkpoint_files.complete_steps(workdir.checkpoints)
    if begun:
        dataset = checkpoint_files.read_meta(workdir.checkpoints, begun[-1])["dataset"]
        if "labels" not in dataset:
            raise InputError(f"{workdir.checkpoints}: is of a masked language model; classify in another --workdir.")
        body = RobertaConfig.from_dict(dataset["model"])
    elif init_from:
        body = source().config
    else:
        special_ids, _ = tokenizer.special_ids(str(workdir.tokenizer))
        body = roberta.make_config(config.model, examples.vocab_size, special_ids)
    body.hidden_dropout_prob = config.model.hidden_dropout
    body.attention_probs_dropout_prob = config.model.attention_dropout
    body.initializer_range = config.model.init_stddev
    body.classifier_dropout = None  # as in the layers
    positions = body.max_position_embeddings - body.pad_token_id - 1
    sizes = {key: getattr(body, name) for key, name in warm_start.SAME.items()} | {"model.positions": positions}
    start = (lambda: source().body) if init_from else None
    return configs.replace(config, sizes, task=configs.CLASSIFICATION), body, start


def _describe(config: ConfigDict, examples: Examples, body: RobertaConfig) -> None:
    """Says what is trained on what."""
    for split, own in examples.splits.items():
        cut = f", {own.truncated:,} of them truncated to {examples.length}" if own.truncated else ""
        lengths = f"{own.lengths.min()} to {own.lengths.max()} tokens"
        _say(f"classify: {split}: {own.source}, {len(own.labels_N):,} rows of {lengths}{cut}")
    what = f"{len(examples.labels)} classes" if examples.labels else "a number"
    lengths = " or ".join(map(str, examples.lengths()))
    _say(
        f"classify: {what}; {body.num_hidden_layers} layers of {body.hidden_size}, from "
        f"{config.train.init_from or 'random values'}; batches are padded to {lengths} tokens, each compiled once"
    )


def _summarize(workdir: Workdir, best: Pretrained, scores: dict[str, Any]) -> None:
    """Prints the scores of the best checkpoint, what it confuses most often, and the paths."""
    from mlm.report import report

    content = logs.read_object(workdir.classification)
    print(f"\nbest checkpoint, after {best.step:,} updates, on the {scores['rows']:,} {content['split']} rows")
    shown = {"loss": ".4f", "accuracy": ".2%", "f1": ".2%", "mse": ".4f", "pearson": ".4f", "spearman": ".4f"}
    print("  " + ", ".join(f"{name} {scores[name]:{spec}}" for name, spec in shown.items() if name in scores))
    for true, other, count, rows in report.confused_pairs(content, CONFUSED):
        print(printable(f"  {count} of {rows} {true} taken for {other}"))
    print(f"\nreport  {workdir.report}\nexport  {workdir.export}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
