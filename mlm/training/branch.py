"""Branches (train.branch_from): new runs that continue from another run's full training state at a given step.

A branch reads the batches after that step, in its own order. If model.positions differs, the rows that both position
tables have are copied, with their optimizer moments; new rows are freshly initialized, with zero moments.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mlm import config as configs
from mlm import entry
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files, locate
from mlm.training import checkpoint, recipe
from mlm.training.state import TrainState
from mlm.workdir import Workdir

POSITIONS = "position_embeddings/embedding"
STATE_KEYS = ("optimizer.ema_decay", "optimizer.clip_norm")  # turning one on or off changes the state's structure
SAME_DATA = ("vocab_size", "special_ids", "all_special_ids")


class Source(NamedTuple):
    """The checkpoint that a branch starts from."""

    workdir: Workdir
    step: int
    inherited: dict[str, Any]  # in the metadata of the branch's checkpoints: "branch", and "share" of train.hours used


def read_source(config: dict[str, Any], *, deep: bool = True) -> tuple[Source, dict[str, Any]]:
    """Returns what train.branch_from names, as far as the flattened config decides it, and its checkpoint's metadata.

    Raises InputError if the config can't start there, and DamageError; without `deep`, no payload is read.
    """
    name = config["train.branch_from"]
    where, (folder, step) = f"config.train.branch_from = {name}", locate.branch_source(name)
    source = Workdir(folder, create=False)
    checkpoint_files.check_step(source.checkpoints, step, where, deep=deep)
    saved = checkpoint_files.read_meta(source.checkpoints, step)
    for part, key, what in ((saved["dataset"], "labels", "a classifier"), (saved, "averaged", "an average")):
        if key in part:
            raise InputError(f"{where}: holds {what}, not the state of pretraining; name a pretraining run.")
    old = saved["config"]
    changes = configs.diff(old, config, re.compile(r"train\.branch_from"))

    def allowed(key: str) -> bool:
        kept = key in STATE_KEYS and 0 in (old[key], config[key])
        return bool(configs.BRANCH_MAY_CHANGE.fullmatch(key)) and not kept

    if refused := [line for line in changes if not allowed(line.partition(":")[0])]:
        raise InputError(f"{where}: a branch can't change these keys; set them back:\n  " + "\n  ".join(refused))
    if config["train.steps"]:
        recipe.check_branch(config, config["train.steps"])
    hours = config["train.hours"]
    used = saved.get("share", 0.0) * old.get("train.hours", 0.0)  # 0 if it counts steps
    if hours and used >= hours:
        raise InputError(f"config.train.hours = {hours:g}: {name} has used {used:g} of them; set it higher.")
    lineage = {"from": folder, "step": step, "config_changes": changes}
    return Source(source, step, {"branch": lineage, "share": used / hours if hours else 0.0}), saved


def open_source(meta: dict[str, Any], workdir: Workdir, steps: int) -> Source:
    """Returns the checkpoint that a new run's train.branch_from names, verified; InputError if it can't start there."""
    new = meta["config"]
    source, saved = read_source(new)
    old, step, where = saved["config"], source.step, f"config.train.branch_from = {new['train.branch_from']}"
    theirs, ours = (recipe.batches_read(run, step) for run in (old, new))
    same_data = saved["data_fingerprint"] == meta["data_fingerprint"]
    if same_data and theirs != ours and (old.get("data.batch_stages") or new["data.batch_stages"]):
        had = ", ".join(f"batches {part.first:,} to {part.last:,} of {part.rows:,} rows" for part in theirs)
        fix = "set data.batch_stages and data.skip_batches so that this run would have read the same"
        raise InputError(f"{where}: it read {had}; {fix}.")
    same_rows = same_data and recipe.rows_read(old, step) == recipe.rows_read(new, step)
    same_rows = same_rows and saved.get("branch", {}).get("same_rows", True)  # older branches lack the key
    recipe.check_branch(new, steps)
    theirs, ours = (json.dumps([each["dataset"][key] for key in SAME_DATA], sort_keys=True) for each in (saved, meta))
    folders = [each.tokenizer for each in (source.workdir, workdir) if (each.tokenizer / "tokenizer.json").is_file()]
    if ours != theirs or len({tokenizer.fingerprint(str(folder)) for folder in folders}) > 1:
        raise InputError(f"{where}: was trained with another tokenizer; use its tokenizer, and shards made with it.")
    changed = entry.changes(saved.get("class", {}), meta.get("class", {}))
    source.inherited["branch"]["config_changes"] += changed
    source.inherited["branch"] |= {"same_data": same_data, "same_rows": same_rows}
    return source


def check_milestones(meta: dict[str, Any]) -> None:
    """Raises InputError if a branch, new or resumed, has milestones in words, and read other rows before its start."""
    counts_words = any(str(each).startswith("words:") for each in meta["config"]["checkpoint.milestones"])
    if counts_words and not meta["branch"].get("same_rows", True):
        what = f"{meta['config']['train.branch_from']} read different rows, so words can't be counted across both runs"
        raise InputError(f"config.checkpoint.milestones: {what}; give them in steps.")


def restore(source: Source, shapes: TrainState, initial_state: Callable[[], TrainState]) -> TrainState:
    """Returns the state of the source with the shapes and shardings of `shapes`."""
    saved = checkpoint.saved_leaves(source.workdir.checkpoints, source.step)

    def own_shape(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = saved[name].shape if name.endswith(POSITIONS) and name in saved else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

    theirs = jax.tree_util.tree_map_with_path(own_shape, shapes)
    state = checkpoint.restore(source.workdir.checkpoints, source.step, theirs)
    leaves, structure = jax.tree.flatten(state)
    wanted = jax.tree.leaves(shapes)
    old = {index: leaf for index, leaf in enumerate(leaves) if leaf.shape != wanted[index].shape}
    if not old:
        return state

    def fit(old: dict[int, jax.Array]) -> dict[int, jax.Array]:
        fresh = jax.tree.leaves(initial_state())
        return {index: _overlap(leaf, fresh[index]) for index, leaf in old.items()}

    resized = jax.jit(fit, out_shardings={index: wanted[index].sharding for index in old})(old)
    return jax.tree.unflatten(structure, [resized.get(index, leaf) for index, leaf in enumerate(leaves)])


def _overlap(old: jax.Array, fresh: jax.Array) -> jax.Array:
    """Copies the overlap of `old` into `fresh`; returns `fresh` as it is if the ranks differ (factored moments)."""
    if old.ndim != fresh.ndim:
        return fresh
    both = tuple(slice(0, min(sizes)) for sizes in zip(old.shape, fresh.shape, strict=True))
    return fresh.at[both].set(old[both])
