"""`classify`: fine-tune for classes, numbers or labels of words, in the loop that pretrains."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlm import cluster, entry, logs
from mlm import config as configs
from mlm.commands import common
from mlm.commands.export import write_export
from mlm.commands.tokenizer import make_tokenizer
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files
from mlm.text import number, say
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mlm.data.examples import Examples
    from mlm.model.module import Params
    from mlm.pretrained.load import Pretrained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    common.add_step_flag(parser, "train.init_from")
    common.add_host_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides, task=configs.CLASSIFICATION)
    from mlm.cluster import distributed
    from mlm.inference import evaluate_classifier
    from mlm.report import report
    from mlm.tasks import classification

    with common.locked(workdir):
        examples = _open_examples(config, workdir)
        fingerprints = examples.fingerprint(*examples.splits), examples.tokenizer_fingerprint
        distributed.initialize(config, workdir, *fingerprints, saves=True)
        config, body, load_params = _find_model(config, workdir, examples)
        task = classification.Classification(config, examples, body, load_params)
        common.train_and_push(config, workdir, task, args.entry)
        best = write_export(workdir, args)
        split = "test" if config.classify.test else "validation"
        predict = ("validation", *dict(config.classify.predict))
        scores = evaluate_classifier.score(config, workdir, examples, best, split, predict)
        if cluster.is_primary():
            report.write(workdir)
            _summarize(workdir, best, scores)
        cluster.barrier("finished")


def _open_examples(config: ConfigDict, workdir: Workdir) -> Examples:
    """Reads and checks the rows, copies the tokenizer into the workdir, and tokenizes; also the rows to predict."""
    from mlm.data import examples as data

    settings = config.classify
    for key in ("train", "validation"):
        if not settings[key]:
            raise InputError(
                f"config.classify.{key}: say where the rows are, such as csv:{key}.csv."
            )
    sources = {split: settings[split] for split in data.SPLITS if settings[split]}
    columns = data.Columns(settings.text, settings.label, settings.kind)
    tables, names = data.read_tables(sources, columns)
    others, _ = data.read_tables(dict(settings.predict), columns, names=names, require_labels=False)
    if not checkpoint_files.complete_steps(workdir.checkpoints):
        if config.tokenizer.path:
            if cluster.is_primary():
                make_tokenizer(config, workdir)
            cluster.barrier("tokenizer")
        elif workdir.tokenizer_folder is None:
            raise InputError(
                f"config.tokenizer.path: name a tokenizer; train.init_from = {config.train.init_from!r} has none."
            )
    return data.tokenize(
        tables | others, names, tokenizer_folder=str(workdir.tokenizer), length=settings.length
    )


def _find_model(
    config: ConfigDict, workdir: Workdir, examples: Examples
) -> tuple[ConfigDict, PretrainedConfig, Callable[[], Params] | None]:
    """Returns the config with its metric, transformers' config of the model's body, and what loads its parameters."""
    from mlm.model import classifier, families
    from mlm.pretrained import load

    init_from = config.train.init_from
    source = functools.cache(lambda: load.load(init_from, head=None, flag=load.INIT_FROM).padded())
    steps = checkpoint_files.complete_steps(workdir.checkpoints)
    if steps:
        dataset = checkpoint_files.read_meta(workdir.checkpoints, steps[-1])["dataset"]
        if "labels" not in dataset:
            raise InputError(
                f"{workdir.checkpoints}: holds a masked language model; classify in another --workdir."
            )
        body = load.config_of(dataset["model"])
    elif init_from:
        body = source().config
        if changed := entry.changes(source().meta.get("class", {}), {}):
            say(f"{load.INIT_FROM}{init_from}: only its parameters are taken ({changed[0]})")
    else:
        special_ids = tokenizer.manifest_fields(str(workdir.tokenizer))["special_ids"]
        body = families.find(config.model.family).make_config(
            config.model, examples.vocab_size, special_ids
        )
    if not steps and body.model_type == "bert":
        classifier.set_pairs(body, tokenizer.load(str(workdir.tokenizer)))
    families.set_dropout(body, config.model)
    body.initializer_range = config.model.init_stddev
    if examples.labels and not config.classify.metric:
        spans = config.classify.kind == "tokens" and any(
            name[1:2] == "-" for name in examples.labels
        )
        metric = {"classify.metric": ("f1" if spans else "accuracy",)}
        config = configs.replace(config, metric, task=configs.CLASSIFICATION)
    return config, body, (lambda: source().encoder) if init_from else None


def _summarize(workdir: Workdir, best: Pretrained, scores: dict[str, Any]) -> None:
    """Prints the scores of the best checkpoint, and the paths."""
    content = logs.read_object(workdir.classification)
    print(
        f"\nbest checkpoint, after {best.step:,} steps, on the {scores['rows']:,} {content['split']} rows"
    )
    for name, set_scores in {"": scores, **content["sets"]}.items():
        shown = [
            f"{key} {number(set_scores[key], spec)}"
            for key, (_, spec) in logs.SCORES.items()
            if key in set_scores and key != "rows"
        ]
        print(f"  {f'{name}: ' if name else ''}{', '.join(shown) or 'no labels'}")
    print(f"\nreport  {workdir.report}\nexport  {workdir.export}")
