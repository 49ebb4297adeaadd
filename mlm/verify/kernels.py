"""Attention kernels beside plain float32 attention: forward and backward, their error and their time."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlm.bench import interleaved
from mlm.bench.steps import repeated
from mlm.model import attention, layers
from mlm.tasks.pretraining import Pretraining
from mlm.verify.session import Result, Session, made_up_rows, one_device, show_time

NAMES = ("xla", "fused", "cudnn")
LARGEST, LARGEST_COMPARED = 2**29, 2**27  # scores of a call: 1 GiB in bfloat16, 0.5 GiB in the float32 reference
ROWS_ON_CPU, CALLS = 2, 10  # rows of a call on a CPU, and calls of a timing
# A value passes some eight roundings, of scores, probabilities, their gradients, products and the result: in the worst
# case they add up, and on average they do as a random walk.
ROUNDINGS = 8
OUTPUTS = ("the context", "the gradient of queries", "the gradient of keys", "the gradient of values")


def check(session: Session) -> Iterator[Result]:
    """Each kernel that supports the config, for whole rows and for windows; what auto takes, and what is fastest."""
    task, dtype = session.task(), session.config.model.dtype
    config, windows, seconds = task.module.config, task.module.windows(), dict.fromkeys(NAMES, 0.0)  # of all layers
    if session.config.model.implementation == "transformers":
        yield Result("attention", "transformers' own class computes it, without a kernel of mlm's")
        return
    for window in dict.fromkeys(windows):
        programs, of = {}, f", windows of {window} to each side" if window else ""
        arrays = _arrays(task, window)
        expected = _reference(task, window, arrays)
        for name in NAMES:
            if reason := attention.unsupported(name, config, task.info.length, task.mesh, dtype, window):
                yield Result(f"{name}{of}", f"does not support {reason}")
                seconds.pop(name, None)
                continue
            program = functools.partial(_both_ways(task, name, window), *arrays)
            yield _compare(f"{name}{of}", jax.block_until_ready(program()), expected, dtype)
            if name != "fused" or jax.local_devices()[0].platform == "tpu":  # elsewhere it is interpreted
                programs[name] = repeated(program)
        rates = interleaved.measure("kernels", programs, 0.0, calls=CALLS)
        times = {name: 1 / float(np.median(rates[name])) for name in rates}
        seconds = {name: seconds[name] + windows.count(window) * times[name] for name in times if name in seconds}
    auto = attention.choose("auto", config, length=task.info.length, mesh=task.mesh, dtype=dtype, window=max(windows))
    fastest, chosen = min(seconds, key=seconds.get, default=auto), session.config.model.attention
    session.numbers |= {"fastest": fastest, "attention": auto if chosen == "auto" else chosen}
    times = ", ".join(f"{name} {show_time(total)}" for name, total in seconds.items())
    measured = f"takes {auto}; fastest here is {fastest} (both ways, all layers: {times})"
    of = f"{len(arrays[0])} rows of {task.info.length} tokens, {dtype}"
    yield Result(f"model.attention=auto, {of}", measured, values={"auto": auto, "fastest": fastest, "seconds": seconds})


def _arrays(task: Pretraining, window: int) -> tuple[Any, ...]:
    """Returns queries, keys, values, segments, dropout's mask, rotation and the gradient of the context."""
    config, info, mesh, dtype = task.module.config, task.info, task.mesh.shape, jnp.dtype(task.config.model.dtype)
    rows = task.config.data.global_batch // (mesh["data"] * mesh["fsdp"])
    rows = min(rows, ROWS_ON_CPU) if jax.local_devices()[0].platform == "cpu" else rows
    rows = max(1, min(rows, LARGEST // (config.num_attention_heads // mesh["tensor"] * info.length**2)))
    batch, shape = made_up_rows(task), (rows, info.length, config.hidden_size // mesh["tensor"])
    columns = (jnp.asarray(batch[name][-rows:]) for name in ("input_ids", "attention_mask"))
    described, dropout = task.module.make_rows(*columns, None, None, None), None
    q, k, v, grad = (jax.random.normal(jax.random.key(number), shape, dtype) for number in range(4))
    if rate := attention.dropout_rate(config):
        dropout = layers.dropout(jnp.ones((1, info.length, info.length), dtype), rate, jnp.uint32(1))[0]
    rotations = described.positions if isinstance(described.positions, dict) else {}
    rotation = rotations.get("local" if window else "global")
    return q, k, v, described.segments_BxL, dropout, rotation, grad


def _both_ways(task: Pretraining, name: str, window: int) -> Callable[..., Any]:
    """Returns a jitted function of `_arrays`: the context, and the gradients of queries, keys and values."""
    heads, mesh = (
        task.module.config.num_attention_heads // task.mesh.shape["tensor"],
        one_device(jax.local_devices()[0]),
    )
    isolated = task.config.data.isolate_documents
    attend = attention.make_kernel(name, heads=heads, mesh=mesh, isolated=isolated, window=window)

    @jax.jit
    def run(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, grad_BxLxH):
        real_BxLx1 = (segments_BxL > 0)[..., None]  # what padding reads means nothing
        rest = segments_BxL, dropout_mask_LxL, rotation
        context_BxLxH, pull = jax.vjp(lambda *qkv: attend(*qkv, *rest), q_BxLxH, k_BxLxH, v_BxLxH)
        return jnp.where(real_BxLx1, context_BxLxH, 0), *pull(jnp.where(real_BxLx1, grad_BxLxH, 0))

    return run


def _reference(task: Pretraining, window: int, arrays: tuple[Any, ...]) -> Any:
    """Returns what xla computes of the last rows, the padded one among them, in float32 at the highest precision."""
    scores = task.module.config.num_attention_heads * task.info.length**2
    rows = slice(-max(1, min(8, LARGEST_COMPARED // scores, len(arrays[0]))), None)
    *inputs, dropout, rotation, grad = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays
    )
    if rotation is not None and len(rotation[0]) > 1:
        rotation = tuple(angles[rows] for angles in rotation)
    with jax.default_matmul_precision("highest"):
        run = _both_ways(task, "xla", window)
        return jax.device_get(run(*(x[rows] for x in inputs), dropout, rotation, grad[rows]))


def _compare(what: str, outputs: Any, expected: Any, dtype: str) -> Result:
    """Compares the last rows: the largest error by the largest value, the mean error by the mean value."""
    rounding, rows = roundoff(dtype), len(expected[0])
    limits, errors = (ROUNDINGS * rounding, ROUNDINGS**0.5 * rounding), {}
    for name, output, right in zip(OUTPUTS, outputs, expected, strict=True):
        error = abs(np.asarray(output[-rows:], np.float32) - right)
        errors[f"largest error of {name}"] = float(error.max() / abs(right).max())
        errors[f"mean error of {name}"] = float(error.mean() / abs(right).mean())
    excess = {name: error / limits[name.startswith("mean")] for name, error in errors.items()}
    worst = max(excess, key=lambda name: (excess[name] != excess[name], excess[name]))  # NaN first
    measured = f"{worst}: {errors[worst]:.2g} of the {worst.partition(' ')[0]} value"
    expected = f"at most {limits[0]:.2g}, of the mean {limits[1]:.2g}, from float32 xla on {rows} rows"
    return Result(what, measured, expected, excess[worst] <= 1, {"errors": errors, "limits": limits})


def roundoff(dtype: str) -> float:
    """Returns the relative error of a rounding in the products of a dtype.

    Those of float32 are of bfloat16 on a TPU, and of TF32 (10 bits) on a GPU, unless more precision is asked for.
    """
    platform = jax.local_devices()[0].platform
    if dtype == "float32" and platform == "gpu":
        return 2.0**-11
    return float(jnp.finfo("bfloat16" if platform == "tpu" else dtype).eps) / 2
