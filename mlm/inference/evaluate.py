"""Scores of a model on a split: a checkpoint, an export or any folder of a family; a language model or a classifier."""

import csv
import functools
import hashlib
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm import config as configs
from mlm.data import examples as data
from mlm.data import mixture, tokenizer
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.entry import MLM, Entry, changes_evaluation, check_use
from mlm.errors import DamageError, InputError
from mlm.inference import dtypes, pseudo_perplexity
from mlm.model import classifier, factory
from mlm.model.attention import make_attention
from mlm.model.network import Network, Params
from mlm.paths import UPath, make_folder, os_errors, write_text
from mlm.pretrained import load, locate
from mlm.tasks import classification, pretraining
from mlm.tasks.scores import confusion
from mlm.text import show, table
from mlm.training import sharding, step
from mlm.training.breakdown import LONGEST, TABLES
from mlm.workdir import Workdir


def run(
    config: ConfigDict,
    workdir: Workdir,
    manifest: Manifest,
    *,
    model: str,
    split: str,
    masks: Sequence[str] = (),
    pseudo: int = 0,
    breakdown: bool = False,
    compare_dtypes: bool = False,
    entry: Entry = MLM,
) -> dict[str, Any]:
    """Scores a model; process 0 prints the scores as JSON and adds them to evaluation.json beside the model.

    Args:
      split: of the shards, or the name of a validation set (see `mixture.sets`).
      model: as for `load.load`; "" for the workdir's newest checkpoint.
      masks: kinds to score besides the run's own.
      pseudo: rows to compute the pseudo-perplexity of; 0 for none.
      entry: a subclass of `Pretraining` that may have an attention and masks of its own.
      breakdown: also by position and copy distance, in octaves; of copies in the same document if those are isolated.
      compare_dtypes: also float32 with bfloat16, see `dtypes.compare`.
    """
    read, part = _find_split(manifest, split)
    _check_flags(read, pseudo, breakdown, compare_dtypes)
    loaded = load.load(model or workdir, head=load.LM_HEAD)
    check_class(loaded, entry, stock_network=False)
    _check_fit(loaded, workdir, manifest)
    mesh, padded, shardings, params = put_on_devices(config, loaded)
    info = DatasetInfo.from_manifest(manifest)
    data_of_run = (manifest, workdir, mesh, read.length)
    network, task = make_network(config, padded, entry, *data_of_run)
    weights = f"{weights_name(loaded)}, data {read.fingerprint_of(part)[:12]}"
    scores, entries, masks_of = {}, {}, {}
    for kind in dict.fromkeys([config.masking.kind, *masks]):
        own = configs.replace(config, {"masking.kind": kind})
        masking = factory.make_masking(own.masking.to_dict(), info, pretraining.word_starts(own, workdir))
        masking = factory.make_eval_masking(masking, config.evaluate.count)
        if task and kind == config.masking.kind:
            masking = task.eval_masking
        masks_of[kind] = masking
        placed = (config.evaluate.seed, mesh, shardings)
        eval_step = step.make_eval_step(network, masking, *placed, with_breakdown=breakdown)
        scores[kind] = pretraining.score_split(config, read, mesh, eval_step, params, part)
        tables = {key: value for key, value in scores[kind].items() if isinstance(value, dict)}
        name = f"{_masks_name(config, kind)}, {weights}"
        entries[f"{split}, {name}"] = {key: value for key, value in scores[kind].items() if key not in tables}
        entries |= {f"{split}, by position and copy distance, {name}": tables} if tables else {}
    result = {"split": split, "model": loaded.source, **scores[config.masking.kind]}
    if len(scores) > 1:
        result["masks"] = scores
    if pseudo:
        sample = {"split": part, "count": pseudo}
        values = pseudo_perplexity.score_split(config, read, params, **sample, network=network, mesh=mesh)
        entries[f"{split}, pseudo-perplexity of {values['pseudo_rows']} rows, {weights}"] = values
        result |= values
    if compare_dtypes:
        by_dtype = [configs.replace(config, {"model.dtype": dtype}) for dtype in dtypes.DTYPES]
        networks = [make_network(each, padded, entry, *data_of_run)[0] for each in by_dtype]
        masking = masks_of[config.masking.kind]
        result["dtypes"] = dtypes.compare(config, read, params, networks, masking, split=part, mesh=mesh)
    if cluster.is_primary():
        print(json.dumps(result))
        show(*summary(result), out=sys.stderr)
        made_by = {"class": entry.identity} if entry.identity else {}
        entries = {key: {"model": loaded.source, **made_by, **values} for key, values in entries.items()}
        add_results(results_folder(model, workdir), entries)
    return result


