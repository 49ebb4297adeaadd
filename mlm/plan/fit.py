"""What would make a step fit that does not: a smaller batch, or the same batch in another way. Each trial compiles."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.data.dataset_info import DatasetInfo
from mlm.errors import InputError
from mlm.plan.compile import Program, compile_step, make_mesh
from mlm.plan.topology import Topology

TRIALS = 5  # batches that are tried, at most


def largest_batch(config: ConfigDict, info: DatasetInfo, topology: Topology, program: Program) -> dict[str, Any] | None:
    """Returns {"rows_per_chip", "global_batch"} of the largest batch found that fits; None if none was.

    Tries halves, quarters, ... of the rows that a device holds at once, accumulation and mesh as they are. It starts
    where the temporaries, were they proportional to the rows, would fit, and from a batch that does goes up again.

    Args:
      config, info, topology: of the program that did not fit.
      program: that program.
    """
    mesh = make_mesh(config, topology)
    ways = mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulate
    rows = config.data.global_batch // ways
    room, wanted = topology.capacity - program.arguments, (program.needs or 0) - program.arguments
    if room <= 0:
        return None  # the state alone is too large
    sizes = [rows >> shift for shift in range(1, rows.bit_length()) if rows % (1 << shift) == 0]
    start = next((i for i, size in enumerate(sizes) if wanted * size / rows < 1.25 * room), len(sizes) - 1)
    found, index, seen = None, start, set()
    while len(seen) < TRIALS and 0 <= index < len(sizes) and index not in seen:
        seen.add(index)
        batch = sizes[index] * ways
        fits = _fits({"data.global_batch": batch}, config, info, topology)
        if fits:
            found = {"rows_per_chip": batch // config.train.accumulate / topology.chips, "global_batch": batch}
        index += -1 if fits else 1
    return found


def remedies(config: ConfigDict, info: DatasetInfo, topology: Topology) -> list[dict[str, Any]]:
    """Returns [{"change", "fits", "bytes_per_chip"}]: the cheapest remedy first, remat with accumulation at the end."""
    mesh = make_mesh(config, topology)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    accumulate = {"train.accumulate": 4 * config.train.accumulate}
    remat = {} if config.model.remat else {"model.remat": True}
    some = remat and config.model.remat_feed_forward < config.model.layers
    half = {"model.remat_feed_forward": config.model.layers} if some else {}
    split = {"mesh.fsdp": ways, "mesh.data": 1} if mesh.shape["fsdp"] < ways else {}
    changes = [change for change in (half, remat, accumulate, split, remat and remat | accumulate) if change]
    found = []
    for change in changes:
        words = " ".join(f"--config.{key}={str(value).lower()}" for key, value in change.items())
        try:
            program = compile_step(configs.replace(config, change), info, topology)
        except InputError as error:
            found.append({"change": words, "fits": False, "error": str(error)})
            continue
        needs = None if program.needs is None else program.needs * topology.family.cores
        found.append({"change": words, "fits": program.fits, "bytes_per_chip": needs})
    return found


def _fits(values: dict[str, Any], config: ConfigDict, info: DatasetInfo, topology: Topology) -> bool:
    """Compiles a variant; one that breaks a rule of the config does not fit."""
    try:
        return compile_step(configs.replace(config, values), info, topology).fits
    except InputError:
        return False
