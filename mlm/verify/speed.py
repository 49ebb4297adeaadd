"""How fast the run's step is, with how much memory, and what `plan` said of it."""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mlm import cluster
from mlm.bench import interleaved, steps
from mlm.errors import StopError
from mlm.training import peaks
from mlm.verify.session import Result, Session, Values, host_rows, milliseconds

STEPS, STEPS_QUICK, WARM_UP = 30, 10, 3


@dataclasses.dataclass(frozen=True)
class Speed:
    """Of steps of one setting."""

    rows: int  # of a step
    seconds: list[float]  # of each step
    tokens_per_second: float
    mfu: float | None
    compile_seconds: float
    memory: dict[str, int]  # of the program, on a device
    hbm_bytes: float  # that the program reads and writes on a device, as the compiler counts them
    useful_flops: float  # of a step, on all devices


class DoesNotFitError(Exception):
    """The step needs more memory than a device has, this many times as much."""


def measure(session: Session, changes: Values, count: int) -> Speed:
    """Compiles and times `count` steps, one microbatch each."""
    task, begin = session.task(changes), time.monotonic()
    batch = host_rows(steps.random_rows(task), task.mesh)
    program, step = steps.our_step(task, batch)
    compile_seconds, memory = time.monotonic() - begin, steps.memory(program)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if memory["memory_bytes"] > limit:
        raise DoesNotFitError(memory["memory_bytes"] / limit)
    cluster.barrier("compiled")
    repeat = steps.one_late(step)
    repeat(WARM_UP)
    rates = interleaved.measure("step", {"step": repeat}, 0.0, calls=1, rounds=count)["step"]
    seconds, tokens = [1 / rate for rate in rates], task.config.data.global_batch * task.info.length
    useful, rate = task.flops_per_token(task.info.length), tokens / float(np.median(seconds))
    costs = program.cost_analysis() or {}
    return Speed(
        task.config.data.global_batch,
        seconds,
        rate,
        peaks.mfu(rate * useful, jax.devices()),
        compile_seconds,
        memory,
        costs.get("bytes accessed", 0.0),
        useful * tokens,
    )


def check(session: Session) -> Iterator[Result]:
    """Step, memory, compilation, and plan's estimate."""
    speed, changes = largest_that_fits(session)
    session.numbers |= {"speed": speed, "changes": changes}
    yield _of_step(session, speed)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(stat.get("peak_bytes_in_use", 0) for stat in stats)
    limit = max(stat.get("bytes_limit", 0) for stat in stats)
    program = speed.memory["memory_bytes"]
    measured = f"{peak / 1e9:.2f} of {limit / 1e9:.2f} GB at the peak of all checks" if peak else "not counted here"
    values = {"peak_bytes": peak, "limit_bytes": limit, "program_bytes": program}
    yield Result("memory of a device", measured, f"{program / 1e9:.2f} GB of the step by the compiler", values=values)
    seconds = speed.compile_seconds
    yield Result("compilation of the step and the first state", milliseconds(seconds), values={"seconds": seconds})


def largest_that_fits(session: Session) -> tuple[Speed, Values]:
    """Measures the config's rows a device, or a half, a quarter ... that fit; returns the change of the config, too."""
    rows, mesh = session.rows, session.task().mesh
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    while True:
        changes, excess = {"data.global_batch": rows}, 2.0
        try:
            return measure(session, changes, STEPS_QUICK if session.quick else STEPS), changes
        except DoesNotFitError as error:
            excess = error.args[0]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or jax.process_count() > 1:
                raise
        if rows == shards:
            raise StopError(
                "not even one row a device fits: shard the parameters (mesh.fsdp), or make the model smaller."
            )
        rows = max(shards, rows // 2 ** math.ceil(math.log2(max(excess, 2.0))) // shards * shards)


def _of_step(session: Session, speed: Speed) -> Result:
    median, slowest = float(np.median(speed.seconds)), max(speed.seconds)
    spread = float(np.subtract(*np.percentile(speed.seconds, [75, 25])))
    rows, devices = speed.rows, jax.device_count()
    mfu = "unknown MFU" if speed.mfu is None else f"MFU {speed.mfu:.1%}"
    measured = f"{milliseconds(median)}, quartiles {milliseconds(spread)} apart, slowest {milliseconds(slowest)}; "
    measured += f"{speed.tokens_per_second:,.0f} tokens/s, {mfu}"
    fits = "" if rows == session.rows else f"; the {session.rows:,} of the config don't fit"
    what = f"{len(speed.seconds)} steps of one microbatch, {rows:,} rows of {session.config.shards.length} tokens{fits}"
    values: dict[str, Any] = dataclasses.asdict(speed) | {"devices": devices, "median": median, "slowest": slowest}
    return Result(what, measured, values=values)
