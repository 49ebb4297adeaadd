"""Memory, estimated time and price of the training step on a TPU or GPU that is not attached.

The compiler says whether the step fits. The time is estimated (cost_model.py), and optimistic.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm import config as configs
from mlm.config_rules import CONCATENATED, Rule
from mlm.data.manifest import DatasetInfo, Manifest, check_config
from mlm.data.stages import check_branch, make_stages, total_steps
from mlm.errors import InputError
from mlm.plan import cost_model, hlo, topology
from mlm.plan.calibration import Calibration, find
from mlm.plan.compile import MakeTask, Program, compile_step
from mlm.plan.topology import Topology
from mlm.tasks.pretraining import Pretraining
from mlm.training import schedules, sharding

OPERATIONS = 20  # shown
MAX_TRIALS = 8  # batches compiled to find the largest that fits
RESOLUTION = 32  # of more numbers of rows, the result may be below the largest that fits by one part in so many
GUESSES = 4  # of these, chosen by the memory of the others
SWEEP = {"topology": ".+", "per_chip_batch": r"[1-9]\d*", "mesh": r"(-1|[1-9]\d*)(x(-1|[1-9]\d*)){2}"}  # axes' values


@dataclasses.dataclass(frozen=True)
class Job:
    """The data and the price of a chip-hour in dollars; the length of a run in epochs needs `known_records`."""

    info: DatasetInfo
    known_records: bool
    manifest: Manifest | None
    price: float | None
    make_task: MakeTask
    calibration: Calibration | None = None  # None for that of mlm/plan/calibrations/


def make_job(
    config: ConfigDict,
    manifest: Manifest | None,
    *,
    records: int | None = None,
    price: float | None = None,
    pretraining: type[Pretraining] | None = None,
    calibration: Calibration | None = None,
) -> Job:
    """Returns the job of a config, and of its shards if they exist; `records` replaces their number of rows."""
    if manifest is None:
        vocab_size, length = config.tokenizer.vocab_size, config.shards.length
        info = DatasetInfo.synthetic(vocab_size=vocab_size, length=length, records=config.data.global_batch)
    else:
        info = DatasetInfo.from_manifest(manifest)
    info = dataclasses.replace(info, records=records or info.records)
    make_task = functools.partial((pretraining or Pretraining).without_data, manifest=manifest)
    return Job(info, bool(records) or manifest is not None, manifest, price, make_task, calibration)


def measure(config: ConfigDict, job: Job, place: Topology, *, kind: str = "mlm") -> tuple[Program, dict[str, Any]]:
    """Compiles a step (`kind` as in `compile_step`) and returns it with its figures.

    Estimates are there only if it fits. If the first steps read shorter rows, "short" is theirs; the hours are of both.
    """
    if config.train.steps or job.known_records:
        steps = total_steps(config, job.info.records)
        check_branch(config, steps)
        schedules.check_schedule(config, steps)
    job = dataclasses.replace(job, calibration=find(place, job.calibration))  # refused before minutes of compilation
    program = compile_step(config, job.info, place, job.make_task, kind=kind)
    mesh, short = sharding.mesh_of(config.mesh, place.devices), config.data.short_length
    accumulate = 1 if kind == "baseline" else config.train.accumulate
    parts = job.info.length // short if kind == "short" else 1  # that a row is read as
    sizes = {key: getattr(program, key) for key in ("arguments", "temporaries", "outputs", "needs")}
    sizes["capacity"] = place.capacity
    row = {
        "step": kind,
        "topology": place.name,
        "slices": place.slices,
        "chips": place.chips,
        "devices": len(place.devices),
        "hosts": sharding.host_input(sharding.processes_of(mesh), config),
        "mesh": dict(mesh.shape),
        "length": job.info.length // parts,
        "padding": 1 - job.info.real_share if job.manifest or config.shards.rows == CONCATENATED else None,
        "global_batch": config.data.global_batch * parts,
        "batch_stages": list(map(list, config.data.batch_stages)),
        "accumulate": accumulate,
        "rows_per_chip": config.data.global_batch * parts / accumulate / place.chips,
        "fits": program.fits,
        "bytes_per_chip": {key: size and size * place.family.cores for key, size in sizes.items()},
    }
    if program.fits:
        row |= estimate(program, config, job, place)
    if kind == "mlm" and short and program.fits:
        row["short"] = measure(config, job, place, kind="short")[1]
    return program, row | (whole_run(config, job, row) if program.fits and kind != "short" else {})


def whole_run(config: ConfigDict, job: Job, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the "hours", "tokens" and "dollars" of a run whose steps are as fast as those of `row`; None if unknown.

    Steps of smaller batches read as many tokens a second as the others. train.hours are given, steps follow.
    """
    short = row.get("short", row)
    if not short["fits"] or not (config.train.hours or config.train.steps or job.known_records):
        return dict.fromkeys(("hours", "tokens", "dollars"))
    rate, rate_of_short = row["tokens_per_second"], short["tokens_per_second"]
    if hours := config.train.hours:
        share = config.data.short_share if config.data.short_length else 0.0
        tokens = 3600 * hours * (share * rate_of_short + (1 - share) * rate)
    else:
        stages, rows_of_length = make_stages(config, job.info.records), collections.Counter()
        for stage in stages.between(stages.start + 1, stages.steps):
            rows_of_length[stage.length] += stage.count * stage.rows
        rows = rows_of_length.total()
        tokens, share = rows * job.info.length * job.info.real_share, rows_of_length[config.data.short_length] / rows
        hours = tokens / 3600 * (share / rate_of_short + (1 - share) / rate)
    dollars = None if job.price is None else hours * job.price * row["chips"]
    return {"hours": hours, "tokens": round(tokens), "dollars": dollars}


