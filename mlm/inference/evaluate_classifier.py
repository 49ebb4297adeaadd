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
from mlm.inference import results
from mlm.inference.forward import put_on_devices
from mlm.model import classifier
from mlm.paths import make_folder, write_text
from mlm.pretrained import load, locate
from mlm.tasks import classification
from mlm.tasks.scores import confusion
from mlm.training import sharding
from mlm.workdir import Workdir


def run(
    config: ConfigDict, workdir: Workdir, *, model: str, split: str, as_json: bool = False
) -> dict[str, Any]:
    """Scores `model`, or the workdir's best checkpoint if that is ""; process 0 prints the scores."""
    settings = config.classify
    known = [name for name in data.SPLITS if settings[name]]
    if split not in known:
        raise InputError(
            f"--split={split}: config.classify only names rows for {', '.join(known) or 'no split'}."
        )
    loaded = load.load(model or workdir, head=load.CLASSIFIER)
    names = classifier.class_names(loaded.config)
    if (kind := classifier.kind(loaded.config)) != settings.kind:
        raise InputError(
            f"config.classify.kind = {settings.kind}: {loaded.source} predicts {kind}; set it to that."
        )
    if (length := settings.length) > loaded.longest_row:
        longest = f"{loaded.source} reads {loaded.longest_row} tokens"
        raise InputError(f"config.classify.length = {length}: {longest}; lower it.")
    columns = data.Columns(settings.text, settings.label, kind)
    tables, _ = data.read_tables({split: settings[split]}, columns, names=names)
    examples = data.tokenize(tables, names, tokenizer_folder=loaded.tokenizer, length=length)
    scores = score(config, workdir, examples, loaded, split)
    shown = [f"{loaded.source} on {split}", results.score_table({"": scores})]
    results.publish({"split": split, "model": loaded.source, **scores}, shown, as_json=as_json)
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

    The splits in `predict` are scored, too, and their predictions written to predictions/SPLIT.tsv.
    """
    mesh, padded = put_on_devices(config, model)
    module = classification.make_module(config, padded.config, examples, mesh)
    shardings = sharding.shardings_of(padded.params)
    eval_step = classification.make_eval_step(module, mesh, shardings, longest=examples.length)
    scores = {}
    predictions = {}
    for name in dict.fromkeys([split, *predict]):
        scores[name], predictions[name] = classification.evaluate(
            config, examples, mesh, eval_step, padded.params, name
        )
    # the report shows the best checkpoint
    names_step = locate.split_step(model.source)[1] is not None
    if model.tokenizer == str(workdir.tokenizer) and not names_step and cluster.is_primary():
        old = logs.read_object(workdir.classification)
        sets = old.get("sets", {}) if old.get("step") == model.step else {}
        sets |= {name: scores[name] for name in scores if name != split}
        content = {"split": split, "step": model.step, "scores": scores[split], "sets": sets}
        if examples.labels:
            labels_N = examples.splits[split].labels_N
            predicted_N = predictions[split]
            # not words that were cut off, or have no label
            read_N = (predicted_N >= 0) & (labels_N >= 0)
            counts = confusion(labels_N[read_N], predicted_N[read_N], len(examples.labels))
            content |= {"labels": examples.labels, "confusion": counts.tolist()}
        for name in predict:
            make_folder(workdir.predictions)
            write_text(
                workdir.predictions / f"{name}.tsv",
                _prediction_rows(examples, name, predictions[name]),
            )
        results.keep(workdir.classification, lambda: json.dumps(logs.finite(content)))
    return scores[split]


def _prediction_rows(examples: data.Examples, split: str, predicted_N: np.ndarray) -> str:
    """Returns TSV: index of the row, the word if of words, prediction ("O": cut off), label ("": unknown)."""
    words = examples.splits[split].words
    labels_N = examples.splits[split].labels_N
    columns = (
        {"index": words.row_W, "word": words.texts} if words else {"index": range(len(predicted_N))}
    )
    if examples.labels:
        names = dict(enumerate(examples.labels))
        columns["prediction"] = [names.get(index, "O") for index in predicted_N.tolist()]
        columns["label"] = [names.get(index, "") for index in labels_N.tolist()]
    else:
        # of numpy: with as many digits as the float32 needs
        columns["prediction"] = map(str, predicted_N)
        columns["label"] = ["" if math.isnan(value) else str(value) for value in labels_N]
    out = io.StringIO()
    rows = [columns, *zip(*columns.values(), strict=True)]
    csv.writer(out, delimiter="\t", lineterminator="\n").writerows(rows)
    return out.getvalue()
