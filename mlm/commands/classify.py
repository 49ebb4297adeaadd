"""The command `classify`: fine-tune for text classification or regression, in the loop that pretrains."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict
from transformers import RobertaConfig

from mlm import config as configs
from mlm.cluster import distributed, watch
from mlm.commands import stages
from mlm.data import examples as data
from mlm.data import tokenizer
from mlm.data.examples import SPLITS, Examples
from mlm.data.hosts import Hosts
from mlm.errors import InputError
from mlm.export import export_classifier
from mlm.model import classifier, roberta
from mlm.model.roberta import Params
from mlm.paths import write_text
from mlm.pretrained import checkpoint_files, load, locate, warm_start
from mlm.pretrained.load import Pretrained
from mlm.report import confusion, report
from mlm.tasks import class_scores, classification
from mlm.text import printable
from mlm.training import loop, sharding
from mlm.workdir import Workdir

CONFUSED = 5  # pairs shown at the end of a run


def open_data(config: ConfigDict, workdir: Workdir, hosts: Hosts) -> Examples:
    """Reads and checks the rows, brings the tokenizer into the workdir, and tokenizes.

    Raises:
      InputError: a row that can't be right, no source, or no tokenizer.
    """
    own = config.classify
    for key in ("train", "validation"):
        if not own[key]:
            raise InputError(f"config.classify.{key}: say where the rows are, such as csv:{key}.csv.")
    sources = {split: own[split] for split in SPLITS if own[split]}
    tables, names = data.read_tables(sources, text=own.text, label=own.label, kind=own.kind)
    if not checkpoint_files.complete_steps(workdir.checkpoints):
        path = config.tokenizer.path
        start = config.train.init_from
        if start:
            path = f"{start}/tokenizer" if locate.is_workdir(start) else start
        if path:
            stages.make_tokenizer(configs.changed(config, [f"tokenizer.path={path}"]), workdir, hosts)
        elif not (workdir.tokenizer / "tokenizer.json").is_file():
            raise InputError("config.train.init_from is empty: then set config.tokenizer.path, for its tokenizer.")
    folder = str(workdir.tokenizer)
    return data.tokenize(tables, names, tokenizer_folder=folder, length=own.length, multiple=own.multiple)


def run(config: ConfigDict, workdir: Workdir, examples: Examples) -> None:
    """Trains from wherever the workdir's checkpoints are, and finishes: scores, report, export of the best checkpoint.

    Raises:
      StopError: as `loop.run_task`.
    """
    if jax.config.jax_compilation_cache_dir is None:  # JAX_COMPILATION_CACHE_DIR goes before
        jax.config.update("jax_compilation_cache_dir", str(workdir.root / "xla_cache"))
    config, body, start = _model(config, workdir, examples)
    task = classification.build_task(config, examples, body, start)
    if distributed.is_first():
        _describe(config, examples, body)
    loop.run_task(config, workdir, task)
    best = export(workdir, torch_python="")
    scores = score(config, workdir, examples, best, "test" if "test" in examples.splits else "validation")
    if distributed.is_first():
        report.write(workdir)
        _summarize(workdir, best, scores)
    watch.current.wait_for_all("finished")


def _model(
    config: ConfigDict, workdir: Workdir, examples: Examples
) -> tuple[ConfigDict, RobertaConfig, Callable[[], Params] | None]:
    """Returns (the config with the sizes of the model, the config of its body, what gives the body's parameters).

    A run that goes on has the model that it began with, another the one that it starts from, or that of the config.
    """
    if config.model.init != "stock":
        raise InputError(f"config.model.init = {config.model.init}: is for pretraining; classify starts from stock.")
    init_from, multiple = config.train.init_from, config.model.vocab_multiple
    source = functools.cache(lambda: load.load(init_from, head=None, flag=load.INIT_FROM).padded(multiple))
    begun = checkpoint_files.complete_steps(workdir.checkpoints)
    if begun:
        facts = checkpoint_files.read_meta(workdir.checkpoints, begun[-1])["facts"]
        if "labels" not in facts:
            raise InputError(f"{workdir.checkpoints}: is of a masked language model; classify in another --workdir.")
        body = RobertaConfig.from_dict(facts["model"])
    elif init_from:
        body = source().config
    else:
        sizes = config.model.to_dict()
        for key in ("init", "dtype", "attention", "remat", "remat_feed_forward"):
            del sizes[key]
        special_ids, _ = tokenizer.special_ids(str(workdir.tokenizer))
        body = roberta.make_config(vocab_size=examples.vocab_size, special_ids=special_ids, **sizes)
    body.hidden_dropout_prob = config.model.hidden_dropout
    body.attention_probs_dropout_prob = config.model.attention_dropout
    body.initializer_range = config.model.init_stddev
    body.classifier_dropout = None  # as in the layers
    positions = body.max_position_embeddings - body.pad_token_id - 1
    sizes = {key: getattr(body, name) for key, name in warm_start.SAME.items()} | {"model.positions": positions}
    sizes["shards.length"] = min(config.shards.length, positions)  # nothing here reads it
    start = (lambda: source().body) if init_from else None
    return configs.changed(config, [f"{key}={value}" for key, value in sizes.items()]), body, start


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


def score(config: ConfigDict, workdir: Workdir, examples: Examples, found: Pretrained, split: str) -> dict[str, Any]:
    """Returns the scores of a model on a split; writes down those of the workdir's own, with the confusion table."""
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    model = found.padded(config.model.vocab_multiple)
    shardings = sharding.tree_shardings(model.params, mesh, model.params)
    params = sharding.put_tree(model.params, shardings)
    network = classification.make_network(config, model.config, examples, mesh)
    eval_step = classification.make_eval_step(network, mesh, shardings)
    scores, predicted_N = classification.evaluate(config, examples, mesh, eval_step, params, split)
    if found.tokenizer == str(workdir.tokenizer) and distributed.is_first():
        content = {"split": split, "step": found.step, "scores": scores}
        if examples.labels:
            table = class_scores.confusion(examples.splits[split].labels_N, predicted_N, len(examples.labels))
            content |= {"labels": examples.labels, "confusion": table.tolist()}
        write_text(workdir.root / confusion.FILE, json.dumps(content) + "\n")
    return scores


def evaluate(config: ConfigDict, workdir: Workdir, *, model: str, split: str) -> dict[str, Any]:
    """Scores a classifier and returns the scores; the first process prints them as a line of JSON.

    Args:
      config: says where the rows are, and how many are scored at a time.
      workdir: of the run.
      model: a workdir, a folder or a name on the hub; "" for the workdir's best checkpoint.
      split: train, validation or test.

    Raises:
      InputError: no such split, or rows that the model can't read.
    """
    own = config.classify
    if split not in SPLITS or not own[split]:
        raise InputError(f"--split={split}: config.classify has rows of {', '.join(s for s in SPLITS if own[s])}.")
    found = load.load(model, head=load.CLASSIFIER, workdir=workdir)
    names = classifier.class_names(found.config)
    if bool(names) != (own.kind == "classes"):
        raise InputError(f"{found.source}: {'has classes' if names else 'predicts a number'}; set classify.kind so.")
    tables, _ = data.read_tables({split: own[split]}, text=own.text, label=own.label, kind=own.kind, names=names)
    sizes = {"length": own.length, "multiple": own.multiple}
    examples = data.tokenize(tables, names, tokenizer_folder=found.tokenizer, **sizes)
    scores = score(config, workdir, examples, found, split)
    if distributed.is_first():
        print(json.dumps({"split": split, "model": found.source, **scores}))
    return scores


def export(workdir: Workdir, *, torch_python: str) -> Pretrained:
    """Writes the best checkpoint as a transformers folder; returns its model.

    Every process reads the checkpoint, the first one writes, and the others wait for what comes of it.
    """
    found = load.from_workdir(workdir, head=load.CLASSIFIER)
    if distributed.is_first():
        export_classifier.export(found, workdir, name=workdir.root.name, torch_python=torch_python)
    watch.current.wait_for_all("exported")
    return found


def _summarize(workdir: Workdir, best: Pretrained, scores: dict[str, Any]) -> None:
    """Prints the scores of the best checkpoint, what it confuses most often, and the paths."""
    content = confusion.read(workdir)
    print(f"\nbest checkpoint, after {best.step:,} updates, on the {scores['rows']:,} {content['split']} rows")
    shown = {"loss": ".4f", "accuracy": ".2%", "f1": ".2%", "mse": ".4f", "pearson": ".4f", "spearman": ".4f"}
    print("  " + ", ".join(f"{name} {scores[name]:{spec}}" for name, spec in shown.items() if name in scores))
    for true, other, count, rows in confusion.pairs(content, CONFUSED):
        print(printable(f"  {count} of {rows} {true} taken for {other}"))
    print(f"\nreport  {workdir.report}\nexport  {workdir.export}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
