"""What two runs have in common: states, configs and log lines."""

import json
import pathlib
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp

from mlm import entry
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.training.task import Task


def state_of(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as checkpointer:
        structure = checkpointer.metadata(
            workdir / "checkpoints" / str(step) / "state"
        ).item_metadata.tree
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=one), structure
        )
        state = checkpointer.restore(workdir / "checkpoints" / str(step) / "state", target)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def back_to(workdir: pathlib.Path, target: pathlib.Path, step: int) -> pathlib.Path:
    """Copies a run as a kill after `step` had been saved leaves it: with lines that come again."""
    shutil.copytree(workdir, target)
    for later in checkpoint_files.complete_steps(target / "checkpoints"):
        if later > step:
            shutil.rmtree(target / "checkpoints" / str(later))
    return target


def edit_meta(checkpoints: UPath, step: int, **values) -> None:
    """Changes the metadata of a checkpoint, with its hashes."""
    file = checkpoints / str(step) / "meta" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    checkpoint_files.write_hashes(checkpoints, step)


def lines_after(workdir: pathlib.Path, step: int) -> list[dict]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] > step]


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys() and len(one) > 15
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


def meta_of(task: Task) -> dict:
    """What a checkpoint of the task would hold of it."""
    return {
        "config": task.config,
        "dataset": task.metadata,
        "data_fingerprint": task.data_fingerprint,
        "class": entry.describe(type(task)),
    }
