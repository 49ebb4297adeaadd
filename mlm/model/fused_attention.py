"""Attention of rows short enough for a TPU core's own memory, as one Pallas kernel forward and one backward.

The scores of a row never leave the core. Heads stay side by side in the last axis, without a copy: a kernel works on
128 entries of it. Scores are keys x queries: the softmax reduces along the vector registers' short axis.

Dimensions: B rows, L tokens, H hidden size = heads x head size, W entries of H in a block, N heads in a block.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LONGEST = 512  # tokens: above, the backward kernel's scores do not fit into a core's 16 MB
LANES = 128
ROUNDING = ("TPU v2", "TPU v3")  # their matrix units take float32 from a kernel, and round it to bfloat16
MASK_VALUE = -1e30

NT = (((1,), (1,)), ((), ()))  # x @ y.T
NN = (((1,), (0,)), ((), ()))  # x @ y


def unsupported(kind: str, length: int, heads: int, head_size: int) -> str | None:
    """Returns what does not fit into a core's memory in bfloat16, isolated and with dropout; None if all does."""
    if length > LONGEST or length % LANES:
        return f"rows of {length} tokens, only multiples of {LANES} up to {LONGEST}"
    if reason := unsupported_heads(heads, head_size):
        return reason
    if kind in ROUNDING and (together := width_of(heads * head_size, heads) // head_size) > 2:
        return f"{together} heads of {head_size} at a time on a {kind}, whose cores have room for 2"
    return None


def unsupported_heads(heads: int, head_size: int) -> str | None:
    """Returns what of the heads on a device does not fit into blocks of lanes, None if all does."""
    hidden = heads * head_size
    if LANES % head_size and head_size != 2 * LANES:
        return f"heads of {head_size}, only sizes that divide {LANES}, and {2 * LANES}"
    if hidden > LANES and hidden % LANES:
        return f"{heads} heads of {head_size} on a device, only a total of up to {LANES} or multiples of it"
    return None


def block_tokens(kind: str) -> int:
    """Returns how many tokens one call of a kernel works on at most, if that is at least a row."""
    return 512 if kind in ROUNDING else 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, heads, isolated, window, kind):
    """An `attention.Attention` for a device of `kind`; on anything but a TPU the kernels are interpreted, for tests."""
    return _forward(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, heads, isolated, window, kind)[0]


def _forward(q, k, v, segments_BxL, dropout_mask_LxL, heads, isolated, window, kind):
    inputs = (q, k, v, segments_BxL, dropout_mask_LxL)
    outputs = _call(inputs, (), heads, isolated, window, kind)
    return outputs[0], (inputs, outputs)


def _backward(heads, isolated, window, kind, saved, grad):
    inputs, outputs = saved
    grads = _call(inputs, (*outputs, grad), heads, isolated, window, kind)
    return *grads, None, jax.tree.map(jnp.zeros_like, inputs[-1])  # of the dropout mask, if there is one


attend.defvjp(_forward, _backward)


