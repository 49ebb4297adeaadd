"""Scores of a classifier on labelled texts."""

from __future__ import annotations

import json
from typing import Any

from ml_collections import ConfigDict

from mlm import cluster
from mlm.data import examples as data
from mlm.data.examples import SPLITS, Examples
from mlm.errors import InputError
from mlm.model import classifier
from mlm.paths import write_text
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained
from mlm.tasks import class_scores, classification
from mlm.training import sharding
from mlm.workdir import Workdir


def run(config: ConfigDict, workdir: Workdir, *, model: str, split: str) -> dict[str, Any]:
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
    if cluster.is_primary():
        print(json.dumps({"split": split, "model": found.source, **scores}))
    return scores


def score(config: ConfigDict, workdir: Workdir, examples: Examples, found: Pretrained, split: str) -> dict[str, Any]:
    """Returns the scores of a model on a split.

    Those of the workdir's own model are written to its classification.json, with the confusion table.
    """
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    model = found.padded(config.model.vocab_multiple)
    shardings = sharding.tree_shardings(model.params, mesh, model.params)
    params = sharding.put_tree(model.params, shardings)
    network = classification.make_network(config, model.config, examples, mesh)
    eval_step = classification.make_eval_step(network, mesh, shardings)
    scores, predicted_N = classification.evaluate(config, examples, mesh, eval_step, params, split)
    if found.tokenizer == str(workdir.tokenizer) and cluster.is_primary():
        content = {"split": split, "step": found.step, "scores": scores}
        if examples.labels:
            table = class_scores.confusion(examples.splits[split].labels_N, predicted_N, len(examples.labels))
            content |= {"labels": examples.labels, "confusion": table.tolist()}
        write_text(workdir.classification, json.dumps(content) + "\n")
    return scores
