"""What would make a step fit: a smaller batch, or the same batch computed otherwise. Each trial compiles."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.plan.compile import Program, compile_step, make_mesh
from mlm.plan.topology import Topology

MAX_TRIALS = 5  # batches


def largest_batch(config: ConfigDict, info: DatasetInfo, topology: Topology, program: Program) -> dict[str, Any] | None:
    """Returns {"rows_per_chip", "global_batch"} of the largest batch found that fits, instead of `program`'s; or None.

    Tries halves, quarters, ... of the rows that a device holds at once. It starts where the temporaries would fit if
    they were proportional to the rows, and goes up again from a batch that fits.
    """
    mesh = make_mesh(config, topology)
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulate
    rows = config.data.global_batch // num_shards
    room, wanted = topology.capacity - program.arguments, (program.needs or 0) - program.arguments
    if room <= 0:
        return None  # the state alone is too large
    sizes = [rows >> shift for shift in range(1, rows.bit_length()) if rows % (1 << shift) == 0]
    start = next((i for i, size in enumerate(sizes) if wanted * size / rows < 1.25 * room), len(sizes) - 1)
    found, index, seen = None, start, set()
    while len(seen) < MAX_TRIALS and 0 <= index < len(sizes) and index not in seen:
        seen.add(index)
        batch = sizes[index] * num_shards
        fits = _try({"data.global_batch": batch}, config, info, topology)["fits"]
        if fits:
            found = {"rows_per_chip": batch // config.train.accumulate / topology.chips, "global_batch": batch}
        index += -1 if fits else 1
    return found


def remedies(config: ConfigDict, info: DatasetInfo, topology: Topology) -> list[dict[str, Any]]:
    """Returns [{"change", "fits", "bytes_per_chip" or "error"}], the cheapest remedy first."""
    mesh, model = make_mesh(config, topology), config.model
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    accumulate = {"train.accumulate": 4 * config.train.accumulate}
    remat = {} if model.remat else {"model.remat": True}
    some = remat and model.remat_feed_forward < model.layers
    feed_forward = {"model.remat_feed_forward": model.layers} if some else {}
    split = {"mesh.fsdp": num_shards, "mesh.data": 1} if mesh.shape["fsdp"] < num_shards else {}
    changes = (feed_forward, remat, accumulate, split, remat and remat | accumulate)
    return [_try(change, config, info, topology) for change in changes if change]


def _try(change: dict[str, Any], config: ConfigDict, info: DatasetInfo, topology: Topology) -> dict[str, Any]:
    """Compiles a variant of the config; one that breaks a rule does not fit."""
    flags = " ".join(f"--config.{key}={str(value).lower()}" for key, value in change.items())
    try:
        program = compile_step(configs.replace(config, change), info, topology)
    except InputError as error:
        return {"change": flags, "fits": False, "error": str(error)}
    needs = None if program.needs is None else program.needs * topology.family.cores
    return {"change": flags, "fits": program.fits, "bytes_per_chip": needs}
