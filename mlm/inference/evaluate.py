"""Scores of a masked language model on a split: of a checkpoint, an export or any folder of a family."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.data import tokenizer
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.entry import MLM, Entry, changes_evaluation
from mlm.errors import InputError
from mlm.inference import pseudo_perplexity, results
from mlm.inference.forward import put_on_devices
from mlm.model.attention import make_attention
from mlm.model.masking import TokenMasking, make_eval_masking, make_masking
from mlm.model.module import Compute, Model
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.tasks import pretraining
from mlm.tasks.changed_model import with_class
from mlm.tasks.pretraining import Pretraining
from mlm.training import evaluation, sharding
from mlm.training.breakdown import TABLES
from mlm.workdir import Workdir

DTYPES = ("float32", "bfloat16")


def run(
    config: ConfigDict,
    workdir: Workdir,
    manifest: Manifest,
    *,
    model: str,
    split: str,
    masks: Sequence[str] = (),
    draws: int = 1,
    pseudo: int = 0,
    breakdown: bool = False,
    dtypes: bool = False,
    entry: Entry = MLM,
    as_json: bool = False,
) -> dict[str, Any]:
    """Scores a model; process 0 prints the scores and adds them to evaluation.json beside the model.

    Args:
      model: as for `load.load`; "" for the workdir's newest checkpoint.
      split: of the shards, or the name of a validation set (see `join_folders`).
      masks: kinds of masking to score besides the run's own.
      draws: of the masks; the loss is their mean.
      pseudo: rows to compute the pseudo-perplexity of.
      breakdown: also by position and copy distance, in octaves; within a document if those are
        isolated.
      dtypes: also in each of DTYPES, under the same masks.
    """
    shards, part = _find_split(manifest, split)
    _check_flags(shards, pseudo=pseudo, breakdown=breakdown)
    loaded = load.load(model or workdir, head=load.LM_HEAD)
    loaded = with_class(loaded, entry, command="evaluate", stock_network=False)
    _check_fit(loaded, workdir, manifest)
    mesh, padded = put_on_devices(config, loaded)
    own_kind = config.masking.kind

    def score(
        module: Model, task: Pretraining | None, kind: str, *, with_breakdown: bool = False
    ) -> dict[str, Any]:
        masked = configs.replace(config, {"masking.kind": kind})
        eval_step = evaluation.make_eval_step(
            module,
            _eval_masking(masked, task, workdir, manifest),
            mesh,
            sharding.shardings_of(padded.params),
            metrics=task and task.metrics,
            with_breakdown=with_breakdown,
        )
        return pretraining.score_split(
            config, shards, mesh, eval_step, padded.params, part, draws=draws
        )

    module, task = make_module(config, padded, entry, manifest, workdir, mesh)
    weights = f"{results.weights_name(loaded)}, data {shards.fingerprint_of(part)[:12]}"
    scores = {}
    entries = {}
    for kind in dict.fromkeys([own_kind, *masks]):
        of_kind = scores[kind] = score(module, task, kind, with_breakdown=breakdown)
        name = f"{_masks_name(config, kind, draws)}, {weights}"
        tables = {key: value for key, value in of_kind.items() if isinstance(value, dict)}
        numbers = {key: value for key, value in of_kind.items() if key not in tables}
        entries[f"{split}, {name}"] = numbers
        if tables:
            entries[f"{split}, by position and copy distance, {name}"] = tables
    result = {"split": split, "model": loaded.source, **scores[own_kind]}
    if len(scores) > 1:
        result["masks"] = scores
    if pseudo:
        values = pseudo_perplexity.score_split(
            module,
            padded.params,
            mesh,
            loaded,
            shards,
            split=part,
            count=pseudo,
            batch=config.evaluate.batch,
        )
        entries[f"{split}, pseudo-perplexity of {values['pseudo_rows']} rows, {weights}"] = values
        result |= values
    if dtypes:
        result["dtypes"] = {}
        for dtype in DTYPES:
            computed = configs.replace(config, {"model.dtype": dtype})
            in_dtype, task = make_module(computed, padded, entry, manifest, workdir, mesh)
            result["dtypes"][dtype] = score(in_dtype, task, own_kind)
    made_by = {"model": loaded.source} | ({"class": entry.identity} if entry.identity else {})
    results.publish(result, summary(result), as_json=as_json)
    results.add_results(model, workdir, {key: made_by | values for key, values in entries.items()})
    return result


def _eval_masking(
    config: ConfigDict, task: Pretraining | None, workdir: Workdir, manifest: Manifest
) -> TokenMasking:
    """Returns the masking of a config; that of a class of one's own has the masks of its own config."""
    if task and config.masking.kind == task.config.masking.kind:
        return task.eval_masking
    starts_V = pretraining.word_starts(config, workdir)
    masking = make_masking(config.masking, DatasetInfo.from_manifest(manifest), starts_V)
    return make_eval_masking(masking, config.evaluate.count)


