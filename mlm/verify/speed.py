"""How fast the run's step is, with how much memory, and what `plan` says of it."""

import math
import time
from collections.abc import Iterator

import jax
import numpy as np

from mlm import cluster
from mlm.bench import interleaved, steps
from mlm.errors import StopError
from mlm.plan import plan, topology
from mlm.training import peaks
from mlm.verify.session import Result, Session, Values, show_time

STEPS, STEPS_QUICK, WARM_UP = 30, 10, 3


def measure(session: Session, changes: Values, count: int) -> Values:
    """Compiles and times `count` steps, a microbatch each; raises MemoryError(how many times a device's it needs)."""
    task, begin = session.task(changes), time.monotonic()
    program, step = steps.our_step(task, steps.host_rows(task, steps.random_rows(task)))
    compile_seconds, memory = time.monotonic() - begin, steps.memory(program)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if memory["memory_bytes"] > limit:
        raise MemoryError(memory["memory_bytes"] / limit)
    cluster.barrier("compiled")
    repeat = steps.one_late(step)
    repeat(WARM_UP)
    seconds = [1 / rate for rate in interleaved.measure("step", {"": repeat}, 0.0, calls=1, rounds=count)[""]]
    rows, median = task.config.data.global_batch, float(np.median(seconds))
    flops = rows * task.info.length * task.flops_per_token(task.info.length)
    return memory | {
        "rows": rows,
        "seconds": seconds,
        "median": median,
        "tokens_per_second": rows * task.info.length / median,
        "mfu": peaks.mfu(flops / median, jax.devices()),
        "useful_flops": flops,
        "accessed_bytes": float((program.cost_analysis() or {}).get("bytes accessed", 0)),  # of memory, by a device
        "compile_seconds": compile_seconds,
    }


def check(session: Session) -> Iterator[Result]:
    """Step, memory, compilation, and plan's estimate."""
    session.numbers["speed"] = speed = _largest_that_fits(session)
    seconds, median = speed["seconds"], speed["median"]
    spread = float(np.subtract(*np.percentile(seconds, [75, 25])))
    measured = f"{show_time(median)} (quartiles {show_time(spread)} apart, slowest {show_time(max(seconds))}), "
    measured += f"{speed['tokens_per_second']:,.0f} tokens/s, "
    measured += "MFU unknown" if speed["mfu"] is None else f"MFU {speed['mfu']:.1%}"
    fits = "" if speed["rows"] == session.rows else f" (the {session.rows:,} of the config don't fit)"
    what = (
        f"{len(seconds)} steps of one microbatch, {speed['rows']:,} rows of {session.config.shards.length} tokens{fits}"
    )
    yield Result(what, measured, values=speed)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak, limit = (max(stat.get(name, 0) for stat in stats) for name in ("peak_bytes_in_use", "bytes_limit"))
    measured = f"{peak / 1e9:.2f} of {limit / 1e9:.2f} GB at the peak of all checks" if peak else "not counted here"
    expected = f"{speed['memory_bytes'] / 1e9:.2f} GB of the step, by the compiler"
    yield Result("memory of a device", measured, expected, values={"peak_bytes": peak, "limit_bytes": limit})
    yield Result("compiling the step, with the first state", show_time(speed["compile_seconds"]))
    if place := topology.attached(jax.devices()):
        task = session.task({"data.global_batch": speed["rows"]})
        job = plan.make_job(task.config, session.manifest, records=None, price=None, pretraining=session.pretraining)
        row = plan.measure(task.config, job, place)[1]
        factor = 1e3 * median / row["milliseconds"]
        measured, needs = f"{factor:.2f} times plan's estimate", row["bytes_per_chip"]["needs"] / place.family.cores
        expected = f"{show_time(row['milliseconds'] / 1e3)}, {needs / 1e9:.2f} GB a device by plan for {place.name}"
        yield Result("step beside plan", measured, expected, values={"times_plan": factor, "topology": place.name})
    else:
        yield Result("step beside plan", f"plan knows no {jax.devices()[0].device_kind}")


def _largest_that_fits(session: Session) -> Values:
    """Measures the config's rows a device, or a half, a quarter ... that fit."""
    rows, mesh = session.rows, session.task().mesh
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    while True:
        excess = 2.0
        try:
            return measure(session, {"data.global_batch": rows}, STEPS_QUICK if session.quick else STEPS)
        except MemoryError as error:
            excess = max([excess, *error.args])
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or jax.process_count() > 1:
                raise
        if rows == shards:
            raise StopError("not even one row a device fits; shard the parameters (mesh.fsdp)")
        rows = max(shards, rows // 2 ** math.ceil(math.log2(excess)) // shards * shards)