def estimate(program: Program, config: ConfigDict, job: Job, place: Topology) -> dict[str, Any]:
    """Returns the time of a step, its speed, and the costliest operations."""
    cost = cost_model.estimate(hlo.parse(program.text), place)
    cycle_ms = 1e3 * job.calibration.factor / place.hertz
    tokens = config.data.global_batch * job.info.length * job.info.real_share
    rate = 1e3 * tokens / (cycle_ms * cost.total)
    largest = sorted(cost.groups.items(), key=lambda item: -item[1][0])
    return {
        "calibration": job.calibration.sentence(config),
        "milliseconds": cycle_ms * cost.total,
        "tokens_per_second": rate,
        "mfu": rate * program.flops_per_token / (place.peak_flops * len(place.devices)),
        "cycles": {"all": cost.total, **cost.cycles},
        "parts": {name: cycle_ms * cycles for name, cycles in cost.parts.items()},
        "instructions": cost.instructions,
        "uncosted": dict(cost.uncosted),
        "collectives": {
            kind: {key: one[key] for key in ("count", "overlapping", "bytes")}
            | {"milliseconds": cycle_ms * one["cycles"], "exposed_milliseconds": cycle_ms * one["exposed"]}
            for kind, one in cost.collectives.items()
        },
        "operations": [
            {"phase": phase, "module": module, "source": source, "share": cycles / cost.total, "count": count}
            for (phase, module, source), (cycles, count) in largest[:OPERATIONS]
        ],
    }


def cells(sweep: list[str], name: str) -> list[dict[str, str]]:
    """Returns every combination of a sweep's values, on the topology `name` if the sweep has none."""
    axes: dict[str, list[str]] = {}
    for text in sweep:
        key, _, values = text.partition("=")
        pattern = ".+" if re.fullmatch(r"\w+\.\w+", key) else SWEEP.get(key, "(?!)")
        axes.setdefault(key, []).extend(values.split(","))
        if bad := [value for value in axes[key] if not re.fullmatch(pattern, value)]:
            raise InputError(
                f"--sweep {text}: {key}={bad[0]} is not a valid axis; write topology=NAME,NAME or per_chip_batch=16,32 "
                "or mesh=8x1x1,1x8x1 (data x fsdp x tensor) or GROUP.KEY=VALUE,VALUE."
            )
    if "topology" in axes and name:
        raise InputError(f"--topology={name}: --sweep has an axis of topologies, too; leave one of them out.")
    if "topology" not in axes:
        if not name:
            raise InputError("--sweep: give --topology=NAME, or topology=NAME,NAME among the axes.")
        axes = {"topology": [name]} | axes
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def plan_cell(
    config: ConfigDict, job: Job, slices: int, cell: dict[str, str], rules: Mapping[str, Rule] | None = None
) -> dict[str, Any]:
    """Returns {"cell", "plan" or "error"} of one combination; `rules` as in `config.replace`."""
    try:
        place = topology.find(cell["topology"], slices)
        values = configs.parse(config, [f"{key}={value}" for key, value in cell.items() if "." in key])
        if "mesh" in cell:
            sizes = zip(("data", "fsdp", "tensor"), cell["mesh"].split("x"), strict=True)
            values |= {f"mesh.{axis}": int(size) for axis, size in sizes}
        if "per_chip_batch" in cell:
            accumulate = values.get("train.accumulate", config.train.accumulate)
            rows = int(cell["per_chip_batch"]) * place.chips * accumulate
            values |= {"data.global_batch": rows, "data.batch_stages": ()}  # whose ROWS may be more
        changed = configs.replace(config, values, rules=rules)
        info = job.info
        if job.manifest:
            check_config(job.manifest, changed)
        else:
            info = dataclasses.replace(info, length=changed.shards.length, vocab_size=changed.tokenizer.vocab_size)
        return {"cell": cell, "plan": measure(changed, dataclasses.replace(job, info=info), place)[1]}
    except InputError as error:
        return {"cell": cell, "error": str(error)}
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # what the compiler can't do
        return {"cell": cell, "error": " ".join(str(error).split())[:300]}


