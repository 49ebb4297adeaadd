"""Scores of a classifier on labelled texts."""

from __future__ import annotations

import json
from typing import Any

from ml_collections import ConfigDict

from mlm import cluster
from mlm.data import examples as data
from mlm.errors import InputError
from mlm.model import classifier
from mlm.paths import write_text
from mlm.pretrained import load
from mlm.tasks import class_scores, classification
from mlm.training import sharding
from mlm.workdir import Workdir


def run(config: ConfigDict, workdir: Workdir, *, model: str, split: str) -> dict[str, Any]:
    """Scores `model`, or the workdir's best checkpoint if that is ""; process 0 prints the scores as a line of JSON."""
    own = config.classify
    known = [name for name in data.SPLITS if own[name]]
    if split not in known:
        raise InputError(f"--split={split}: config.classify only names rows for {', '.join(known)}.")
    loaded = load.load(model or workdir, head=load.CLASSIFIER)
    names = classifier.class_names(loaded.config)
    if bool(names) != (own.kind == "classes"):
        raise InputError(
            f"{loaded.source}: predicts {'classes' if names else 'a number'}; set config.classify.kind to match."
        )
    tables, _ = data.read_tables({split: own[split]}, text=own.text, label=own.label, kind=own.kind, names=names)
    sizes = {"length": own.length, "multiple": own.multiple}
    examples = data.tokenize(tables, names, tokenizer_folder=loaded.tokenizer, **sizes)
    scores = score(config, workdir, examples, loaded, split)
    if cluster.is_primary():
        print(json.dumps({"split": split, "model": loaded.source, **scores}))
    return scores


def score(
    config: ConfigDict, workdir: Workdir, examples: data.Examples, model: load.Pretrained, split: str
) -> dict[str, Any]:
    """Returns the scores of a model on a split; writes those of the workdir's own model to classification.json."""
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    padded = model.padded(config.model.vocab_multiple)
    shardings = sharding.tree_shardings(padded.params, mesh, padded.params)
    params = sharding.put_tree(padded.params, shardings)
    network = classification.make_network(config, padded.config, examples, mesh)
    eval_step = classification.make_eval_step(network, mesh, shardings)
    scores, predicted_N = classification.evaluate(config, examples, mesh, eval_step, params, split)
    if model.tokenizer == str(workdir.tokenizer) and cluster.is_primary():
        content = {"split": split, "step": model.step, "scores": scores}
        if examples.labels:
            table = class_scores.confusion(examples.splits[split].labels_N, predicted_N, len(examples.labels))
            content |= {"labels": examples.labels, "confusion": table.tolist()}
        write_text(workdir.classification, json.dumps(content) + "\n")
    return scores