def width_of(hidden: int, heads: int) -> int:
    """Returns W: whole heads, and whole lanes where H has them."""
    return max(LANES, hidden // heads) if hidden % LANES == 0 else hidden


def _call(inputs: tuple, backward_inputs: tuple, heads: int, isolated: bool, window: int, kind: str) -> list[Array]:
    """Runs the backward kernel if it is given the forward kernel's outputs and their gradient, else the forward one."""
    q, k, v, segments_BxL, dropout_mask_LxL = inputs
    rows, length, hidden = q.shape
    width = width_of(hidden, heads)
    together = math.gcd(rows, max(1, block_tokens(kind) // length))
    grid = (rows // together, hidden // width)
    operand = jnp.dtype(jnp.float32) if kind in ROUNDING else q.dtype
    x = pl.BlockSpec((together, length, width), lambda b, h: (b, 0, h))
    keys = pl.BlockSpec((together, length, 1), lambda b, h: (b, 0, 0))
    queries = pl.BlockSpec((together, 1, length), lambda b, h: (b, 0, 0)) if isolated else None
    mask = None if dropout_mask_LxL is None else pl.BlockSpec((length, length), lambda b, h: (0, 0))
    stats = pl.BlockSpec((together, 1, width * heads // hidden, length), lambda b, h: (b, h, 0, 0))
    x_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    stats_shape = jax.ShapeDtypeStruct((rows, grid[1], *stats.block_shape[2:]), jnp.float32)
    backward = bool(backward_inputs)
    kernel = _backward_kernel if backward else _forward_kernel
    call = pl.pallas_call(
        functools.partial(kernel, head_size=hidden // heads, operand=operand, window=window),
        name=f"fused_attention_{'backward' if backward else 'forward'}",
        grid=grid,
        in_specs=[x, x, x, keys, queries, mask] + ([x, stats, x] if backward else []),
        out_specs=[x, x, x] if backward else [x, stats],
        out_shape=[x_shape, x_shape, x_shape] if backward else [x_shape, stats_shape],
        interpret=not kind.startswith("TPU"),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )
    segments = segments_BxL[:, :, None], segments_BxL[:, None, :] if isolated else None
    if dropout_mask_LxL is not None:
        dropout_mask_LxL = dropout_mask_LxL.astype(operand)
    return call(q, k, v, *segments, dropout_mask_LxL, *backward_inputs)


def dot(x: Array, y: Array, dims: tuple, precision: lax.Precision | None = None) -> Array:
    """Returns the product of two matrices in float32."""
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def lanes_of(head: int, head_size: int, width: int) -> Array:
    """Returns which entries of a block are a head's, bool, [1, W]."""
    lane = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    return (lane >= head * head_size) & (lane < (head + 1) * head_size)


def _bias(key_ref, query_ref, row: int, window: int) -> Array:
    """Returns what is added to the scores: 0 or MASK_VALUE, keys x queries, or keys x 1 if all queries share it."""
    key_Lx1 = key_ref[row]
    allowed = key_Lx1 > 0
    if query_ref is not None:
        allowed = allowed & (key_Lx1 == query_ref[row])
    if window:
        length = key_ref.shape[1]
        key, query = (lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in range(2))
        allowed = allowed & (jnp.abs(key - query) <= window)
    return jnp.where(allowed, 0.0, MASK_VALUE)


def _forward_kernel(*refs, head_size, operand, window):
    q_ref, k_ref, v_ref, key_ref, query_ref, mask_ref, out_ref, logsumexp_ref = refs
    width = q_ref.shape[-1]
    for row in range(q_ref.shape[0]):
        q_LxW, k_LxW, v_LxW = (ref[row].astype(operand) for ref in (q_ref, k_ref, v_ref))
        v_WxL = v_LxW.T
        bias = _bias(key_ref, query_ref, row, window)
        out, logsumexps = [], []
        for head in range(width // head_size):
            lanes = lanes_of(head, head_size, width)
            scores_LxL = dot(jnp.where(lanes, k_LxW, 0), q_LxW, NT) * (1 / math.sqrt(head_size)) + bias
            largest_1xL = jnp.max(scores_LxL, axis=0, keepdims=True)
            exp_LxL = jnp.exp(scores_LxL - largest_1xL)
            total_1xL = jnp.sum(exp_LxL, axis=0, keepdims=True)
            exp_LxL = exp_LxL.astype(operand)
            if mask_ref is not None:
                exp_LxL = exp_LxL * mask_ref[...]
            head_v_DxL = v_WxL[head * head_size : (head + 1) * head_size]
            out.append(dot(head_v_DxL, exp_LxL, NN) * (1 / total_1xL))
            logsumexps.append(largest_1xL + jnp.log(total_1xL))
        out_ref[row] = jnp.concatenate(out, axis=0).T.astype(out_ref.dtype)
        logsumexp_ref[row, 0] = jnp.concatenate(logsumexps, axis=0)


def _backward_kernel(*refs, head_size, operand, window):
    q_ref, k_ref, v_ref, key_ref, query_ref, mask_ref, out_ref, logsumexp_ref, grad_ref, dq_ref, dk_ref, dv_ref = refs
    width = q_ref.shape[-1]
    heads, scale = width // head_size, 1 / math.sqrt(head_size)
    for row in range(q_ref.shape[0]):
        q_LxW, k_LxW, v_LxW, grad_LxW = (ref[row].astype(operand) for ref in (q_ref, k_ref, v_ref, grad_ref))
        k_WxL = k_LxW.T
        bias = _bias(key_ref, query_ref, row, window)
        lanes_NxW = [lanes_of(head, head_size, width).astype(jnp.float32) for head in range(heads + -heads % 8)]
        lanes_NxW = jnp.concatenate(lanes_NxW, axis=0)
        product_LxW = grad_LxW.astype(jnp.float32) * out_ref[row].astype(jnp.float32)
        inner_NxL = dot(lanes_NxW, product_LxW, NT, lax.Precision.HIGHEST)  # of the gradient with the output
        dq, dk, dv = [], 0.0, 0.0
        for head in range(heads):
            lanes = lanes_of(head, head_size, width)
            scores_LxL = dot(jnp.where(lanes, k_LxW, 0), q_LxW, NT) * scale + bias
            probs_LxL = jnp.exp(scores_LxL - logsumexp_ref[row, 0, head : head + 1])
            d_probs_LxL = dot(jnp.where(lanes, v_LxW, 0), grad_LxW, NT)
            dropped_LxL = probs_LxL.astype(operand)
            if mask_ref is not None:
                mask_LxL = mask_ref[...]
                dropped_LxL = dropped_LxL * mask_LxL
                d_probs_LxL = d_probs_LxL * mask_LxL.astype(jnp.float32)
            d_scores_LxL = (probs_LxL * (d_probs_LxL - inner_NxL[head : head + 1]) * scale).astype(operand)
            dv = jnp.where(lanes, dot(dropped_LxL, grad_LxW, NN), dv)
            dk = jnp.where(lanes, dot(d_scores_LxL, q_LxW, NN), dk)
            dq.append(dot(k_WxL[head * head_size : (head + 1) * head_size], d_scores_LxL, NN))
        dq_ref[row] = jnp.concatenate(dq, axis=0).T.astype(dq_ref.dtype)
        dk_ref[row] = dk.astype(dk_ref.dtype)
        dv_ref[row] = dv.astype(dv_ref.dtype)