def largest_batch(config: ConfigDict, job: Job, place: Topology, program: Program) -> dict[str, Any] | None:
    """Returns {"rows_per_chip", "global_batch"} of the largest batch found that fits, if `program` does not, or None.

    Bisects the numbers of rows a device that mesh, lanes and accumulation allow, where the memory of the programs so
    far, as a line over their rows, says; after GUESSES of them in the middle. Of more than RESOLUTION numbers it
    ends before the last few: programs that fill the memory compile slowly.
    """
    mesh = sharding.mesh_of(config.mesh, place.devices)
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulate
    config = configs.replace(config, {"data.batch_stages": ()})  # whose ROWS a smaller batch may not reach
    rows, lanes = config.data.global_batch // num_shards, config.data.lanes
    if program.arguments >= place.capacity:
        return None  # the state alone is too large
    step = lanes // math.gcd(lanes, num_shards)
    sizes = range(step, rows, step)
    fit, too_large = -1, len(sizes)  # indices: the largest that fits, the smallest that does not
    needs = {rows: program.needs} if program.needs else {}
    for trial in range(MAX_TRIALS):
        stride = max(1, fit // RESOLUTION)
        if too_large - fit <= stride:
            break
        middle = (fit + too_large) // 2
        guess = _rows_that_fit(needs, program.arguments, place.capacity)
        if trial < GUESSES and guess is not None:
            middle = min(max(int(guess) // step - 1, fit + stride), too_large - stride)
        changed = configs.replace(config, {"data.global_batch": sizes[middle] * num_shards})
        smaller = compile_step(changed, job.info, place, job.make_task)
        if smaller.needs:
            needs[sizes[middle]] = smaller.needs
        fit, too_large = (middle, too_large) if smaller.fits else (fit, middle)
    if fit < 0:
        return None
    batch = sizes[fit] * num_shards
    return {"rows_per_chip": batch // config.train.accumulate / place.chips, "global_batch": batch}


def _rows_that_fit(needs: Mapping[int, float], state: int, capacity: int) -> float | None:
    """Returns the rows a device whose memory is the capacity, by the two nearest of some {rows: bytes}, or None."""
    points = needs if len(needs) > 1 else {0: state} | needs  # temporaries in proportion to the rows
    nearest = sorted(points, key=lambda rows: abs(points[rows] - capacity))[:2]
    if len(nearest) < 2 or points[max(nearest)] <= points[min(nearest)]:
        return None
    slope = (points[max(nearest)] - points[min(nearest)]) / (max(nearest) - min(nearest))
    return max(0.0, min(nearest) + (capacity - points[min(nearest)]) / slope)


def remedies(config: ConfigDict, job: Job, place: Topology) -> list[dict[str, Any]]:
    """Returns [{"change", "fits", "bytes_per_chip" or "error"}], the cheapest remedy first."""
    mesh, model = sharding.mesh_of(config.mesh, place.devices), config.model
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    remat, accumulate = {"model.remat": True}, {"train.accumulate": 4 * config.train.accumulate}
    changes = (
        ({"model.remat_feed_forward": model.layers}, not model.remat and model.remat_feed_forward < model.layers),
        (remat, not model.remat),
        (accumulate, True),
        ({"mesh.fsdp": num_shards, "mesh.data": 1}, mesh.shape["fsdp"] < num_shards),
        (remat | accumulate, not model.remat),
    )
    return [_try(change, config, job, place) for change, helps in changes if helps]


def _try(change: dict[str, Any], config: ConfigDict, job: Job, place: Topology) -> dict[str, Any]:
    """Compiles a variant of the config; one that breaks a rule does not fit."""
    flags = " ".join(f"--config.{key}={str(value).lower()}" for key, value in change.items())
    try:
        program = compile_step(configs.replace(config, change), job.info, place, job.make_task)
    except InputError as error:
        return {"change": flags, "fits": False, "error": str(error)}
    needs = None if program.needs is None else program.needs * place.family.cores
    return {"change": flags, "fits": program.fits, "bytes_per_chip": needs}
