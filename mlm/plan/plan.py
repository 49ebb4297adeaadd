"""Memory, estimated time and price of the training step on a TPU that is not attached; on a GPU, its memory.

The compiler says whether the step fits. The time is estimated (cost_model.py), and optimistic.
"""

import dataclasses
import itertools
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
from mlm.plan.compile import compile_step
from mlm.plan.topology import Topology
from mlm.tasks.pretraining import Pretraining
from mlm.training import optimizer, sharding
from mlm.training.hours import steps_of as hours_to_steps


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and where its rows and its price come from."""

    manifest: Manifest | None = None  # of the shards, if they are there
    records: int | None = None  # training rows; None: the shards'
    price: float | None = None  # of a chip-hour, in dollars
    pretraining: type[Pretraining] | None = None  # a class of one's own

    @property
    def knows_records(self) -> bool:
        """Whether the length of a run that counts epochs is known."""
        return bool(self.records or self.manifest)

    def info(self, config: ConfigDict) -> DatasetInfo:
        """Returns the sizes of the shards, or those that the config gives."""
        if self.manifest:
            check_config(self.manifest, config)
            info = DatasetInfo.from_manifest(self.manifest)
            return dataclasses.replace(info, records=self.records or info.records)
        return DatasetInfo.synthetic(
            vocab_size=config.tokenizer.vocab_size,
            length=config.shards.length,
            records=self.records or config.data.global_batch,
        )


def measure(config: ConfigDict, job: Job, place: Topology, *, kind: str = "mlm") -> dict[str, Any]:
    """Compiles a step (`kind` as in `compile_step`) and returns its figures; times are there only of a TPU, if it fits.

    If the first steps read shorter rows, "short" is theirs; the hours are of both.
    """
    info = job.info(config)
    if config.train.steps or job.knows_records:
        steps = total_steps(config, info.records)
        check_branch(config, steps)
        optimizer.check_schedule(config, steps)
    if place.family.target:  # cuDNN is asked how it computes, and is there with a GPU alone
        config = configs.replace(config, {"model.attention": "xla"})
    mesh = sharding.mesh_of(config.mesh, place.devices)
    task = (job.pretraining or Pretraining).without_data(config, mesh, info, job.manifest)
    program = compile_step(task, place, kind=kind)
    accumulate = 1 if kind == "baseline" else config.train.accumulate
    length = config.data.short_length if kind == "short" else info.length
    rows = config.data.global_batch * info.length // length
    sizes = {key: getattr(program, key) for key in ("arguments", "temporaries", "outputs", "needs")}
    sizes["capacity"] = place.capacity
    has_padding = config.shards.rows != CONCATENATED
    row = {
        "step": kind,
        "topology": place.name,
        "slices": place.slices,
        "chips": place.chips,
        "devices": len(place.devices),
        "hosts": sharding.host_input(sharding.processes_of(mesh), config),
        "mesh": dict(mesh.shape),
        "length": length,
        "padding": None if has_padding and not job.manifest else 1 - info.real_share,
        "global_batch": rows,
        "accumulate": accumulate,
        "rows_per_chip": rows / accumulate / place.chips,
        "fits": program.fits,
        "bytes_per_chip": {key: size and size * place.family.cores for key, size in sizes.items()},
    }
    if program.text:
        cost = cost_model.Cost(hlo.parse(program.text), place)
        row |= estimate(cost, tokens=rows * length * info.real_share)
        flops_per_second = row["tokens_per_second"] * task.flops_per_token(length)
        row["mfu"] = flops_per_second / (place.peak_flops * len(place.devices))
    if kind != "short":
        if config.data.short_length and program.fits and kind == "mlm":
            row["short"] = measure(config, job, place, kind="short")
        row |= whole_run(config, job, row)
    return row


def whole_run(config: ConfigDict, job: Job, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the "hours", "tokens" and "dollars" of a run whose steps are as fast as those of `row`; None if unknown.

    Steps of smaller batches read as many tokens a second as the others. train.hours become steps, as in training.
    """
    short = row.get("short", row)
    is_timed = "milliseconds" in row and "milliseconds" in short
    if not is_timed or not (config.train.hours or config.train.steps or job.knows_records):
        return dict.fromkeys(("hours", "tokens", "dollars"))
    info = job.info(config)
    stages = make_stages(config, info.records)
    seconds_of_length = {one["length"]: one["milliseconds"] / 1e3 for one in (row, short)}
    seconds_of = {
        (rows, length): seconds_of_length[length] * rows / config.data.global_batch
        for rows, length in stages.sizes
    }
    if config.train.hours and not config.train.steps:
        steps = hours_to_steps(config, info.records, seconds_of)
        stages = make_stages(configs.replace(config, {"train.steps": steps}), info.records)
    parts = list(stages.between(stages.start + 1, stages.steps))
    hours = sum(part.count * seconds_of[part.rows, part.length] for part in parts) / 3600
    tokens = sum(part.count * part.rows for part in parts) * info.length * info.real_share
    dollars = None if job.price is None else hours * job.price * row["chips"]
    return {"hours": hours, "tokens": round(tokens), "dollars": dollars}


