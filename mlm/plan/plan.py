"""Memory, estimated time and price of the training step on a TPU that is not attached.

The compiler says whether the step fits. The time is estimated from its cycles (cost_model.py), and optimistic.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm import config as configs
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.errors import InputError
from mlm.plan import cost_model, hlo, topology
from mlm.plan.compile import Program, compile_step, make_mesh
from mlm.plan.topology import Topology
from mlm.training import recipe, sharding

OPERATIONS = 20  # shown
SWEEP = {"topology": ".+", "per_chip_batch": r"[1-9]\d*", "mesh": r"(-1|[1-9]\d*)(x(-1|[1-9]\d*)){2}"}  # axes' values


@dataclasses.dataclass(frozen=True)
class Job:
    """The data and the price of a chip-hour in dollars; without known records a run in epochs has no length."""

    info: DatasetInfo
    known_records: bool
    price: float | None


def make_job(config: ConfigDict, manifest: Manifest | None, *, records: int | None, price: float | None) -> Job:
    """Returns the job of a config, and of its shards if they exist; `records` replaces their number of rows."""
    if manifest is None:
        rows, vocab_size = records or config.data.global_batch, config.tokenizer.vocab_size
        info = DatasetInfo.synthetic(vocab_size=vocab_size, length=config.shards.length, records=rows)
    else:
        info = DatasetInfo.from_manifest(manifest)
        info = dataclasses.replace(info, records=records or info.records)
    return Job(info, bool(records or manifest), price)


def measure(config: ConfigDict, job: Job, place: Topology, *, kind: str = "mlm") -> tuple[Program, dict[str, Any]]:
    """Compiles a step (`kind` as in `compile_step`) and returns it with its figures, estimates only if it fits.

    If the first steps read shorter rows, their step stands under "short", and the hours are of both.
    """
    program, cores = compile_step(config, job.info, place, kind=kind), place.family.cores
    mesh, short = make_mesh(config, place), config.data.short_length
    accumulate = 1 if kind == "baseline" else config.train.accumulate
    row = {
        "step": kind,
        "topology": place.name,
        "slices": place.slices,
        "chips": place.chips,
        "devices": len(place.devices),
        "hosts": sharding.host_input(sharding.processes_of(mesh), configs.flatten(config)),
        "mesh": dict(mesh.shape),
        "length": short if kind == "short" else job.info.length,
        "global_batch": config.data.global_batch,
        "accumulate": accumulate,
        "rows_per_chip": config.data.global_batch / accumulate / place.chips,
        "fits": program.fits,
        "bytes_per_chip": {
            "arguments": program.arguments * cores,
            "temporaries": program.temporaries * cores if program.fits else None,
            "outputs": program.outputs * cores if program.fits else None,
            "needs": None if program.needs is None else program.needs * cores,
            "capacity": place.capacity * cores,
        },
    }
    if program.fits:
        row |= estimate(program, config, job, place, length=row["length"])
    if kind == "mlm" and short and program.fits:
        row["short"] = first = measure(config, job, place, kind="short")[1]
        share, speed = config.data.short_share, first["milliseconds"] / row["milliseconds"] if first["fits"] else None
        for key in ("hours", "dollars"):
            known = speed is not None and row[key] is not None
            row[key] = row[key] * (share * speed + 1 - share) if known else None
    return program, row


def estimate(program: Program, config: ConfigDict, job: Job, place: Topology, *, length: int) -> dict[str, Any]:
    """Returns the time of a step on rows of `length` tokens, what follows from it, and where it goes."""
    cost = cost_model.estimate(hlo.parse(program.text), place)
    seconds = cost.total / place.hertz
    rate = config.data.global_batch * job.info.length / seconds
    hours, flat = None, configs.flatten(config)
    if config.train.steps or job.known_records:
        hours = recipe.total_steps(flat, job.info.records) * seconds / 3600
    useful = recipe.flops_per_token(flat, job.info.vocab_size, length=length)
    largest = sorted(cost.groups.items(), key=lambda item: -item[1][0])
    return {
        "milliseconds": 1e3 * seconds,
        "tokens_per_second": rate,
        "mfu": rate * useful / (place.peak_flops * len(place.devices)),
        "hours": hours,
        "dollars": None if hours is None or job.price is None else hours * job.price * place.chips,
        "cycles": {"all": cost.total, **cost.cycles},
        "instructions": cost.instructions,
        "uncosted": dict(cost.uncosted),
        "collectives": {
            kind: {key: one[key] for key in ("count", "overlapping", "bytes")}
            | {"milliseconds": 1e3 * one["cycles"] / place.hertz}
            | {"exposed_milliseconds": 1e3 * one["exposed"] / place.hertz}
            for kind, one in cost.collectives.items()
        },
        "operations": [
            {"phase": phase, "module": module, "source": source, "share": cycles / cost.total, "count": count}
            for (phase, module, source), (cycles, count) in largest[:OPERATIONS]
        ],
    }


def cells(sweep: list[str], name: str) -> list[dict[str, str]]:
    """Returns every combination of a sweep's values, on the topology `name` if the sweep has none.

    An axis is "topology=v5e:2x4,v6e:2x4", "per_chip_batch=16,32" (rows that a chip holds at once), "mesh=8x1x1,1x8x1"
    (data x fsdp x tensor), or any key of the config: "model.remat=true,false".
    """
    axes: dict[str, list[str]] = {}
    for text in sweep:
        key, _, values = text.partition("=")
        pattern = ".+" if re.fullmatch(r"\w+\.\w+", key) else SWEEP.get(key, "(?!)")
        axes[key] = values.split(",")
        if bad := [value for value in axes[key] if not re.fullmatch(pattern, value)]:
            raise InputError(
                f"--sweep {text}: {key}={bad[0]} is not a valid axis; write topology=NAME,NAME or per_chip_batch=16,32 "
                "or mesh=8x1x1,1x8x1 (data x fsdp x tensor) or GROUP.KEY=VALUE,VALUE."
            )
    if "topology" not in axes:
        if not name:
            raise InputError("--sweep: give --topology=NAME, or topology=NAME,NAME among the axes.")
        axes = {"topology": [name]} | axes
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def plan_cell(config: ConfigDict, job: Job, slices: int, cell: dict[str, str]) -> dict[str, Any]:
    """Returns {"cell", "plan" or "error"} of one combination."""
    try:
        place = topology.find(cell["topology"], slices)
        values = configs.parse(config, [f"{key}={value}" for key, value in cell.items() if "." in key])
        if "mesh" in cell:
            sizes = zip(("data", "fsdp", "tensor"), cell["mesh"].split("x"), strict=True)
            values |= {f"mesh.{axis}": int(size) for axis, size in sizes}
        if "per_chip_batch" in cell:
            accumulate = values.get("train.accumulate", config.train.accumulate)
            values["data.global_batch"] = int(cell["per_chip_batch"]) * place.chips * accumulate
        changed = configs.replace(config, values)
        info = dataclasses.replace(job.info, length=changed.shards.length)
        return {"cell": cell, "plan": measure(changed, dataclasses.replace(job, info=info), place)[1]}
    except InputError as error:
        return {"cell": cell, "error": str(error)}
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # what the compiler can't do
        return {"cell": cell, "error": " ".join(str(error).split())[:300]}
