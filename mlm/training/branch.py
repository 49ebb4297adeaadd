"""Branches (train.branch_from): a new run that goes on from the whole state of a step of another run.

The branch reads the batches after that step, as its own data, seed, lanes and batch size order them. Where
model.positions differs, the rows that both position tables have are taken, with their moments; the others are freshly
initialised, and their moments are zero.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mlm import config as configs
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files, locate
from mlm.training import checkpoint
from mlm.training.state import TrainState
from mlm.workdir import Workdir

POSITIONS = "position_embeddings/embedding"
STATE_KEYS = ("optimizer.ema_decay", "optimizer.clip_norm")  # 0 or not decides which parts the state has
SAME_DATA = ("vocab_size", "special_ids", "all_special_ids")


class Source(NamedTuple):
    """The checkpoint that a branch starts from."""

    workdir: Workdir
    step: int
    meta: dict[str, Any]
    lineage: dict[str, Any]  # "from", "step", "config_changes": goes into the metadata of the branch's checkpoints

    def share(self, hours: float) -> float:
        """Returns which share of a branch's train.hours its source has used; 0 if either counts steps."""
        used = self.meta.get("share", 0.0) * self.meta["config"].get("train.hours", 0.0) if hours else 0.0
        if hours and used >= hours:
            name = f"{self.lineage['from']}@{self.step}"
            raise InputError(f"config.train.hours = {hours:g}: {name} has used {used:g} of them; set it higher.")
        return used / hours if hours else 0.0


def open_source(meta: dict[str, Any], workdir: Workdir, steps: int) -> Source:
    """Returns the checkpoint that train.branch_from names, verified; raises InputError if the run can't start there.

    Args:
      meta: of the new run.
      workdir: of the new run.
      steps: of the new run, in total.
    """
    name = meta["config"]["train.branch_from"]
    where, (folder, step) = f"config.train.branch_from = {name}", locate.split_step(name)
    if step is None:
        raise InputError(f"{where}: no checkpoints are there; name a workdir and one of its steps, WORKDIR@STEP.")
    source = Workdir(folder, create=False)
    checkpoint_files.check_step(source.checkpoints, step, where)
    saved = checkpoint_files.read_meta(source.checkpoints, step)
    for part, key, what in ((saved["dataset"], "labels", "a classifier"), (saved, "averaged", "an average")):
        if key in part:
            raise InputError(f"{where}: holds {what}, not the state of pretraining; name a pretraining run.")
    old, new = saved["config"], meta["config"]
    changes = configs.diff(old, new, re.compile(r"train\.branch_from"))
    refused = []
    for line in changes:
        key = line.partition(":")[0]
        if not configs.BRANCH_MAY_CHANGE.fullmatch(key) or (key in STATE_KEYS and 0 in (old[key], new[key])):
            refused.append(line)
    if refused:
        raise InputError(f"{where}: a branch can't change these keys, set them back:\n  " + "\n  ".join(refused))
    if steps <= step:
        raise InputError(f"{where}: the run would end after step {steps:,}, where the branch starts; train longer.")
    _check_tokenizer(saved, meta, source, workdir, where)
    return Source(source, step, saved, {"from": folder, "step": step, "config_changes": changes})


def _check_tokenizer(saved: dict, meta: dict, source: Workdir, workdir: Workdir, where: str) -> None:
    """Raises InputError if the data of the two runs have different tokens."""
    theirs, ours = ([each["dataset"][key] for key in SAME_DATA] for each in (saved, meta))
    same = [list(v) if isinstance(v, tuple) else v for v in ours] == theirs
    folders = [each.tokenizer for each in (source, workdir)]
    if same and all((folder / "tokenizer.json").is_file() for folder in folders):
        same = len({tokenizer.fingerprint(str(folder)) for folder in folders}) == 1
    if not same:
        raise InputError(f"{where}: was trained with another tokenizer; use shards and a tokenizer like that run's.")


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
    resized = [index for index, leaf in enumerate(leaves) if leaf.shape != wanted[index].shape]
    if not resized:
        return state

    def fit(old: list[jax.Array]) -> list[jax.Array]:
        fresh = jax.tree.leaves(initial_state())
        return [_overlap(leaf, fresh[index]) for index, leaf in zip(resized, old, strict=True)]

    jitted = jax.jit(fit, out_shardings=[wanted[index].sharding for index in resized])
    for index, leaf in zip(resized, jitted([leaves[index] for index in resized]), strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)


def _overlap(old: jax.Array, fresh: jax.Array) -> jax.Array:
    """Returns `fresh` with its overlap with `old` taken from there; fresh where the rank differs (factored moments)."""
    if old.ndim != fresh.ndim:
        return fresh
    both = tuple(slice(0, min(sizes)) for sizes in zip(old.shape, fresh.shape, strict=True))
    return fresh.at[both].set(old[both])