def estimate(cost: cost_model.Cost, *, tokens: float) -> dict[str, Any]:
    """Returns the time of a step of so many tokens, its speed, and where the time comes from."""
    hertz = cost.topology.hertz
    return {
        "milliseconds": 1e3 * cost.total / hertz,
        "tokens_per_second": tokens * hertz / cost.total,
        "cycles": cost.cycles | {"all": cost.total},
        "uncosted": dict(cost.uncosted),
        "collectives": {
            kind: {key: one[key] for key in ("count", "overlapping", "bytes")}
            | {"milliseconds": 1e3 * one["cycles"] / hertz}
            | {"exposed_milliseconds": 1e3 * one["exposed"] / hertz}
            for kind, one in cost.collectives.items()
        },
    }


def cells(sweep: list[str], name: str) -> list[dict[str, str]]:
    """Returns every combination of a sweep's values, on the topology `name` if the sweep has none."""
    axes: dict[str, list[str]] = {"topology": [name]} if name else {}
    for text in sweep:
        key, _, values = text.partition("=")
        if not values or not re.fullmatch(r"topology|per_chip_batch|\w+\.\w+", key):
            example = "topology=NAME,NAME or per_chip_batch=16,32 or GROUP.KEY=VALUE,VALUE"
            raise InputError(f"--sweep {text}: is not a valid axis; write {example}.")
        axes.setdefault(key, []).extend(values.split(","))
    if "topology" not in axes:
        raise InputError("--sweep: give --topology=NAME, or topology=NAME,NAME among the axes.")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def plan_cell(
    config: ConfigDict,
    job: Job,
    slices: int,
    cell: dict[str, str],
    rules: Mapping[str, Rule] | None = None,
) -> dict[str, Any]:
    """Returns {"cell", "plan" or "error"} of one combination; `rules` as in `config.replace`."""
    try:
        place = topology.find(cell["topology"], slices)
        values = configs.parse(
            config, [f"{key}={value}" for key, value in cell.items() if "." in key]
        )
        if "per_chip_batch" in cell:
            accumulate = values.get("train.accumulate", config.train.accumulate)
            rows = int(cell["per_chip_batch"]) * place.chips * accumulate
            values |= {"data.global_batch": rows, "data.batch_stages": ()}  # whose ROWS may be more
        changed = configs.replace(config, values, rules=rules)
        return {"cell": cell, "plan": measure(changed, job, place)}
    except (InputError, jax.errors.JaxRuntimeError, ValueError) as error:
        # ValueError: what the compiler can't do
        return {"cell": cell, "error": " ".join(str(error).split())[:300]}
