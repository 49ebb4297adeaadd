"""What the checks of `verify` work on: the run's step, made smaller, on rows that are made up."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import config as configs
from mlm.bench import steps
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding

LAYERS = 4  # of a small step, at most: both local and global ones of ModernBERT
ROWS = 8  # of a small step, at least, if the config has so many
# Rows are made up, so nothing of the run's data or start matters.
MADE_UP = {
    "data.batch_stages": (),
    "data.lanes": 1,
    "data.mixture": (),
    "data.skip_batches": (),
    "train.accumulate": 1,
    "train.branch_from": "",
    "train.init_from": "",
}


@dataclasses.dataclass
class Session:
    """A config, and the class of its task."""

    config: ConfigDict
    pretraining: type[Pretraining]

    def task(self, changes: dict[str, Any] | None = None, mesh: Mesh | None = None) -> Pretraining:
        """Returns the run's task on made-up rows, a microbatch a step, with `changes` of the config."""
        rows = self.config.data.global_batch // self.config.train.accumulate
        config = configs.replace(
            self.config, MADE_UP | {"data.global_batch": rows} | (changes or {})
        )
        return self.pretraining.without_data(config, mesh)

    def small(self) -> dict[str, Any]:
        """Returns changes of the config by which the host's CPU can follow a step: few layers, a few rows a device."""
        task = self.task()
        model = task.config.model
        shards = task.mesh.shape["data"] * task.mesh.shape["fsdp"]
        layers = min(model.layers, LAYERS)
        changes = {
            "model.layers": layers,
            "model.remat_feed_forward": min(model.remat_feed_forward, layers),
            "data.global_batch": min(task.config.data.global_batch, shards * -(-ROWS // shards)),
        }
        if model.implementation == "transformers":  # its dropout depends on the mesh
            changes |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
        return changes


def made_up_rows(task: Pretraining) -> dict[str, np.ndarray]:
    """Returns a global batch of two documents a row, the same on every host; the last row is half padding, if rows are.

    Kernels rely on what the data says of its rows.
    """
    batch = steps.random_rows(task)
    info = task.info
    half = max(info.length // 2, 1)
    batch["input_ids"][:, ::half] = info.special_ids["cls"]
    if info.padding != "none":
        batch["input_ids"][-1, half:] = info.special_ids["pad"]
        batch["attention_mask"][-1, half:] = 0
    return batch


def one_device(device: jax.Device) -> Mesh:
    """Returns the mesh of one device."""
    return sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=[device])