def _check_flags(shards: Manifest, *, pseudo: int, breakdown: bool) -> None:
    if pseudo < 0:
        raise InputError(f"--pseudo={pseudo}: must be a number of rows, from 0 up.")
    for flag, is_set in ((f"--pseudo={pseudo}", pseudo), ("--breakdown", breakdown)):
        if is_set and len(shards.parts) > 1:
            raise InputError(
                f"{flag}: takes rows of one set; name it by --split, as one of evaluate.sets."
            )


def _find_split(manifest: Manifest, name: str) -> tuple[Manifest, str]:
    """Returns the shards that --split names, a split or a validation set, and their split."""
    sets = manifest.sets
    if name in manifest.splits or name not in sets:
        shards, split = manifest, name
    else:
        shards, split = sets[name], "validation"
    if split not in shards.splits or not shards.splits[split].records:
        folders = [part.manifest.folder for part in shards.parts]
        known = [name for name, counts in shards.splits.items() if counts.records]
        raise InputError(
            f"--split={name}: the shards in {', '.join(folders)} hold no records of that split; "
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
) -> tuple[Model, Pretraining | None]:
    """Returns a model's module, with a kernel that this machine has or the class's own, and the task of that class."""
    info = DatasetInfo.from_manifest(manifest)
    dtype = config.model.dtype
    compute = Compute(cls_id=pretraining.document_start(config, info))
    module = model.module.clone(dtype=dtype, compute=compute)
    task = None  # of the model's run, whatever the config's
    if entry.pretraining:
        task = entry.pretraining.open(config, workdir, manifest)
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
    """Returns the scores as lines and tables for `show`: a column for each kind of masks, set and dtype."""
    columns = {}
    for kind, scores_by_key in result.get("masks", {"": result}).items():
        for name, scores in logs.by_set(scores_by_key).items():
            columns[" ".join(filter(None, (kind, name)))] = scores
    columns |= result.get("dtypes", {})
    if "pseudo_loss" in result:
        keys = ("loss", "perplexity", "accuracy")
        columns["pseudo"] = {key: result[f"pseudo_{key}"] for key in keys}
        columns["pseudo"]["predictions"] = result["pseudo_tokens"]
    lines = [f"{result['model']} on {result['split']}", results.score_table(columns)]
    for title, scores in columns.items():
        if title != "pseudo" and (remark := results.remark_on_few(scores)):
            lines.append(f"  {title}: {remark}" if title else f"  {remark}")
        for key, head in TABLES.items():
            if key in scores:
                lines += [
                    f"  {title}: {head}" if title else f"  {head}",
                    results.score_table(scores[key]),
                ]
    return lines


def _check_fit(loaded: load.Pretrained, workdir: Workdir, manifest: Manifest) -> None:
    """Raises InputError unless the model reads the rows of the shards, by the same tokenizer."""
    size = loaded.config.vocab_size
    vocabularies = [
        tokenizer.load_fast(str(folder)).get_vocab()
        for folder in (UPath(loaded.tokenizer), workdir.tokenizer)
        if (folder / "tokenizer.json").is_file()
    ]
    if size != manifest.vocab_size:
        fault = f"its vocabulary has {size} entries, that of the shards {manifest.vocab_size}"
    elif any(vocabulary != vocabularies[0] for vocabulary in vocabularies):
        fault = f"its tokenizer gives other ids than {workdir.tokenizer}"
    elif loaded.longest_row < manifest.length:
        fault = f"reads at most {loaded.longest_row} tokens, the rows have {manifest.length}"
    else:
        return
    raise InputError(
        f"{loaded.source}: {fault}; {manifest.folder} has no rows for it: score it on shards of its own tokenizer and "
        "length."
    )


def _masks_name(config: ConfigDict, kind: str, draws: int) -> str:
    """Returns the name of a kind of masks in evaluation.json."""
    masking = config.masking
    name = f"{kind} masks {masking.rate:g} {masking.mask_share:g}"
    name += " independent" if config.evaluate.count == "independent" else ""
    return name + (f", {draws} draws" if draws > 1 else "")
