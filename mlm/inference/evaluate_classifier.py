"""Scores of a classifier: its confusion matrix and its predictions, written to the workdir."""

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm.data import examples as data
from mlm.errors import InputError
from mlm.inference.evaluate import keep, put_on_devices
from mlm.model import classifier
from mlm.paths import make_folder, write_text
from mlm.pretrained import load, locate
from mlm.tasks import classification
from mlm.tasks.scores import confusion
from mlm.workdir import Workdir


def run(config: ConfigDict, workdir: Workdir, *, model: str, split: str) -> dict[str, Any]:
    """Scores `model`, or the workdir's best checkpoint if that is ""; process 0 prints the scores as a line of JSON."""
    own = config.classify
    known = [name for name in data.SPLITS if own[name]]
    if split not in known:
        raise InputError(f"--split={split}: config.classify only names rows for {', '.join(known)}.")
    loaded = load.load(model or workdir, head=load.CLASSIFIER)
    names = classifier.class_names(loaded.config)
    if (kind := classifier.kind(loaded.config)) != own.kind:
        predicts = {"classes": "classes", "regression": "a number", "tokens": "labels of words"}[kind]
        raise InputError(f"{loaded.source}: predicts {predicts}; set config.classify.kind to match.")
    if own.length > loaded.longest_row:
        reads = f"{loaded.source} reads {loaded.longest_row} tokens"
        raise InputError(f"config.classify.length = {own.length}: {reads}; lower it.")
    tables, _ = data.read_tables({split: own[split]}, text=own.text, label=own.label, kind=own.kind, names=names)
    sizes = {"length": own.length, "multiple": own.multiple}
    examples = data.tokenize(tables, names, tokenizer_folder=loaded.tokenizer, **sizes)
    scores = score(config, workdir, examples, loaded, split)
    if cluster.is_primary():
        print(json.dumps({"split": split, "model": loaded.source, **scores}))
    return scores


def score(
    config: ConfigDict,
    workdir: Workdir,
    examples: data.Examples,
    model: load.Pretrained,
    split: str,
    predict: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the scores of a model on a split; writes those of the workdir's own model to classification.json.

    The splits of `predict` are scored, too, and their predictions written to predictions/SPLIT.tsv.
    """
    mesh, padded, shardings, params = put_on_devices(config, model)
    module = classification.make_module(config, padded.config, examples, mesh)
    eval_step = classification.make_eval_step(module, mesh, shardings, longest=examples.length)
    names = dict.fromkeys([split, *predict])
    found = {n: classification.evaluate(config, examples, mesh, eval_step, params, n) for n in names}
    named = locate.split_step(model.source)[1] is not None  # the report shows the best checkpoint
    if model.tokenizer == str(workdir.tokenizer) and not named and cluster.is_primary():
        old = logs.read_object(workdir.classification)
        sets = old.get("sets", {}) if old.get("step") == model.step else {}
        sets |= {name: scores for name, (scores, _) in found.items() if name != split}
        content = {"split": split, "step": model.step, "scores": found[split][0], "sets": sets}
        if examples.labels:
            labels_N, predicted_N = examples.splits[split].labels_N, found[split][1]
            read_N = (predicted_N >= 0) & (labels_N >= 0)  # not words that were cut off, or have no label
            table = confusion(labels_N[read_N], predicted_N[read_N], len(examples.labels))
            content |= {"labels": examples.labels, "confusion": table.tolist()}
        for name in predict:
            make_folder(workdir.predictions)
            write_text(workdir.predictions / f"{name}.tsv", _prediction_rows(examples, name, found[name][1]))
        keep(workdir.classification, lambda: json.dumps(content))
    return found[split][0]


def _prediction_rows(examples: data.Examples, split: str, predicted_N: np.ndarray) -> str:
    """Returns lines of: index of the row, the word if of words, prediction ("O": cut off), label ("": unknown)."""
    out, words, labels_N = io.StringIO(), examples.splits[split].words, examples.splits[split].labels_N
    writer = csv.writer(out, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", *["word"] * bool(words), "prediction", "label"])
    if examples.labels:
        names = dict(enumerate(examples.labels))
        columns = ([names.get(int(v), other) for v in own] for own, other in ((predicted_N, "O"), (labels_N, "")))
    else:
        labels = ("" if math.isnan(value) else f"{value:.7g}" for value in labels_N)
        columns = ([f"{value:.7g}" for value in predicted_N], labels)
    places = zip(words.row_W, words.texts, strict=True) if words else zip(range(len(predicted_N)), strict=True)
    writer.writerows((*place, *pair) for place, *pair in zip(places, *columns, strict=True))
    return out.getvalue()
