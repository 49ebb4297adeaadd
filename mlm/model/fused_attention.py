"""Attention of rows short enough for a TPU core's own memory, as one Pallas kernel forward and one backward.

The scores of a row never leave the core: at length 512 the compiler's plain attention moves them through the main
memory eight times. Heads stay where the projections put them, side by side in the last axis: a kernel works on 128 of
its entries (two heads of 64) and needs no copy into another layout. Scores are kept transposed, keys x queries, so that
what the softmax adds up lies along the vector registers' short axis and every row statistic is a row.

Dropout is transformers' (flax's `broadcast_dropout`): one mask of queries x keys for all rows and heads of a layer.

Dimensions: B rows, L tokens, H hidden size = heads x head size, W entries of H in a block, N heads in a block.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LONGEST = 512  # tokens: above, the backward kernel's scores do not fit into a core's 16 MB
LANES = 128
ROUNDING = ("TPU v2", "TPU v3")  # their matrix units take float32 from a kernel, and round it to bfloat16
FORBIDDEN = -1e30

_NT = (((1,), (1,)), ((), ()))  # x @ y.T
_NN = (((1,), (0,)), ((), ()))  # x @ y


def unsupported(kind: str, length: int, heads: int, head_size: int) -> str | None:
    """Returns what the kernels do not support of a model on a device of `kind`; None if they support it.

    What they support fits into a core's memory in bfloat16, isolated and with dropout, whatever the number of rows.
    """
    hidden = heads * head_size
    if length > LONGEST or length % LANES:
        return f"rows of {length} tokens, only multiples of {LANES} up to {LONGEST}"
    if LANES % head_size and head_size != 2 * LANES:
        return f"heads of {head_size}, only sizes that divide {LANES}, and {2 * LANES}"
    if hidden > LANES and hidden % LANES:
        return f"{heads} heads of {head_size} on a device, only a total of up to {LANES} or multiples of it"
    if kind in ROUNDING and (together := _width(hidden, heads) // head_size) > 2:
        return f"{together} heads of {head_size} at a time on a {kind}, whose cores have room for 2"
    return None


def block_tokens(kind: str) -> int:
    """Returns the tokens that one call of the kernels works on, at most; one row at least."""
    return 512 if kind in ROUNDING else 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def attend(
    q_BxLxH: jax.Array,
    k_BxLxH: jax.Array,
    v_BxLxH: jax.Array,
    segments_BxL: jax.Array,
    keep_LxL: jax.Array | None,
    heads: int,
    isolated: bool,
    kind: str,
) -> jax.Array:
    """Returns softmax(q k / sqrt(head size)) v, [B, L, H].

    Args:
      q_BxLxH, k_BxLxH, v_BxLxH: with the heads side by side in H.
      segments_BxL: int32, 0 for padding, which nothing attends to; else the token's document.
      keep_LxL: keys x queries, what the probabilities are multiplied by; None for no dropout.
      heads: their number.
      isolated: attend within a document only.
      kind: the device_kind that it is compiled for; on anything but a TPU it runs as plain jax, for tests.
    """
    return _forward(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, keep_LxL, heads, isolated, kind)[0]


def _forward(q, k, v, segments_BxL, keep_LxL, heads, isolated, kind):
    grid, specs = _layout(q, heads, isolated, keep_LxL, kind)
    operand = _operand(q.dtype, kind)
    kernel = functools.partial(_forward_kernel, head_size=q.shape[2] // heads, operand=operand)
    stats = jax.ShapeDtypeStruct((q.shape[0], grid[1], *specs["stats"].block_shape[2:]), jnp.float32)
    out, total = pl.pallas_call(
        kernel,
        name="fused_attention_forward",
        grid=grid,
        in_specs=[specs[name] for name in ("x", "x", "x", "key", "query", "keep")],
        out_specs=[specs["x"], specs["stats"]],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), stats],
        **_settings(kind),
    )(q, k, v, *_segments(segments_BxL, isolated), _cast(keep_LxL, operand))
    return out, (q, k, v, segments_BxL, keep_LxL, out, total)


def _backward(heads, isolated, kind, saved, grad):
    q, k, v, segments_BxL, keep_LxL, out, total = saved
    grid, specs = _layout(q, heads, isolated, keep_LxL, kind)
    operand = _operand(q.dtype, kind)
    kernel = functools.partial(_backward_kernel, head_size=q.shape[2] // heads, operand=operand)
    grads = pl.pallas_call(
        kernel,
        name="fused_attention_backward",
        grid=grid,
        in_specs=[specs[name] for name in ("x", "x", "x", "key", "query", "keep", "x", "stats", "x")],
        out_specs=[specs["x"]] * 3,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)] * 3,
        **_settings(kind),
    )(q, k, v, *_segments(segments_BxL, isolated), _cast(keep_LxL, operand), out, total, grad)
    return *grads, None, None if keep_LxL is None else jnp.zeros_like(keep_LxL)


attend.defvjp(_forward, _backward)


def _operand(dtype: jnp.dtype, kind: str) -> jnp.dtype:
    """Returns the type in which the kernels hand numbers of `dtype` to a device's matrix unit."""
    return jnp.dtype(jnp.float32) if kind in ROUNDING else dtype


