"""What a step may wait for besides its computation: input, the sum of the gradients, checkpoints."""

import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mlm import cluster
from mlm.bench import interleaved
from mlm.bench.steps import repeated
from mlm.paths import remove
from mlm.training import checkpoint, data_parallel, sharding
from mlm.verify.rows import open_batches, without_shards
from mlm.verify.session import Result, Session, is_same, show_time

SECONDS, CALLS = 5.0, 5


def check_input(session: Session) -> Iterator[Result]:
    """Rows that this host reads in a second, beside those that its devices take."""
    speed, reason = session.numbers.get("speed"), without_shards(session)
    if reason or speed is None:
        yield Result("input pipeline", reason or "the step was not timed")
        return
    stream, rows = open_batches(session)
    reading = {"": repeated(functools.partial(next, stream))}
    rates = interleaved.measure("input", reading, SECONDS, intervals=1 if session.quick else 3)[""]
    share = (rows.stop - rows.start) / session.config.data.global_batch  # of a batch
    have, need = (rows.stop - rows.start) * float(np.median(rates)), share * speed["rows"] / speed["median"]
    session.numbers["input"], waiting = share * speed["rows"] / have, max(0.0, 1 - have / need)
    measured = f"{have:,.0f} rows a second, so that devices wait {waiting:.0%} of the time"
    values = {"rows_per_second": have, "needed_rows_per_second": need, "waiting": waiting}
    yield Result("input pipeline of a host", measured, f"the step takes {need:,.0f}", values=values)


def check_storage(session: Session) -> Iterator[Result]:
    """The sum of the gradients over all devices, alone; the run's state, written to the workdir and read back."""
    task = session.task()
    state = task.init()
    if (devices := task.mesh.shape["data"]) == 1:
        yield Result("sum of the gradients", "one device along mesh.data: nothing to sum")
    else:
        yield _sum_gradients(session, task, state.params, devices)
    folder, begin = session.workdir.root / "verify", time.monotonic()
    with checkpoint.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, state, {"step": 1}, None)
    written, begin = time.monotonic() - begin, time.monotonic()
    read = jax.block_until_ready(checkpoint.restore(folder, 1, task.abstract_state))
    seconds, size = time.monotonic() - begin, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    is_right = bool(is_same(state, read))
    cluster.barrier("checkpoint read")
    if cluster.is_primary():
        remove(folder)
    session.numbers["checkpoints"] = written
    measured = f"{size / 1e6:,.0f} MB, written and read back in {written:.1f} s, restored in {seconds:.1f} s"
    values = {"bytes": size, "save_seconds": written, "restore_seconds": seconds}
    yield Result("checkpoint of this state", measured, "the same to the bit", is_right, values)


def _sum_gradients(session: Session, task, params, devices: int) -> Result:
    """Sums arrays of ones like the parameters, as the step sums its gradients."""
    dtype = task.config.model.dtype if session.config.train.accumulate == 1 else "float32"
    sum_up = data_parallel.sum_over_data(lambda ones, *_: (ones, jnp.float32(1)), task.mesh, matrix_dtype=dtype)
    shardings = sharding.shardings_of(task.abstract_state.params)
    ones = jax.jit(lambda params: jax.tree.map(jnp.ones_like, params), out_shardings=shardings)(params)
    rows_B = jnp.zeros(devices, jnp.uint32)
    run = functools.partial(jax.jit(lambda ones: sum_up(ones, rows_B, rows_B, jax.random.key(0))), ones)
    is_sum = jax.jit(lambda sums: jnp.stack([(leaf == devices).all() for leaf in jax.tree.leaves(sums)]).all())(run())
    rate = float(np.median(interleaved.measure("sum", {"": repeated(run)}, 0.0, calls=CALLS)[""]))
    sent = "float32" if jax.devices()[0].platform == "cpu" else dtype
    size = sum(leaf.size * (jnp.dtype(sent).itemsize if leaf.ndim > 1 else 4) for leaf in jax.tree.leaves(ones))
    bandwidth, session.numbers["network"] = 2 * (devices - 1) / devices * size * rate, 1 / rate  # a ring sends it twice
    measured = f"{show_time(1 / rate)} for {size / 1e6:,.0f} MB, {bandwidth / 1e9:.3g} GB/s a device"
    values = {"seconds": 1 / rate, "bytes": size, "bytes_per_second": bandwidth}
    return Result("sum of the gradients", measured, f"ones add up to {devices}", bool(is_sum), values)
