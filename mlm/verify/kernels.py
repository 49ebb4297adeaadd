"""Attention kernels beside plain float32 attention: forward and backward, their error and their time.

Dimensions: B rows, L tokens in a row, H hidden size on a device.
"""

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mlm.bench import interleaved
from mlm.bench.steps import repeated
from mlm.model import attention, layers
from mlm.tasks.pretraining import Pretraining
from mlm.verify.session import (
    Result,
    Session,
    compared,
    made_up_rows,
    milliseconds,
    one_device,
    roundoff,
)

NAMES = ("xla", "fused", "cudnn")
LARGEST_SCORES = 2**29  # of all rows and heads of a call: 1 GiB in bfloat16
LARGEST_REFERENCE = 2**27  # of the rows that are compared, in float32: 0.5 GiB
ROWS_ON_CPU, CALLS = 2, 10  # rows of a call on a CPU, and calls of a timing
# A value passes some eight roundings, of scores, probabilities, their gradients, products and the result: in the worst
# case they add up, and on average they do as a random walk.
ROUNDINGS = 8
OUTPUTS = ("context", "gradient of the queries", "of the keys", "of the values")


def check(session: Session) -> Iterator[Result]:
    """Each kernel that supports the config, for whole rows and for windows; what auto takes, and what is fastest."""
    task = session.task()
    if session.config.model.implementation == "transformers":
        yield Result("attention", "computed by transformers' own class, which takes no kernel of mlm's")
        return
    windows = task.module.windows()
    seconds: dict[str, float] = dict.fromkeys(NAMES, 0.0)  # of all layers
    for window in dict.fromkeys(windows):
        of_window = {}
        for name, (result, taken) in _of_window(session, task, window).items():
            yield result
            of_window[name] = taken
        seconds = {
            name: total + windows.count(window) * of_window[name]
            for name, total in seconds.items()
            if name in of_window
        }
    length, dtype = task.info.length, session.config.model.dtype
    auto = attention.choose("auto", task.module.config, length=length, mesh=task.mesh, dtype=dtype, window=max(windows))
    timed = {name: total for name, total in seconds.items() if total}
    fastest = min(timed, key=timed.get) if timed else auto
    session.numbers |= {"attention_auto": auto, "attention_fastest": fastest}
    times = ", ".join(f"{name} {milliseconds(total)}" for name, total in timed.items()) or "not timed"
    values = {"auto": auto, "fastest": fastest, "seconds": timed}
    yield Result(
        "model.attention=auto", f"takes {auto}; fastest here is {fastest} (all layers: {times})", values=values
    )