def check_class(loaded: load.Pretrained, entry: Entry, *, stock_network: bool) -> None:
    """Raises InputError if the class of the model's run computes something else than `evaluate` would."""
    saved = loaded.meta.get("class", {})
    if not loaded.meta:  # of a folder, which transformers' own network computes
        saved, stock_network = {}, True
    remark = check_use(saved, entry.record, loaded.source, command="evaluate", stock_network=stock_network)
    if remark and cluster.is_primary():
        print(remark, file=sys.stderr, flush=True)


def _check_flags(read: Manifest, pseudo: int, breakdown: bool, compare_dtypes: bool) -> None:
    if pseudo < 0:
        raise InputError(f"--pseudo={pseudo}: must be a number of rows, from 0 up.")
    flags = {f"--pseudo={pseudo}": pseudo, "--breakdown": breakdown, "--dtypes": compare_dtypes}
    flag = next((name for name, value in flags.items() if value), "")
    if flag and len(mixture.parts(read)) > 1:
        raise InputError(f"{flag}: takes rows of one set; name it by --split, as one of evaluate.sets.")
    if breakdown and read.length > LONGEST:
        rows = f"those of {read.folder} have {read.length:,}"
        raise InputError(f"--breakdown: takes rows of at most {LONGEST:,} tokens, {rows}; leave it out.")


def _find_split(manifest: Manifest, name: str) -> tuple[Manifest, str]:
    """Returns the shards and the split of them that --split names: a split, or a validation set."""
    sets = mixture.sets(manifest)
    read, split = (sets[name], "validation") if name in sets and name not in manifest.splits else (manifest, name)
    if split not in read.splits or read.splits[split].records == 0:
        without = [part.manifest.folder for part in mixture.parts(read) if name not in part.manifest.splits]
        known = [name for name, held in read.splits.items() if held.records]
        has = f"the shards in {', '.join(without or [read.folder])} hold no records of that split"
        raise InputError(f"--split={name}: {has}; name one of {', '.join([*known, *sets])}.")
    return read, split


def run_classifier(config: ConfigDict, workdir: Workdir, *, model: str, split: str) -> dict[str, Any]:
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
    scores = score_classifier(config, workdir, examples, loaded, split)
    if cluster.is_primary():
        print(json.dumps({"split": split, "model": loaded.source, **scores}))
    return scores


