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
TIMED, COMPARED = 2**29, 2**26  # scores in a call, of all rows and heads: 1 GiB in bfloat16, 0.25 GiB in float32
CALLS = 10  # of a timing
# A value passes some eight roundings, of scores, probabilities, their gradients, products and the result: in the worst
# case they add up, and on average they do as a random walk.
ROUNDINGS = 8
OUTPUTS = ("the context", "the gradient of queries", "the gradient of keys", "the gradient of values")


def check(session: Session) -> Iterator[Result]:
    """Each kernel that supports the config, for whole rows and for windows; what auto takes, and what is fastest."""
    task, dtype, device = session.task(), session.config.model.dtype, jax.local_devices()[0]
    config, windows, seconds = task.module.config, task.module.windows(), dict.fromkeys(NAMES, 0.0)  # of all layers
    if session.config.model.implementation == "transformers":
        yield Result("attention", "transformers' own class computes it, without a kernel of mlm's")
        return
    for window in dict.fromkeys(windows):
        programs, of = {}, f", windows of {window} to each side" if window else ""
        few = _arrays(task, window, COMPARED)
        arrays = few if device.platform == "cpu" else _arrays(task, window, TIMED)
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, few)
        with jax.default_matmul_precision("highest"):
            expected = jax.device_get(_both_ways(task, "xla", window)(*exact))
        for name in NAMES:
            if reason := attention.unsupported(name, config, task.info.length, task.mesh, dtype, window):
                yield Result(f"{name}{of}", f"does not support {reason}")
                seconds.pop(name, None)
                continue
            run = _both_ways(task, name, window)
            rounding = roundoff(dtype, device) + task.info.length**0.5 * 2.0**-24  # of a value, and of a float32 sum
            yield _compare(f"{name}{of}", run(*few), expected, rounding)
            if name != "fused" or device.platform == "tpu":  # elsewhere it is interpreted
                programs[name] = repeated(functools.partial(run, *arrays))
                programs[name](1)  # compiles
        rates = interleaved.measure("", programs, 0.0, calls=CALLS)
        times = {name: 1 / float(np.median(rates[name])) for name in programs}
        seconds = {name: seconds[name] + windows.count(window) * times[name] for name in times if name in seconds}
    auto = attention.choose("auto", config, length=task.info.length, mesh=task.mesh, dtype=dtype, window=max(windows))
    fastest, chosen = min(seconds, key=seconds.get, default=auto), session.config.model.attention
    session.numbers |= {"fastest": fastest, "attention": auto if chosen == "auto" else chosen}
    times = ", ".join(f"{name} {show_time(total)}" for name, total in seconds.items())
    of = f"{len(arrays[0])} rows of {task.info.length} tokens, {dtype}, both ways, all layers"
    values = {"auto": auto, "fastest": fastest, "seconds": seconds}
    yield Result(f"model.attention=auto, {of}", f"takes {auto}; fastest here is {fastest} ({times})", values=values)


def _arrays(task: Pretraining, window: int, scores: int) -> tuple[Any, ...]:
    """Returns queries, keys, values, segments, dropout's mask, rotation and the gradient of the context."""
    config, info, mesh, dtype = task.module.config, task.info, task.mesh.shape, jnp.dtype(task.config.model.dtype)
    rows = task.config.data.global_batch // (mesh["data"] * mesh["fsdp"])
    rows = max(1, min(rows, scores // (config.num_attention_heads // mesh["tensor"] * info.length**2)))
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
    mesh, isolated = one_device(jax.local_devices()[0]), task.config.data.isolate_documents
    heads = task.module.config.num_attention_heads // task.mesh.shape["tensor"]
    attend = attention.make_kernel(name, heads=heads, mesh=mesh, isolated=isolated, window=window)

    @jax.jit
    def run(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, grad_BxLxH):
        real_BxLx1 = (segments_BxL > 0)[..., None]  # what padding reads means nothing
        rest = segments_BxL, dropout_mask_LxL, rotation
        context_BxLxH, pull = jax.vjp(lambda *qkv: attend(*qkv, *rest), q_BxLxH, k_BxLxH, v_BxLxH)
        return jnp.where(real_BxLx1, context_BxLxH, 0), *pull(jnp.where(real_BxLx1, grad_BxLxH, 0))

    return run


def _compare(what: str, outputs: Any, expected: Any, rounding: float) -> Result:
    """Compares the largest error with the largest value, and the mean error with the mean value."""
    errors, limits = {}, {"largest": ROUNDINGS * rounding, "mean": ROUNDINGS**0.5 * rounding}
    for name, output, right in zip(OUTPUTS, outputs, expected, strict=True):
        error = abs(np.asarray(output, np.float32) - right)
        errors["largest", name] = float(error.max() / abs(right).max())
        errors["mean", name] = float(error.mean() / abs(right).mean())
    excess = {key: np.nan_to_num(error, nan=np.inf) / limits[key[0]] for key, error in errors.items()}
    worst = max(excess, key=excess.get)
    measured = f"{worst[0]} error of {worst[1]}: {errors[worst]:.2g} of its {worst[0]} value"
    expected = f"at most {limits['largest']:.2g}, of the mean {limits['mean']:.2g}, from float32 xla"
    values = {" error of ".join(key): error for key, error in errors.items()}
    return Result(what, measured, expected, bool(excess[worst] <= 1), values | {"limits": limits})


def roundoff(dtype: str, device: jax.Device) -> float:
    """Returns the relative error of a rounding in the products of a dtype.

    Those of float32 are of bfloat16 on a TPU, and of TF32 (10 bits) on a GPU, unless more precision is asked for.
    """
    if dtype == "float32" and device.platform == "gpu":
        return 2.0**-11
    return float(jnp.finfo("bfloat16" if device.platform == "tpu" else dtype).eps) / 2