def _of_window(session: Session, task: Pretraining, window: int) -> dict[str, tuple[Result, float]]:
    """Returns the result of each kernel, and its seconds, 0 where it can't be timed."""
    config, dtype = task.module.config, session.config.model.dtype
    reasons = {name: attention.unsupported(name, config, task.info.length, task.mesh, dtype, window) for name in NAMES}
    device = jax.local_devices()[0]
    arrays = _arrays(task, window, device)
    compared_rows = max(1, min(8, LARGEST_REFERENCE // _scores(task), len(arrays[0])))
    make = functools.partial(
        attention.make_kernel,
        heads=config.num_attention_heads // task.mesh.shape["tensor"],
        mesh=one_device(device),
        isolated=session.config.data.isolate_documents,
        window=window,
    )
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(jax.jit(_both_ways(make("xla")))(*_first(exact, compared_rows)))
    programs = {name: jax.jit(_both_ways(make(name))) for name, reason in reasons.items() if not reason}
    results, timed = {}, {}
    for name, program in programs.items():
        outputs = jax.block_until_ready(program(*arrays))
        results[name] = _compare(outputs, expected, compared_rows, roundoff(dtype, device))
        if name != "fused" or device.platform == "tpu":  # elsewhere it is interpreted
            timed[name] = repeated(functools.partial(program, *arrays))
    rates = interleaved.measure("kernels", timed, 0.0, calls=1 if device.platform == "cpu" else CALLS)
    seconds = {name: 1 / statistics.median(rates[name]) for name in rates}
    of = f"{len(arrays[0])} rows of {task.info.length} tokens" + (
        f", windows of {window} to each side" if window else ""
    )
    return {
        name: (_result(name, of, results[name], seconds.get(name, 0.0)), seconds.get(name, 0.0)) for name in results
    }


def _scores(task: Pretraining) -> int:
    """Returns the scores of one row."""
    return task.module.config.num_attention_heads // task.mesh.shape["tensor"] * task.info.length**2


def _arrays(task: Pretraining, window: int, device: jax.Device) -> tuple[Any, ...]:
    """Returns queries, keys, values, segments, dropout's mask, rotation and the gradient of the context."""
    config, info, dtype = task.module.config, task.info, jnp.dtype(task.config.model.dtype)
    count = task.config.data.global_batch // (task.mesh.shape["data"] * task.mesh.shape["fsdp"])
    count = max(1, min(count, LARGEST_SCORES // _scores(task), ROWS_ON_CPU if device.platform == "cpu" else count))
    batch = made_up_rows(task)
    columns = [jnp.asarray(batch[name][-count:]) for name in ("input_ids", "attention_mask")]
    rows = task.module.make_rows(*columns, None, None, None)
    hidden = config.hidden_size // task.mesh.shape["tensor"]
    qkv = [jax.random.normal(jax.random.key(n), (count, info.length, hidden), dtype) for n in range(4)]
    dropout, rate = None, attention.dropout_rate(config)
    if rate > 0:
        dropout = layers.dropout(jnp.ones((1, info.length, info.length), dtype), rate, jnp.uint32(1))[0]
    rotation = rows.positions["local" if window else "global"] if isinstance(rows.positions, dict) else None
    real_BxLx1 = (rows.segments_BxL > 0)[..., None]  # what padding reads means nothing
    return *qkv[:3], rows.segments_BxL, dropout, rotation, jnp.where(real_BxLx1, qkv[3], 0)


def _first(arrays: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Returns the last `count` rows, the padded one among them."""
    *qkv, segments, dropout, rotation, grad = arrays
    if rotation is not None and len(rotation[0]) > 1:
        rotation = tuple(angles[-count:] for angles in rotation)
    return *(x[-count:] for x in qkv), segments[-count:], dropout, rotation, grad[-count:]


def _both_ways(attend: attention.Attention) -> Any:
    def run(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, grad_BxLxH):
        rest = (segments_BxL, dropout_mask_LxL, rotation)
        context_BxLxH, pull = jax.vjp(lambda *qkv: attend(*qkv, *rest), q_BxLxH, k_BxLxH, v_BxLxH)
        return jnp.where((segments_BxL > 0)[..., None], context_BxLxH, 0), *pull(grad_BxLxH)

    return run


def _compare(outputs: Any, expected: Any, rows: int, rounding: float) -> dict[str, Any]:
    """Returns the errors of the last rows relative to the largest, and to the mean, of what is expected."""
    largest, mean = [], []
    for output, right in zip(outputs, expected, strict=True):
        error = abs(jax.device_get(output[-rows:]).astype("float32") - right)
        largest.append(float(error.max() / abs(right).max()))
        mean.append(float(error.mean() / abs(right).mean()))
    tolerances = {"tolerance": ROUNDINGS * rounding, "mean_tolerance": ROUNDINGS**0.5 * rounding}
    return {"largest": largest, "mean": mean, "rows": rows} | tolerances


def _result(name: str, of: str, errors: dict[str, Any], seconds: float) -> Result:
    largest, mean = max(errors["largest"]), max(errors["mean"])
    limits = errors["tolerance"], errors["mean_tolerance"]
    pairs = zip(errors["largest"], errors["mean"], strict=True)
    wrong = [not (a <= limits[0] and b <= limits[1]) for a, b in pairs]  # true for NaN
    where = OUTPUTS[wrong.index(True) if any(wrong) else errors["mean"].index(mean)]
    time = f", {milliseconds(seconds)}" if seconds else ""
    measured = f"error {largest:.2g} of the largest value, {mean:.2g} of the mean ({where}){time}"
    expected = f"at most {limits[0]:.2g} and {limits[1]:.2g}, beside float32 xla on {errors['rows']} rows"
    return compared(f"{name}, {of}", measured, expected, not any(wrong), errors | {"seconds": seconds})
