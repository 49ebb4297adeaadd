"""How fast the run's step is, and the memory that it takes, beside what `plan` expects of these devices."""

import statistics
import time
from collections.abc import Iterator

import jax

from mlm import cluster
from mlm.bench import steps
from mlm.model import flops
from mlm.plan import plan, topology
from mlm.verify.compare import Result
from mlm.verify.session import Session, made_up_rows

STEPS = 30
WARM_UP = 3


def check_speed(session: Session) -> Iterator[Result]:
    """Times steps of one microbatch, on rows that are made up."""
    task = session.task()
    rows = task.config.data.global_batch
    what = f"{STEPS} steps of {rows:,} rows of {task.info.length} tokens"
    try:
        program, step = steps.our_step(task, made_up_rows(task))
        cluster.barrier("compiled")
        seconds = _time(step)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        yield Result(
            what, "out of memory; raise train.accumulate, which has fewer rows at once", False
        )
        return
    median = statistics.median(seconds)
    milliseconds = [f"{1e3 * value:.2f}" for value in (median, min(seconds), max(seconds))]
    tokens = rows * task.info.length / median
    mfu = flops.mfu(tokens * task.flops_per_token(task.info.length), jax.devices())
    memory = steps.memory(program)["memory_bytes"]
    measured = "median {} ms ({} to {})".format(*milliseconds)
    speed = f"{tokens:,.0f} tokens/s, MFU {'unknown' if mfu is None else f'{mfu:.1%}'}"
    yield Result(what, f"{measured}, {speed}")
    yield Result("memory of a device", f"{memory / 1e9:.2f} GB by the compiler")
    if place := topology.attached(jax.devices()):
        row = plan.measure(task.config, plan.Job(pretraining=session.pretraining), place)
        needs = row["bytes_per_chip"]["needs"] / place.family.cores
        expected = f"{row['milliseconds']:.2f} ms, {needs / 1e9:.2f} GB a device"
        yield Result(
            f"plan for {place.name}",
            f"{expected}: took {1e3 * median / row['milliseconds']:.2f} times as long",
        )


def _time(step: steps.Step) -> list[float]:
    """Returns the seconds of each of STEPS steps."""
    seconds = []
    for number in range(WARM_UP + STEPS):
        begin = time.monotonic()
        jax.block_until_ready(step())
        if number >= WARM_UP:
            seconds.append(time.monotonic() - begin)
    return seconds