def _width(hidden: int, heads: int) -> int:
    """Returns the entries of H that one call of the kernels works on: whole heads, whole lanes where there are any."""
    return max(LANES, hidden // heads) if hidden % LANES == 0 else hidden


def _cast(x: jax.Array | None, dtype: jnp.dtype) -> jax.Array | None:
    return None if x is None else x.astype(dtype)


def _layout(q_BxLxH, heads, isolated, keep_LxL, kind):
    """Returns the grid, and the blocks by what they hold."""
    rows, length, hidden = q_BxLxH.shape
    width = _width(hidden, heads)
    together = math.gcd(rows, max(1, block_tokens(kind) // length))
    column = pl.BlockSpec((together, length, 1), lambda b, h: (b, 0, 0))
    line = pl.BlockSpec((together, 1, length), lambda b, h: (b, 0, 0))
    specs = {
        "x": pl.BlockSpec((together, length, width), lambda b, h: (b, 0, h)),
        "key": column,
        "query": line if isolated else None,
        "keep": None if keep_LxL is None else pl.BlockSpec((length, length), lambda b, h: (0, 0)),
        "stats": pl.BlockSpec((together, 1, width * heads // hidden, length), lambda b, h: (b, h, 0, 0)),
    }
    return (rows // together, hidden // width), specs


def _settings(kind: str) -> dict:
    """Returns how a kernel is compiled."""
    if not kind.startswith("TPU"):
        return {"interpret": True}
    return {"compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"))}


def _segments(segments_BxL: jax.Array, isolated: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns the documents of the keys, a column, and of the queries, a line, which `isolated` compares."""
    return segments_BxL[:, :, None], segments_BxL[:, None, :] if isolated else None


def _dot(x: jax.Array, y: jax.Array, dims: tuple, precision: lax.Precision | None = None) -> jax.Array:
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _own_lanes(head: int, head_size: int, width: int) -> jax.Array:
    lane = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    return (lane >= head * head_size) & (lane < (head + 1) * head_size)


def _bias(key_ref, query_ref, row: int) -> jax.Array:
    """Returns what is added to the scores, keys x queries (or keys x 1): 0, or FORBIDDEN."""
    key_Lx1 = key_ref[row]
    allowed = key_Lx1 > 0
    if query_ref is not None:
        allowed = allowed & (key_Lx1 == query_ref[row])
    return jnp.where(allowed, 0.0, FORBIDDEN)


def _forward_kernel(q_ref, k_ref, v_ref, key_ref, query_ref, keep_ref, out_ref, total_ref, *, head_size, operand):
    width = q_ref.shape[-1]
    for row in range(q_ref.shape[0]):
        q_LxW, k_LxW, v_LxW = (ref[row].astype(operand) for ref in (q_ref, k_ref, v_ref))
        v_WxL = v_LxW.T
        bias = _bias(key_ref, query_ref, row)
        out, totals = [], []
        for head in range(width // head_size):
            own = _own_lanes(head, head_size, width)
            scores_LxL = _dot(jnp.where(own, k_LxW, 0), q_LxW, _NT) * (1 / math.sqrt(head_size)) + bias
            largest_1xL = jnp.max(scores_LxL, axis=0, keepdims=True)
            share_LxL = jnp.exp(scores_LxL - largest_1xL)
            total_1xL = jnp.sum(share_LxL, axis=0, keepdims=True)
            share_LxL = share_LxL.astype(operand)
            if keep_ref is not None:
                share_LxL = share_LxL * keep_ref[...]
            mine = v_WxL[head * head_size : (head + 1) * head_size]
            out.append(_dot(mine, share_LxL, _NN) * (1 / total_1xL))
            totals.append(largest_1xL + jnp.log(total_1xL))
        out_ref[row] = jnp.concatenate(out, axis=0).T.astype(out_ref.dtype)
        total_ref[row, 0] = jnp.concatenate(totals, axis=0)


def _backward_kernel(
    q_ref,
    k_ref,
    v_ref,
    key_ref,
    query_ref,
    keep_ref,
    out_ref,
    total_ref,
    grad_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    *,
    head_size,
    operand,
):
    width = q_ref.shape[-1]
    heads, scale = width // head_size, 1 / math.sqrt(head_size)
    for row in range(q_ref.shape[0]):
        q_LxW, k_LxW, v_LxW, grad_LxW = (ref[row].astype(operand) for ref in (q_ref, k_ref, v_ref, grad_ref))
        k_WxL = k_LxW.T
        bias = _bias(key_ref, query_ref, row)
        lanes_NxW = [_own_lanes(head, head_size, width).astype(jnp.float32) for head in range(heads + -heads % 8)]
        lanes_NxW = jnp.concatenate(lanes_NxW, axis=0)
        product_LxW = grad_LxW.astype(jnp.float32) * out_ref[row].astype(jnp.float32)
        inner_NxL = _dot(lanes_NxW, product_LxW, _NT, lax.Precision.HIGHEST)  # of the gradient with the output
        dq, dk, dv = [], 0.0, 0.0
        for head in range(heads):
            own = _own_lanes(head, head_size, width)
            scores_LxL = _dot(jnp.where(own, k_LxW, 0), q_LxW, _NT) * scale + bias
            share_LxL = jnp.exp(scores_LxL - total_ref[row, 0, head : head + 1])
            d_share_LxL = _dot(jnp.where(own, v_LxW, 0), grad_LxW, _NT)
            kept_LxL = share_LxL.astype(operand)
            if keep_ref is not None:
                keep_LxL = keep_ref[...]
                kept_LxL = kept_LxL * keep_LxL
                d_share_LxL = d_share_LxL * keep_LxL.astype(jnp.float32)
            d_scores_LxL = (share_LxL * (d_share_LxL - inner_NxL[head : head + 1]) * scale).astype(operand)
            dv = jnp.where(own, _dot(kept_LxL, grad_LxW, _NN), dv)
            dk = jnp.where(own, _dot(d_scores_LxL, q_LxW, _NN), dk)
            dq.append(_dot(k_WxL[head * head_size : (head + 1) * head_size], d_scores_LxL, _NN))
        dq_ref[row] = jnp.concatenate(dq, axis=0).T.astype(dq_ref.dtype)
        dk_ref[row] = dk.astype(dk_ref.dtype)
        dv_ref[row] = dv.astype(dv_ref.dtype)
