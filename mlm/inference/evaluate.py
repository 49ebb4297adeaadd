"""Scores of a masked language model on a split: of a checkpoint, an export or any folder of a family."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.data import mixture, tokenizer
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.entry import MLM, Entry, changes_evaluation
from mlm.errors import InputError
from mlm.inference import dtypes, pseudo_perplexity, results
from mlm.inference.forward import put_on_devices
from mlm.model.attention import make_attention
from mlm.model.masking import make_eval_masking, make_masking
from mlm.model.module import Compute, Model
from mlm.model.token_masking import TokenMasking
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.tasks import pretraining
from mlm.tasks.changed_model import with_class
from mlm.text import table
from mlm.training import evaluation
from mlm.training.breakdown import TABLES
from mlm.workdir import Workdir


class Extras(NamedTuple):
    """What to score besides a split under the run's own masks."""

    masks: Sequence[str] = ()  # other kinds of masking
    pseudo: int = 0  # rows to compute the pseudo-perplexity of
    # by position and copy distance, in octaves; within a document if those are isolated
    breakdown: bool = False
    dtypes: bool = False  # float32 and bfloat16, see `dtypes.compare`
    draws: int = 1  # of the masks; the loss is their mean


NO_EXTRAS = Extras()


def run(
    config: ConfigDict,
    workdir: Workdir,
    manifest: Manifest,
    *,
    model: str,
    split: str,
    extras: Extras = NO_EXTRAS,
    entry: Entry = MLM,
    as_json: bool = False,
) -> dict[str, Any]:
    """Scores a model; process 0 prints the scores and adds them to evaluation.json beside the model.

    Args:
      split: of the shards, or the name of a validation set (see `mixture.join`).
      model: as for `load.load`; "" for the workdir's newest checkpoint.
    """
    shards, part = _find_split(manifest, split)
    _check_extras(shards, extras)
    loaded = load.load(model or workdir, head=load.LM_HEAD)
    loaded = with_class(loaded, entry, command="evaluate", stock_network=False)
    _check_fit(loaded, workdir, manifest)
    mesh, padded, shardings, params = put_on_devices(config, loaded)
    module, task = make_module(config, padded, entry, manifest, workdir, mesh)
    weights = f"{results.weights_name(loaded)}, data {shards.fingerprint_of(part)[:12]}"
    scores = {}
    entries = {}
    for kind in dict.fromkeys([config.masking.kind, *extras.masks]):
        eval_step = evaluation.make_eval_step(
            module,
            _eval_masking(configs.replace(config, {"masking.kind": kind}), task, workdir, manifest),
            evaluation.MASK_SEED,
            mesh,
            shardings,
            metrics=task and task.metrics,
            with_breakdown=extras.breakdown,
        )
        scores[kind] = pretraining.score_split(
            config, shards, mesh, eval_step, params, part, draws=extras.draws
        )
        tables = {key: value for key, value in scores[kind].items() if isinstance(value, dict)}
        name = f"{_masks_name(config, kind, extras.draws)}, {weights}"
        entries[f"{split}, {name}"] = {
            key: value for key, value in scores[kind].items() if key not in tables
        }
        if tables:
            entries[f"{split}, by position and copy distance, {name}"] = tables
    result = {"split": split, "model": loaded.source, **scores[config.masking.kind]}
    if len(scores) > 1:
        result["masks"] = scores
    if extras.pseudo:
        values = pseudo_perplexity.score_split(
            config, shards, params, split=part, count=extras.pseudo, module=module, mesh=mesh
        )
        entries[f"{split}, pseudo-perplexity of {values['pseudo_rows']} rows, {weights}"] = values
        result |= values
    if extras.dtypes:
        by_dtype = [configs.replace(config, {"model.dtype": dtype}) for dtype in dtypes.DTYPES]
        modules = [make_module(c, padded, entry, manifest, workdir, mesh)[0] for c in by_dtype]
        masking = _eval_masking(config, task, workdir, manifest)
        result["dtypes"] = dtypes.compare(
            config, shards, params, modules, masking, split=part, mesh=mesh
        )
    made_by = {"model": loaded.source} | ({"class": entry.identity} if entry.identity else {})
    results.publish(result, summary(result), as_json=as_json)
    results.add_results(model, workdir, {key: made_by | values for key, values in entries.items()})
    return result


def _eval_masking(
    config: ConfigDict, task: pretraining.Pretraining | None, workdir: Workdir, manifest: Manifest
) -> TokenMasking:
    """Returns the masking of a config; that of a class of one's own has the masks of its own config."""
    if task and config.masking.kind == task.config.masking.kind:
        return task.eval_masking
    starts_V = pretraining.word_starts(config, workdir)
    masking = make_masking(config.masking, DatasetInfo.from_manifest(manifest), starts_V)
    return make_eval_masking(masking, config.evaluate.count)


def _check_extras(shards: Manifest, extras: Extras) -> None:
    if extras.pseudo < 0:
        raise InputError(f"--pseudo={extras.pseudo}: must be a number of rows, from 0 up.")
    flags = {
        f"--pseudo={extras.pseudo}": extras.pseudo,
        "--breakdown": extras.breakdown,
        "--dtypes": extras.dtypes,
    }
    for flag, is_set in flags.items():
        if is_set and len(mixture.parts(shards)) > 1:
            raise InputError(
                f"{flag}: takes rows of one set; name it by --split, as one of evaluate.sets."
            )


