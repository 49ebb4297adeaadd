"""What two runs have in common: states, configs and log lines."""

import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp

from mlm import entry
from mlm.tasks.pretraining import Pretraining


def state_of(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as checkpointer:
        structure = checkpointer.metadata(workdir / "checkpoints" / str(step) / "state").item_metadata.tree
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=one), structure)
        state = checkpointer.restore(workdir / "checkpoints" / str(step) / "state", target)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def lines_after(workdir: pathlib.Path, step: int) -> list[dict]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] > step]


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys() and len(one) > 60
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


def meta_of(task: Pretraining) -> dict:
    """What a checkpoint of the task would hold of it."""
    return {
        "config": task.config,
        "dataset": task.metadata,
        "data_fingerprint": task.data_fingerprint,
        "class": entry.describe(type(task)),
    }
