"""Attention kernels beside plain float32 attention: forward and backward."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mlm.model import attention, layers
from mlm.model.keys import make_key
from mlm.tasks.pretraining import Pretraining
from mlm.verify.compare import Result, compare, roundoff
from mlm.verify.session import Session, made_up_rows, one_device

SCORES = 2**24  # of a call, of all rows and heads, at most
# That a value passes, of scores, probabilities, their gradients, products and the result
ROUNDINGS = 8


def check_kernels(session: Session) -> Iterator[Result]:
    """Each kernel that supports the config, for whole rows and for windows."""
    task = session.task()
    dtype = session.config.model.dtype
    length = task.info.length
    if session.config.model.implementation == "transformers":
        yield Result("attention", "transformers' own class computes it, without a kernel of mlm's")
        return
    # Of a value, and of a float32 sum
    rounding = roundoff(dtype, jax.local_devices()[0]) + length**0.5 * 2.0**-24
    for window in dict.fromkeys(task.module.windows()):
        arrays = _arrays(task, window)
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, arrays)
        with jax.default_matmul_precision("highest"):
            expected = jax.device_get(_both_ways(task, "xla", window)(*exact))
        for name in attention.KERNELS:
            what = f"kernel {name}" + (f", windows of {window} to each side" if window else "")
            reason = attention.unsupported(
                name, task.module.config, length=length, window=window, mesh=task.mesh, dtype=dtype
            )
            if reason:
                yield Result(what, f"does not support {reason}")
            else:
                yield compare(
                    what, _both_ways(task, name, window)(*arrays), expected, ROUNDINGS * rounding
                )


def _arrays(task: Pretraining, window: int) -> tuple[Any, ...]:
    """Returns queries, keys, values, segments, dropout's mask, rotation and the gradient of the context."""
    config = task.module.config
    length = task.info.length
    dtype = jnp.dtype(task.config.model.dtype)
    mesh = task.mesh.shape
    rows = task.config.data.global_batch // (mesh["data"] * mesh["fsdp"])
    rows = max(1, min(rows, SCORES // (config.num_attention_heads // mesh["tensor"] * length**2)))
    shape = (rows, length, config.hidden_size // mesh["tensor"])
    q, k, v, grad = (jax.random.normal(make_key(number), shape, dtype) for number in range(4))
    batch = made_up_rows(task)
    columns = (jnp.asarray(batch[name][-rows:]) for name in ("input_ids", "attention_mask"))
    described = task.module.make_rows(*columns, None, None, None)
    dropout_mask_LxL = None
    if rate := attention.dropout_rate(config):
        dropout_mask_LxL = layers.dropout(
            jnp.ones((1, length, length), dtype), rate, jnp.uint32(1)
        )[0]
    rotations = described.positions if isinstance(described.positions, dict) else {}
    rotation = rotations.get("local" if window else "global")
    return q, k, v, described.segments_BxL, dropout_mask_LxL, rotation, grad


def _both_ways(task: Pretraining, name: str, window: int) -> Callable[..., Any]:
    """Returns a jitted function of `_arrays`: the context, and the gradients of queries, keys and values."""
    mesh = one_device(jax.local_devices()[0])
    isolated = task.config.data.isolate_documents
    heads = task.module.config.num_attention_heads // task.mesh.shape["tensor"]
    attend = functools.partial(
        attention.KERNELS[name],
        heads=heads,
        window=window,
        isolated=isolated,
        mesh=mesh,
        padding=task.info.padding,
    )

    @jax.jit
    def run(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, grad_BxLxH):
        real_BxLx1 = (segments_BxL > 0)[..., None]  # what padding reads means nothing

        def context(*qkv):
            return attend(*qkv, segments_BxL, dropout_mask_LxL=dropout_mask_LxL, rotation=rotation)

        context_BxLxH, pull = jax.vjp(context, q_BxLxH, k_BxLxH, v_BxLxH)
        grads = pull(jnp.where(real_BxLx1, grad_BxLxH, 0))
        outputs = {"context": jnp.where(real_BxLx1, context_BxLxH, 0)}
        return outputs | {
            f"gradient of {name}": grad for name, grad in zip("qkv", grads, strict=True)
        }

    return run
