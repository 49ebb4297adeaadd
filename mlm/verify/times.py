"""How fast the run is: its step, its input, the sum of its gradients, its checkpoints; what limits it."""

import functools
import math
import tempfile
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mlm import cluster
from mlm.bench import interleaved, steps
from mlm.model.keys import make_key
from mlm.paths import remove
from mlm.plan import calibration, plan, tables, topology
from mlm.plan import compile as compiling
from mlm.training import checkpoint, peaks, sharding, train
from mlm.verify import profile
from mlm.verify.numbers import is_same, open_batches, without_shards
from mlm.verify.session import Result, Session, Values, show_time

STEPS, STEPS_QUICK, TRIAL_STEPS, WARM_UP = 30, 10, 3, 3  # TRIAL_STEPS: at least, of a step of many microbatches
SECONDS, SECONDS_QUICK = 300.0, 60.0  # since the start, after which no other setting is tried
READING = 5.0  # seconds


def check_speed(session: Session) -> Iterator[Result]:
    """Step, memory and compilation, of one microbatch."""
    rows = session.task().config.data.global_batch
    session.numbers["speed"] = speed = measure(session, {}, rows, profiled=True)
    fits = "" if speed["rows"] == rows else f" ({rows:,}, as in the config, don't fit)"
    quartiles = np.subtract(*np.percentile(speed["seconds"], [75, 25]))
    mfu = "unknown" if speed["mfu"] is None else f"{speed['mfu']:.1%}"
    what = f"{len(speed['seconds'])} steps of {speed['rows']:,} rows of {session.config.shards.length} tokens{fits}"
    measured = f"{show_time(speed['median'])}, quartiles {show_time(quartiles)} apart, slowest "
    measured += f"{show_time(max(speed['seconds']))}; {speed['tokens_per_second']:,.0f} tokens/s, MFU {mfu}"
    yield Result(what, f"{measured}; compiled in {show_time(speed['compile_seconds'])}", values=speed)
    peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())
    measured = f"{peak / 1e9:.2f} GB at the peak of all checks" if peak else "not counted here"
    expected = f"{speed['memory_bytes'] / 1e9:.2f} GB of the step, by the compiler"
    yield Result("memory of a device", measured, expected, values={"peak_bytes": peak})


def check_plan(session: Session) -> Iterator[Result]:
    """The step's time, and that of its parts, beside the estimates of `plan` for these devices."""
    speed, place, planned = session.numbers.get("speed"), topology.attached(jax.devices()), "-"
    if speed is None:
        yield Result("step beside plan", "the step was not timed")
        return
    if place is None:
        yield Result("step beside plan", f"plan has no {jax.devices()[0].device_kind}")
    else:
        config = session.task({"data.global_batch": speed["rows"]}).config
        job = plan.make_job(config, session.manifest, pretraining=session.pretraining, calibration=calibration.NONE)
        row = plan.measure(config, job, place)[1]
        factor = 1e3 * speed["median"] / row["milliseconds"]
        needs, planned = row["bytes_per_chip"]["needs"] / place.family.cores, f"{tables.by_part(row['parts'])}, by plan"
        expected = f"{row['milliseconds']:.3g} ms and {needs / 1e9:.2f} GB a device, by plan for {place.name}"
        expected += ", with attention by xla" if session.numbers.get("attention") == "cudnn" else ""
        yield Result("step beside plan", f"{factor:.2f} times as long", expected, values={"times_plan": factor})
    parts = speed["milliseconds_by_part"]
    unknown = "jax's profile has no times of operations"
    if jax.devices()[0].platform == "gpu":
        unknown += "; without CUDA graphs it may (XLA_FLAGS=--xla_gpu_enable_command_buffer=)"
    measured = tables.by_part(parts) if parts else unknown
    yield Result("milliseconds of a device by part", measured, planned, values=parts)


