"""The command `plan`: the step that `train` would run, compiled for a TPU that isn't there; what it takes and costs.

Whether it fits is the compiler's word. How long it takes is an estimate from the compiler's cycles (cost_model.py
says how), and an optimistic one: `CALIBRATION` is printed with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm import config as configs
from mlm.data.dataset_info import DatasetInfo
from mlm.data.manifest import Manifest
from mlm.errors import InputError
from mlm.plan import fit, hlo, tables, topology
from mlm.plan.compile import Program, compile_step, make_mesh
from mlm.plan.cost_model import account
from mlm.tasks import pretraining
from mlm.text import show
from mlm.training import recipe, sharding

OPERATIONS = 20  # that are shown
CALIBRATION = {
    "what": "3 epochs of WikiText-103, large model, length 512, global batch 128, v3-8, bfloat16: 106.4 minutes "
    "published (Hugging Face on PyTorch / XLA TPUs, 2021)",
    "published_seconds": 1.19,
    "estimated_seconds": 0.71,
    "ratio": 1.7,
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What is asked of every program.

    Attributes:
      info: of the data.
      known_records: the number of rows is the data's own; without it a run given in epochs has no length.
      price: dollars for an hour of a chip; None if unknown.
    """

    info: DatasetInfo
    known_records: bool
    price: float | None


def make_job(config: ConfigDict, manifest: Manifest | None, *, records: int | None, price: float | None) -> Job:
    """Returns the job of a config and, where they are made already, its shards.

    Args:
      config: of the run.
      manifest: of the shards; without one the config says what there is to know.
      records: rows of the training split, instead of the manifest's.
      price: dollars for an hour of a chip.

    Raises:
      InputError: a number of records or a price that can't be.
    """
    for flag, value in (("--records", records), ("--price", price)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag}={value}: must be a number above 0.")
    if manifest is None:
        rows, vocab_size = config.data.global_batch, config.tokenizer.vocab_size
        info = DatasetInfo.synthetic(vocab_size=vocab_size, length=config.shards.length, records=records or rows)
    else:
        info = DatasetInfo.from_manifest(manifest)
        info = dataclasses.replace(info, records=records or info.records)
    return Job(info, bool(records or manifest), price)


def run(
    config: ConfigDict,
    job: Job,
    *,
    name: str,
    slices: int,
    compare: bool,
    sweep: list[str],
    search: bool,
    as_json: bool,
) -> dict[str, Any]:
    """Prints the plan, as tables or as one line of JSON, and returns it.

    Args:
      config: of the run.
      job: what to tell of each program.
      name: of the topology; "" if the sweep names some.
      slices: of that topology.
      compare: the stock step too.
      sweep: ["key=value,value", ...], see `cells`.
      search: look for what would fit where the config doesn't.
      as_json: a line for programs.

    Raises:
      InputError: no such topology, or a batch or a parameter that its devices can't split.
    """
    topology.check_slices(slices)
    if sweep:
        found = {"sweep": [_cell(config, job, slices, cell) for cell in cells(sweep, name)], "calibration": CALIBRATION}
        show(*([json.dumps(found)] if as_json else tables.sweep(found)))
        return found
    if not name:
        raise InputError("--topology: name the TPU, as in --topology=v5e:2x4; a name that doesn't exist lists all.")
    place = topology.find(name, slices)
    program, row = measure(config, job, place)
    found = {"plan": row}
    if not program.fits and search:
        print("it does not fit; looking for what would", file=sys.stderr, flush=True)
        row["largest"] = fit.largest_batch(config, job.info, place, program)
        row["remedies"] = fit.remedies(config, job.info, place)
    if compare:
        stock = measure(config, job, place, kind="stock")[1]
        found["stock"] = stock
        if row["fits"] and stock["fits"]:
            found["ratio"] = {
                "cycles": row["cycles"]["all"] / stock["cycles"]["all"],
                "temporaries": row["bytes_per_chip"]["temporaries"] / stock["bytes_per_chip"]["temporaries"],
            }
    found["calibration"] = CALIBRATION
    show(*([json.dumps(found)] if as_json else tables.plan(found)))
    return found


def measure(
    config: ConfigDict, job: Job, place: topology.Topology, *, kind: str = "mlm"
) -> tuple[Program, dict[str, Any]]:
    """Compiles a step and returns it with what there is to tell of it; bytes are of a chip, estimates only if it fits.

    Where the first updates read shorter rows, their step is compiled too, told under "short", and the hours are those
    of both.

    Args:
      config, job: of the run.
      place: what to compile for.
      kind: "mlm", "short" or "stock", as `compile_step` takes it.
    """
    program, cores = compile_step(config, job.info, place, kind=kind), place.family.cores
    mesh = make_mesh(config, place)
    short = config.data.short_length
    accumulate = 1 if kind == "stock" else config.train.accumulate
    row = {
        "step": kind,
        "topology": place.name,
        "slices": place.slices,
        "chips": place.chips,
        "devices": len(place.devices),
        "hosts": pretraining.host_input(config, sharding.processes_of(mesh)),
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
        "compile_seconds": program.seconds,
    }
    if program.fits:
        row |= estimate(program, config, job, place, length=row["length"])
    if kind == "mlm" and short and program.fits:
        row["short"] = measure(config, job, place, kind="short")[1]
        row |= _of_both(row, config.data.short_share)
    return program, row


