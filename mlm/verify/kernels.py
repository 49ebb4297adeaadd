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
from mlm.model.keys import make_key
from mlm.tasks.pretraining import Pretraining
from mlm.verify.session import Result, Session, made_up_rows, one_device, show_time

NAMES = ("xla", "fused", "cudnn")
SCORES, SCORES_CPU, CALLS = 2**28, 2**24, 10  # scores of a call at most, of all rows and heads; calls of a timing
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
        arrays = _arrays(task, window, SCORES_CPU if device.platform == "cpu" else SCORES)
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, arrays)
        with jax.default_matmul_precision("highest"):
            expected = jax.device_get(_both_ways(task, "xla", window)(*exact))
        for name in NAMES:
            if reason := attention.unsupported(
                name, config, length=task.info.length, window=window, mesh=task.mesh, dtype=dtype
            ):
                yield Result(f"{name}{of}", f"does not support {reason}")
                seconds.pop(name, None)
                continue
            run = functools.partial(_both_ways(task, name, window), *arrays)
            rounding = roundoff(dtype, device) + task.info.length**0.5 * 2.0**-24  # of a value, and of a float32 sum
            yield _compare(f"{name}{of}", run(), expected, rounding)
            if name != "fused" or device.platform == "tpu":  # elsewhere it is interpreted
                programs[name] = repeated(run)
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
    q, k, v, grad = (jax.random.normal(make_key(number), shape, dtype) for number in range(4))
    if rate := attention.dropout_rate(config):
        dropout = layers.dropout(jnp.ones((1, info.length, info.length), dtype), rate, jnp.uint32(1))[0]
    rotations = described.positions if isinstance(described.positions, dict) else {}
    rotation = rotations.get("local" if window else "global")
    return q, k, v, described.segments_BxL, dropout, rotation, grad


def _both_ways(task: Pretraining, name: str, window: int) -> Callable[..., Any]:
    """Returns a jitted function of `_arrays`: the context, and the gradients of queries, keys and values."""
    mesh, isolated = one_device(jax.local_devices()[0]), task.config.data.isolate_documents
    heads = task.module.config.num_attention_heads // task.mesh.shape["tensor"]
    attend = functools.partial(attention.KERNELS[name], heads=heads, window=window, isolated=isolated, mesh=mesh)

    @jax.jit
    def run(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, grad_BxLxH):
        real_BxLx1 = (segments_BxL > 0)[..., None]  # what padding reads means nothing

        def context(*qkv):
            return attend(*qkv, segments_BxL, dropout_mask_LxL=dropout_mask_LxL, rotation=rotation)

        context_BxLxH, pull = jax.vjp(context, q_BxLxH, k_BxLxH, v_BxLxH)
        return jnp.where(real_BxLx1, context_BxLxH, 0), *pull(jnp.where(real_BxLx1, grad_BxLxH, 0))

    return run


def _compare(what: str, outputs: Any, expected: Any, rounding: float) -> Result:
    """Compares the largest error with the largest value, and the mean error with the mean value."""
    errors, limits = {}, (("largest", np.max, ROUNDINGS * rounding), ("mean", np.mean, ROUNDINGS**0.5 * rounding))
    for name, output, right in zip(OUTPUTS, outputs, expected, strict=True):
        for kind, of, limit in limits:
            error = of(abs(np.asarray(output, np.float32) - right)) / of(abs(right))
            errors[f"{kind} error of {name}"] = float(np.nan_to_num(error, nan=np.inf)), limit
    worst = max(errors, key=lambda name: errors[name][0] / errors[name][1])
    error, limit = errors[worst]
    allowed = f"at most {limit:.2g} of the {worst.partition(' ')[0]} value, beside float32 xla"
    return Result(what, f"{worst}: {error:.2g}", allowed, error <= limit, {"errors_and_limits": errors})


def roundoff(dtype: str, device: jax.Device) -> float:
    """Returns the error of a rounding in products: of float32 it is bfloat16's on a TPU, and TF32's on a GPU."""
    bits = {"cpu": 24, "gpu": 11}.get(device.platform, 8)
    return 2.0 ** -(8 if dtype == "bfloat16" else bits)