def _find_split(manifest: Manifest, name: str) -> tuple[Manifest, str]:
    """Returns the shards that --split names, a split or a validation set, and their split."""
    sets = manifest.sets
    shards, split = (
        (sets[name], "validation")
        if name in sets and name not in manifest.splits
        else (manifest, name)
    )
    if split not in shards.splits or shards.splits[split].records == 0:
        without = [
            part.manifest.folder
            for part in mixture.parts(shards)
            if name not in part.manifest.splits
        ]
        known = [name for name, counts in shards.splits.items() if counts.records]
        raise InputError(
            f"--split={name}: the shards in {', '.join(without or [shards.folder])} hold no records of that split; "
            f"name one of {', '.join([*known, *sets])}."
        )
    return shards, split


def make_module(
    config: ConfigDict,
    model: load.Pretrained,
    entry: Entry,
    manifest: Manifest,
    workdir: Workdir,
    mesh: Mesh,
) -> tuple[Model, pretraining.Pretraining | None]:
    """Returns a model's module, with a kernel that this machine has or the class's own, and the task of that class."""
    info = DatasetInfo.from_manifest(manifest)
    dtype = config.model.dtype
    compute = Compute(cls_id=pretraining.document_start(config, info))
    module = model.module.clone(dtype=dtype, compute=compute)
    task = None  # of the model's run, whatever the config's
    if entry.pretraining:
        starts_V = pretraining.word_starts(config, workdir)
        task = entry.pretraining(
            config, info, mesh=mesh, word_starts_V=starts_V, workdir=workdir, manifest=manifest
        )
    if changes_evaluation(entry.record):
        keys = configs.flatten(model.run_config or config)
        attending = copy.copy(task)
        attending.config = configs.replace(
            config, {key: keys[key] for key in filter(configs.is_mine, keys)}
        )
        attend = attending.make_attention(module)
    else:
        # another machine may lack the run's kernel
        choice = "xla" if config.model.attention == "xla" else "auto"
        attend = make_attention(
            choice,
            model.config,
            lengths=[manifest.length],  # all sets have it
            windows=set(module.windows()),
            mesh=mesh,
            dtype=dtype,
            padding="any" if task else info.padding,  # the class's masks may take tokens out
        )
    return module.clone(compute=dataclasses.replace(compute, attend=attend)), task


def summary(result: dict[str, Any]) -> list[Any]:
    """Returns the scores as lines and tables for `show`."""
    lines = [f"{result['model']} on {result['split']}"]
    tables = []
    for kind, scores_by_key in result.get("masks", {"": result}).items():
        for name, scores in logs.by_set(scores_by_key).items():
            title = "".join(f"{part}: " for part in (kind and f"{kind} masks", name) if part)
            shown = [
                f"perplexity {scores['perplexity']:,.2f}",
                f"accuracy {scores['accuracy']:.2%}",
            ]
            if "bits_per_byte" in scores:
                shown.append(f"{scores['bits_per_byte']:.4f} bits per byte")
            lines.append(
                f"  {title}loss {scores['loss']:.4f} nats{logs.errors(scores)}, "
                f"{', '.join(shown + logs.show_own_metrics(scores))}, on {scores['predictions']:,} masked tokens"
            )
            if remark := results.remark_on_few(scores):
                lines.append(f"  {title}{remark}")
            tables += [
                _table(title + head, scores[key]) for key, head in TABLES.items() if key in scores
            ]
    if "pseudo_loss" in result:
        lines.append(
            f"  pseudo-perplexity {result['pseudo_perplexity']:,.2f} ({result['pseudo_loss']:.4f} nats, accuracy "
            f"{result['pseudo_accuracy']:.2%}): {result['pseudo_tokens']:,} tokens of {result['pseudo_rows']:,} rows, "
            "each masked alone"
        )
    if "dtypes" in result:
        lines.append(f"  {dtypes.summary(result['dtypes'])}")
    return lines + tables


def _table(head: str, scores: dict[str, dict[str, float]]) -> Any:
    formats = {"predictions": ",", "loss": ".4f", "perplexity": ",.2f", "accuracy": ".2%"}
    rows = [
        (name, *(format(bin_scores[key], formats[key]) for key in formats))
        for name, bin_scores in scores.items()
    ]
    return table(head, ">masked tokens", ">loss", ">perplexity", ">accuracy", rows=rows, indent=2)


def _check_fit(loaded: load.Pretrained, workdir: Workdir, manifest: Manifest) -> None:
    size = loaded.config.vocab_size
    longest = loaded.longest_row
    folders = (UPath(loaded.tokenizer), workdir.tokenizer)
    vocabularies = [
        tokenizer.load_fast(str(f)).get_vocab() for f in folders if (f / "tokenizer.json").is_file()
    ]
    shards = f"the shards in {manifest.folder}"
    if size != manifest.vocab_size:
        fault = f"its vocabulary has {size} entries, that of {shards} has {manifest.vocab_size}"
    elif any(vocabulary != vocabularies[0] for vocabulary in vocabularies):
        fault = f"its tokenizer gives other ids than {workdir.tokenizer}, the tokenizer of {shards}"
    elif longest < manifest.length:
        fault = f"reads at most {longest} tokens, the rows of {shards} have {manifest.length}"
    else:
        return
    raise InputError(
        f"{loaded.source}: {fault}; score it on shards of its own tokenizer and length."
    )


def _masks_name(config: ConfigDict, kind: str, draws: int) -> str:
    masking = config.masking
    name = f"{kind} masks {masking.rate:g} {masking.mask_share:g}"
    name += " independent" if config.evaluate.count == "independent" else ""
    return name + (f", {draws} draws" if draws > 1 else "")