def _of_both(row: dict[str, Any], share: float) -> dict[str, Any]:
    """Returns the hours and the price of a run whose first `share` of updates takes the step of short rows."""
    whole = {key: row[key] for key in ("hours", "dollars")}
    if not row["short"]["fits"]:
        return dict.fromkeys(whole)
    of_long = share * row["short"]["milliseconds"] / row["milliseconds"] + 1 - share
    return {key: None if value is None else value * of_long for key, value in whole.items()}


def estimate(
    program: Program, config: ConfigDict, job: Job, place: topology.Topology, *, length: int
) -> dict[str, Any]:
    """Returns the time of a step on rows of `length` tokens, what follows from it, and where it goes."""
    cost = account(hlo.parse(program.text), place)
    seconds = cost.cycles / place.hertz
    rate = config.data.global_batch * job.info.length / seconds
    hours, run = None, configs.flatten(config)
    if config.train.steps or job.known_records:
        hours = recipe.total_steps(run, job.info.records) * seconds / 3600
    useful = recipe.flops_per_token(run, job.info.vocab_size, length=length)
    names = ("phase", "module", "source")
    dearest = sorted(cost.groups.items(), key=lambda item: -item[1][0])[:OPERATIONS]
    return {
        "milliseconds": 1e3 * seconds,
        "tokens_per_second": rate,
        "mfu": rate * useful / (place.peak_flops * len(place.devices)),
        "hours": hours,
        "dollars": None if hours is None or job.price is None else hours * job.price * place.chips,
        "cycles": {
            "all": cost.cycles,
            "compiler": cost.compiler,
            "kernels": cost.kernels,
            "bytes": cost.rule,
            "collectives": cost.links,
            "waits": cost.waits,
        },
        "instructions": {"compiler": cost.instructions[0], "rules": cost.instructions[1]},
        "uncosted": dict(cost.uncosted),
        "collectives": {kind: _collective(one, place.hertz) for kind, one in cost.collectives.items()},
        "operations": [
            dict(zip(names, key, strict=True)) | {"share": cycles / cost.cycles, "count": count}
            for key, (cycles, count) in dearest
        ],
    }


def _collective(one: Any, hertz: float) -> dict[str, float]:
    return {
        "count": one.count,
        "overlapping": one.overlapping,
        "bytes": one.bytes,
        "milliseconds": 1e3 * one.cycles / hertz,
        "exposed_milliseconds": 1e3 * one.exposed / hertz,
    }


def cells(sweep: list[str], name: str) -> list[dict[str, str]]:
    """Returns every combination of a sweep's values.

    Args:
      sweep: "topology=v5e:2x4,v6e:2x4", "per_chip_batch=16,32" (rows that a chip holds at once), "mesh=8x1x1,1x8x1"
        (data x fsdp x tensor), or any key of the config: "model.remat=true,false".
      name: the topology, if the sweep names none.

    Raises:
      InputError: something else, or no topology.
    """
    axes: dict[str, list[str]] = {}
    for text in sweep:
        key, _, values = text.partition("=")
        known = key in ("topology", "per_chip_batch", "mesh") or re.fullmatch(r"\w+\.\w+", key)
        if not known or not all(values.split(",")):
            raise InputError(
                f"--sweep {text}: write topology=NAME,NAME or per_chip_batch=16,32 or mesh=8x1x1,1x8x1 "
                "(data x fsdp x tensor) or GROUP.KEY=VALUE,VALUE."
            )
        wrong = [value for value in values.split(",") if not re.fullmatch(SHAPES.get(key, ".*"), value)]
        if wrong:
            raise InputError(f"--sweep {text}: {wrong[0]} is no {key}; write it as in {EXAMPLES[key]}.")
        axes[key] = values.split(",")
    if "topology" not in axes:
        if not name:
            raise InputError("--sweep: give --topology=NAME, or topology=NAME,NAME among the axes.")
        axes = {"topology": [name]} | axes
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


SHAPES = {"per_chip_batch": r"[1-9]\d*", "mesh": r"(-1|[1-9]\d*)(x(-1|[1-9]\d*)){2}"}
EXAMPLES = {"per_chip_batch": "per_chip_batch=16,32", "mesh": "mesh=8x1x1,1x8x1"}


def _cell(config: ConfigDict, job: Job, slices: int, cell: dict[str, str]) -> dict[str, Any]:
    """Returns {"cell", "plan" or "error"} of one combination: a bad one is told, and does not stop the others."""
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
