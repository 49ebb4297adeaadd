"""Branches (train.branch_from): new runs that continue from another run's full training state at a given step.

A branch reads the batches after that step, in its own order. If model.positions differs, the rows that both position
tables have are copied, with their optimizer moments; new rows are freshly initialized, with zero moments. Factored
moments of the table (Adafactor's) are zero again: the longer side decides which of the two belongs to the rows.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import entry
from mlm.data import stages
from mlm.data.stages import Stages
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files, locate
from mlm.training import checkpoint, sharding
from mlm.training.task import TrainState
from mlm.workdir import Workdir

POSITIONS = "position_embeddings/embedding"
# turning one on or off changes the state's structure
STATE_KEYS = ("optimizer.ema_decay", "optimizer.clip_norm")
SAME_DATA = ("vocab_size", "special_ids", "all_special_ids")


class Source(NamedTuple):
    """The checkpoint that a branch starts from."""

    workdir: Workdir
    step: int
    lineage: dict[str, Any]  # "branch" in the metadata of the branch's checkpoints


def read_source(config: ConfigDict, *, deep: bool = True) -> tuple[Source, dict[str, Any]]:
    """Returns what train.branch_from names, as far as the config decides it, and its checkpoint's metadata.

    Raises InputError if the config can't start there, and DamageError; without `deep`, no payload is read.
    """
    name = config.train.branch_from
    where = f"config.train.branch_from = {name}"
    folder, step = locate.branch_source(name)
    source = Workdir(folder, create=False)
    checkpoint_files.check_step(source.checkpoints, step, where, deep=deep)
    saved = checkpoint_files.read_meta(source.checkpoints, step)
    if "labels" in saved["dataset"] or "averaged" in saved:
        raise InputError(
            f"{where}: holds an average or a classifier, not the state of pretraining; name a pretraining run."
        )
    configs.check_version(saved["config"], where)
    changes = configs.diff(saved["config"], config, {"train.branch_from"}.__contains__)
    old = configs.flatten(saved["config"])
    new = configs.flatten(config)

    state_keys = set(STATE_KEYS)
    if config.optimizer.name == "adafactor":  # has no first moment if it is 0
        state_keys.add("optimizer.b1")

    def allowed(key: str) -> bool:
        changes_structure = key in state_keys and 0 in (old[key], new[key])
        return configs.branch_may_change(key) and not changes_structure

    if refused := [line for line in changes if not allowed(line.partition(":")[0])]:
        raise InputError(
            f"{where}: a branch can't change these keys; set them back:\n  " + "\n  ".join(refused)
        )
    if config.train.steps:
        stages.check_branch(config, config.train.steps)
    lineage = {
        "from": folder,
        "step": step,
        "config_changes": changes,
        "useful_flops": saved["useful_flops"],
    }
    return Source(source, step, lineage), saved


def open_source(meta: dict[str, Any], new: Stages) -> Source:
    """Returns the checkpoint that a new run's train.branch_from names, verified; InputError if it can't start there.

    `new` are the stages of the run.
    """
    config = meta["config"]
    source, saved = read_source(config)
    step = source.step
    where = f"config.train.branch_from = {config.train.branch_from}"
    old = stages.make_stages(saved["config"], saved["dataset"]["records"])
    same_data = saved["data_fingerprint"] == meta["data_fingerprint"]
    has_ranges = any(
        run.data.batch_stages or run.data.skip_batches for run in (saved["config"], config)
    )
    read = old.batches_between(1, step)
    if same_data and has_ranges and read != new.batches_between(1, step):
        batches = [f"batches {first:,} to {last:,} of {rows:,} rows" for first, last, rows in read]
        raise InputError(
            f"{where}: it read {', '.join(batches)}; set data.batch_stages and data.skip_batches so that this run "
            "would have read the same."
        )
    stages.check_branch(config, new.steps)
    source_tokenizer, new_tokenizer = (
        json.dumps([run["dataset"][key] for key in SAME_DATA], sort_keys=True)
        for run in (saved, meta)
    )
    if source_tokenizer != new_tokenizer:  # preflight.branch compares the tokenizers themselves
        raise InputError(
            f"{where}: was trained with another tokenizer; use its tokenizer, and shards made with it."
        )
    before = saved.get("branch", {"same_rows": True})["same_rows"]
    same_rows = before and same_data and old.rows_read(step) == new.rows_read(step)
    changes = source.lineage["config_changes"] + entry.changes(saved["class"], meta["class"])
    lineage = {"config_changes": changes, "same_data": same_data, "same_rows": same_rows}
    return source._replace(lineage=source.lineage | lineage)


def restore(
    source: Source, shapes: TrainState, initial_state: Callable[[], TrainState]
) -> TrainState:
    """Returns the state of the source with the shapes and shardings of `shapes`."""
    folder = source.workdir.checkpoints
    saved = dict(sharding.named_leaves(checkpoint.saved_tree(folder, source.step)))
    name_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")

    def saved_shape(
        path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct
    ) -> jax.ShapeDtypeStruct:
        shape = saved.get(name_of(path), leaf).shape
        if not name_of(path).endswith(POSITIONS) or shape == leaf.shape:
            return leaf
        return leaf.update(shape=shape, sharding=NamedSharding(leaf.sharding.mesh, P()))

    def resized(path: jax.tree_util.KeyPath, old: jax.Array, fresh: jax.Array) -> jax.Array:
        if not name_of(path).endswith(POSITIONS) or old.ndim == 0:
            return old
        rows = min(len(old), len(fresh))
        return fresh.at[:rows].set(old[:rows]) if old.ndim == fresh.ndim == 2 else fresh

    def adapted(state: TrainState) -> TrainState:
        fresh = initial_state()
        window = {name: state.window.get(name, zero) for name, zero in fresh.window.items()}
        return jax.tree_util.tree_map_with_path(resized, state.replace(window=window), fresh)

    metrics = {name.split("/")[1] for name in saved if name.startswith("window/")}
    # a class of other metrics starts those from zero
    window = dict.fromkeys(metrics, shapes.window["loss"])
    saved_shapes = jax.tree_util.tree_map_with_path(saved_shape, shapes.replace(window=window))
    state = checkpoint.restore(folder, source.step, saved_shapes)
    if saved_shapes == shapes:
        return state
    return jax.jit(adapted, out_shardings=sharding.shardings_of(shapes))(state)