def measure(
    session: Session, changes: Values, rows: int, *, accumulate: bool = False, profiled: bool = False
) -> Values:
    """Compiles and times steps of so many rows at once, or of a half, a quarter ... that fit.

    A step is of these rows, or of the run's batch, which it reads in microbatches, if it may `accumulate`.
    """
    count = session.config.data.global_batch // rows if accumulate else 1
    task = session.task(changes | {"data.global_batch": rows * count, "train.accumulate": count})
    shards, begin, excess = task.mesh.shape["data"] * task.mesh.shape["fsdp"], time.monotonic(), 1.0
    try:
        with tempfile.TemporaryDirectory() as folder:
            dump = compiling.dump_options(folder) if jax.devices()[0].platform == "tpu" else None
            program, step = steps.our_step(task, steps.random_rows(task), dump)
            compile_seconds, memory = time.monotonic() - begin, steps.memory(program)
            cluster.barrier("compiled")
            if (excess := memory["memory_bytes"] / memory_limit()) <= 1:
                repeat, limit = steps.repeated(step), STEPS_QUICK if session.quick else STEPS
                repeat(WARM_UP if count == 1 else 1)
                rounds = max(TRIAL_STEPS, limit // count)
                rates = interleaved.measure("", {"": repeat}, 0.0, calls=1, rounds=rounds)[""]
                read_text = functools.partial(compiling.text_of, program, folder)
                parts = profile.time_by_part(repeat, read_text) if profiled else {}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or jax.process_count() > 1:
            raise
        excess = 2.0
    if excess > 1:
        if rows == shards:
            raise MemoryError("not even one row a device fits; shard the parameters (mesh.fsdp)")
        fewer = max(shards, rows // 2 ** math.ceil(math.log2(excess)) // shards * shards)
        while session.config.data.global_batch % fewer:  # a config's microbatches are equal
            fewer -= shards
        return measure(session, changes, fewer, accumulate=accumulate, profiled=profiled)
    seconds, tokens = [1 / rate for rate in rates], rows * count * task.info.length
    median, flops = float(np.median(seconds)), tokens * task.flops_per_token(task.info.length)
    return memory | {
        "rows": rows,
        "seconds": seconds,
        "median": median,
        "tokens_per_second": tokens / median,
        "mfu": peaks.mfu(flops / median, jax.devices()),
        "useful_flops": flops,
        "accessed_bytes": float((program.cost_analysis() or {}).get("bytes accessed", 0)),  # of memory, by a device
        "compile_seconds": compile_seconds,  # with the first state
        "milliseconds_by_part": {name: 1e3 * taken for name, taken in parts.items()},
    }


def memory_limit() -> float:
    """Returns the bytes of a device that jax may use, infinity if it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)


def check_input(session: Session) -> Iterator[Result]:
    """Rows that this host reads in a second, beside those that its devices take."""
    speed, reason = session.numbers.get("speed"), without_shards(session)
    if reason or speed is None:
        yield Result("input pipeline", reason or "the step was not timed")
        return
    stream, span = open_batches(session)
    reading = {"": steps.repeated(functools.partial(next, stream))}
    rates = interleaved.measure("", reading, READING, intervals=1 if session.quick else 3)[""]
    rows = span.stop - span.start
    have, taken = rows * float(np.median(rates)), speed["rows"] * rows / session.config.data.global_batch
    need, session.numbers["input"] = taken / speed["median"], taken / have
    waiting = max(0.0, 1 - have / need)
    measured = f"{have:,.0f} rows a second, so that devices wait {waiting:.0%} of the time"
    values = {"rows_per_second": have, "needed_rows_per_second": need, "waiting": waiting}
    yield Result("input pipeline of a host", measured, f"the step takes {need:,.0f}", values=values)


def check_storage(session: Session) -> Iterator[Result]:
    """The sum of the gradients over all devices, alone; the run's state, written to the workdir and read back."""
    task, folder = session.task(), session.workdir.root / ".verify"
    state, devices = task.init(), task.mesh.shape["data"]
    if devices > 1:  # ones like the parameters, summed as the step sums its gradients
        dtype = task.config.model.dtype if session.config.train.accumulate == 1 else "float32"
        dtype = "float32" if jax.devices()[0].platform == "cpu" else dtype
        sum_up = train.sum_over_data(lambda ones, *_: (ones, jnp.float32(1)), task.mesh, matrix_dtype=dtype)
        shardings, rows_B = sharding.shardings_of(state.params), jnp.zeros(devices, jnp.uint32)
        ones = jax.jit(lambda params: jax.tree.map(jnp.ones_like, params), out_shardings=shardings)(state.params)
        run = functools.partial(jax.jit(lambda ones: sum_up(ones, rows_B, rows_B, make_key(0))), ones)
        is_sum = bool(is_same(run()[0], jax.tree.map(lambda leaf: leaf * devices, ones)))
        seconds = 1 / float(np.median(interleaved.measure("", {"": steps.repeated(run)}, 0.0, calls=WARM_UP)[""]))
        size = sum(leaf.size * (jnp.dtype(dtype).itemsize if leaf.ndim > 1 else 4) for leaf in jax.tree.leaves(ones))
        bandwidth = 2 * (devices - 1) / devices * size / seconds  # a ring sends each byte twice
        session.numbers["network"], values = seconds, {"seconds": seconds, "bytes": size, "bytes_per_second": bandwidth}
        measured = f"{show_time(seconds)} for {size / 1e6:,.0f} MB, {bandwidth / 1e9:.3g} GB/s a device"
        yield Result("sum of the gradients", measured, f"ones add up to {devices}", is_sum, values)
    if cluster.is_primary():
        remove(folder)  # of a verify that was killed here
    cluster.barrier("checkpoint begins")
    begin = time.monotonic()
    with checkpoint.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, state, {"step": 1}, None)
    session.numbers["checkpoints"], begin = time.monotonic() - begin, time.monotonic()
    is_right = bool(is_same(state, checkpoint.restore(folder, 1, task.abstract_state)))
    seconds, size = time.monotonic() - begin, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    cluster.barrier("checkpoint read")
    if cluster.is_primary():
        remove(folder)
    written = session.numbers["checkpoints"]
    measured = f"{size / 1e6:,.0f} MB, written and read back in {written:.1f} s, restored in {seconds:.1f} s"
    values = {"bytes": size, "save_seconds": written, "restore_seconds": seconds}
    yield Result("checkpoint of this state", measured, "the same to the bit", is_right, values)


def check_verdict(session: Session) -> Iterator[Result]:
    """The largest part of a step's time, and a few settings in the time that is left."""
    numbers, place = session.numbers, topology.attached(jax.devices())
    if (speed := numbers.get("speed")) is None:
        yield Result("verdict", "the step was not timed")
        return
    accumulate = session.config.data.global_batch // speed["rows"]  # microbatches to a sum of gradients
    parts = {
        "compute": speed["useful_flops"] / place.peak_flops / jax.device_count() if place else 0.0,
        "memory": speed["accessed_bytes"] / place.hertz / place.hbm_bytes_per_cycle if place else 0.0,
        "network": numbers.get("network", 0.0) / accumulate,
        "input": numbers.get("input", 0.0),
        "checkpoints": numbers.get("checkpoints", 0.0) / (session.config.checkpoint.every or math.inf) / accumulate,
    }
    limit = max(parts, key=parts.get)
    if place is None and parts[limit] < speed["median"] / 2:
        limit = f"compute or memory (the peaks of a {jax.devices()[0].device_kind} are not known)"
    shown = ", ".join(f"{name} {show_time(seconds)}" for name, seconds in parts.items() if seconds)
    measured = f"{limit}; of {show_time(speed['median'])}, each alone would take: {shown}"
    yield Result("what limits this run", measured, values=parts)
    here = _flags(session, {}, speed["rows"])
    rates = {here: speed["tokens_per_second"]} if accumulate == 1 else {}
    for changes, rows in _trials(session, speed["rows"]):
        in_time = time.monotonic() - session.begin < (SECONDS_QUICK if session.quick else SECONDS)
        if not multihost_utils.broadcast_one_to_all(np.int32(in_time)):
            break
        try:
            trial = measure(session, changes, rows, accumulate=True)
        except MemoryError:  # the run's own step has fit
            yield Result(_flags(session, changes, rows), "does not fit, with one row a device either")
            continue
        flags, rate = _flags(session, changes, trial["rows"]), trial["tokens_per_second"]
        rates.setdefault(flags, rate)
        times = rate / next(iter(rates.values()))
        yield Result(flags, f"{rate:,.0f} tokens/s, {times:.2f} times as fast", values={"times": times})
    noise = max(speed["seconds"]) / speed["median"]  # less is no reason to change a config
    best = max(rates, key=rates.get, default=here)
    chosen = best if rates.get(best, 0.0) > noise * rates.get(here, 0.0) else here
    yield Result("settings to use", chosen, values={"tokens_per_second": rates})


def _trials(session: Session, rows: int) -> Iterator[tuple[Values, int]]:
    """Yields changes of the config and rows at once: none, the fastest attention, no remat, twice and half the rows.

    Without accumulation, the step of no changes is timed already.
    """
    model, numbers, mesh = session.config.model, session.numbers, session.task().mesh.shape
    if session.config.data.global_batch // rows > 1:
        yield {}, rows
    if numbers.get("fastest") != numbers.get("attention"):
        yield {"model.attention": numbers["fastest"]}, rows
    if model.remat or model.remat_feed_forward:
        yield {"model.remat": False, "model.remat_feed_forward": 0}, rows
    for count in (2 * rows, rows // 2):
        if count and session.config.data.global_batch % count == count % (mesh["data"] * mesh["fsdp"]) == 0:
            yield {}, count


def _flags(session: Session, changes: Values, rows: int) -> str:
    """Returns the changes as flags for the run: its batch stays, and is read in more or fewer microbatches."""
    values = changes | {"train.accumulate": session.config.data.global_batch // rows}
    return " ".join(f"--config.{key}={str(value).lower()}" for key, value in values.items())