def score_classifier(
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
    network = classification.make_network(config, padded.config, examples, mesh)
    eval_step = classification.make_eval_step(network, mesh, shardings, longest=examples.length)
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
        _keep(workdir.classification, lambda: json.dumps(content))
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


def put_on_devices(config: ConfigDict, model: load.Pretrained) -> tuple[Mesh, load.Pretrained, Params, Params]:
    """Returns the mesh, the model with its vocabulary padded, and its parameters' shardings and arrays there."""
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    padded = model.padded(config.model.vocab_multiple)
    shardings = sharding.tree_shardings(padded.params, mesh, padded.params)
    return mesh, padded, shardings, sharding.put_tree(padded.params, shardings)


def make_network(
    config: ConfigDict,
    model: load.Pretrained,
    entry: Entry,
    manifest: Manifest,
    workdir: Workdir,
    mesh: Mesh,
    length: int,
) -> tuple[Network, pretraining.Pretraining | None]:
    """Returns a model's network, with a kernel that this machine has or the class's own, and the task of that class."""
    info, isolated, dtype = DatasetInfo.from_manifest(manifest), config.data.isolate_documents, config.model.dtype
    network = model.family(model.config, dtype, cls_id=info.special_ids["cls"] if isolated else None)
    choice = "xla" if config.model.attention == "xla" else "auto"  # another machine may lack the run's kernel
    kernel = {"length": length, "mesh": mesh, "dtype": dtype, "isolated": isolated}
    attend, task = functools.partial(make_attention, choice, model.config, **kernel), None
    if changes_evaluation(entry.record):
        starts_V = pretraining.word_starts(config, workdir)
        task = entry.pretraining(config, info, mesh=mesh, word_starts_V=starts_V, workdir=workdir, manifest=manifest)
        attend = functools.partial(task.make_attention, model.config, length)
    return network.with_attention(lambda window: attend(window=window)), task


def summary(result: dict[str, Any]) -> list[Any]:
    """Returns the scores as lines and tables for `show`."""
    lines, tables = [f"{result['model']} on {result['split']}"], []
    for kind, both in result.get("masks", {"": result}).items():
        for name, scores in logs.by_set(both).items():
            line = f"  {kind} masks: " if kind else "  "
            line += f"{name}: " * bool(name) + f"loss {scores['loss']:.4f} nats{logs.errors(scores)}, "
            line += f"perplexity {scores['perplexity']:,.2f}, accuracy {scores['accuracy']:.2%}"
            if "bits_per_byte" in scores:
                line += f", {scores['bits_per_byte']:.4f} bits per byte"
            lines.append(f"{line}, on {scores['predictions']:,} masked tokens")
            title = f"{kind} masks: " * bool(kind) + f"{name}: " * bool(name)
            tables += [_table(title + head, scores[key]) for key, head in TABLES.items() if key in scores]
    if "pseudo_loss" in result:
        lines.append(
            f"  pseudo-perplexity {result['pseudo_perplexity']:,.2f} ({result['pseudo_loss']:.4f} nats, accuracy "
            f"{result['pseudo_accuracy']:.2%}): {result['pseudo_tokens']:,} tokens of {result['pseudo_rows']:,} rows, "
            "each masked alone"
        )
    lines += [f"  {dtypes.summary(result['dtypes'])}"] if "dtypes" in result else []
    return lines + tables


def _table(head: str, lines: dict[str, dict[str, float]]) -> Any:
    rows = [
        (name, f"{own['predictions']:,}", f"{own['loss']:.4f}", f"{own['perplexity']:,.2f}", f"{own['accuracy']:.2%}")
        for name, own in lines.items()
    ]
    return table(head, ">masked tokens", ">loss", ">perplexity", ">accuracy", rows=rows, indent=2)


def results_folder(model: str, workdir: Workdir) -> UPath:
    """Returns where the scores of `model` are kept: beside it, or in the workdir if it is a name on the Hub."""
    folder = UPath(locate.split_step(model)[0])
    return folder if model and folder.is_dir() else workdir.root


def add_results(folder: UPath, entries: dict[str, dict[str, Any]]) -> None:
    """Adds entries to the folder's evaluation.json and keeps the others; prints an error if it can't be written."""
    file = folder / logs.RESULTS
    finite = {key: logs.finite(values) for key, values in entries.items()}
    if _keep(file, lambda: json.dumps(logs.read_object(file) | finite, indent=1)):
        print(f"  written to {file}", file=sys.stderr)


def _keep(file: UPath, make: Callable[[], str]) -> bool:
    """Writes scores beside the model; prints an error if they can't be written, as in a folder of somebody else."""
    try:
        with os_errors():
            write_text(file, make() + "\n")
        return True
    except (DamageError, OSError) as error:
        reason = error if isinstance(error, DamageError) else f"{file}: {error.strerror or error}."
        print(f"evaluate: the scores were not written: {reason}", file=sys.stderr)
        return False


def _check_fit(loaded: load.Pretrained, workdir: Workdir, manifest: Manifest) -> None:
    size, longest = loaded.config.vocab_size, loaded.longest_row
    folders = (UPath(loaded.tokenizer), workdir.tokenizer)
    vocabularies = [tokenizer.load_fast(str(f)).get_vocab() for f in folders if (f / "tokenizer.json").is_file()]
    shards = f"the shards in {manifest.folder}"
    if size != manifest.vocab_size:
        fault = f"its vocabulary has {size} entries, that of {shards} has {manifest.vocab_size}"
    elif any(vocabulary != vocabularies[0] for vocabulary in vocabularies):
        fault = f"its tokenizer gives other ids than {workdir.tokenizer}, the tokenizer of {shards}"
    elif longest < manifest.length:
        fault = f"reads at most {longest} tokens, the rows of {shards} have {manifest.length}"
    else:
        return
    raise InputError(f"{loaded.source}: {fault}; score it on shards of its own tokenizer and length.")


def _masks_name(config: ConfigDict, kind: str) -> str:
    own = config.masking
    name = f"{kind} masks {own.rate:g} {own.mask_share:g}/{own.random_share:g} seed {config.evaluate.seed}"
    name += "" if kind == "token" else f" longest {own.longest}"
    name += f" p {own.span_p:g}" if kind == "span" else ""
    name += " independent" if config.evaluate.count == "independent" else ""
    return name + (f", {config.evaluate.draws} draws" if config.evaluate.draws > 1 else "")


def weights_name(model: load.Pretrained) -> str:
    """Returns what tells the weights from others of the same folder."""
    if model.step is not None:
        return f"step {model.step}"
    digest = hashlib.sha256()
    for name, value in sharding.named_leaves(model.params):
        digest.update(name.encode() + value.tobytes())
    return f"weights {digest.hexdigest()[:12]}"
