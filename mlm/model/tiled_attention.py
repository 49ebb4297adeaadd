"""Attention of long rows and of windows, as one Pallas kernel forward and one backward, with rotary positions inside.

As in fused_attention.py, scores are keys x queries, and heads lie side by side in blocks of H. A step of the grid has a
chunk of queries and one of keys. With a window these are the same tokens and a halo on both sides, and only tiles of
the scores that the window touches are computed; without one the chunks of keys follow each other, with an online
softmax (Dao et al., 2022, FlashAttention).

Dimensions: B rows, L tokens, H hidden size = heads x head size.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mlm.model import fused_attention
from mlm.model.fused_attention import LANES, ROUNDING, width_of
from mlm.model.tiled_kernels import Sizes, backward_kernel, forward_kernel

LONGEST = 8192  # tokens: the gradient of a row's queries stays in a core's memory, in float32
MEMORY = {"TPU v5 lite": 48, "TPU v5": 48, "TPU v6 lite": 48, "TPU7x": 48}  # MB that a kernel may use; else 16


def unsupported(kind: str, length: int, window: int, heads: int, head_size: int) -> str | None:
    """Returns what the kernels can't do, None if they can."""
    if length > LONGEST or length % LANES:
        return f"rows of {length} tokens, only multiples of {LANES} up to {LONGEST}"
    if kind in ROUNDING and length > chunk_tokens(kind) and not window:
        return f"rows of {length} tokens without a window on a {kind}, only up to {chunk_tokens(kind)}"
    if window > LANES:
        return f"windows of {window} tokens to each side, only up to {LANES}"
    return fused_attention.unsupported_heads(heads, head_size)


def sizes(kind: str, length: int, window: int) -> Sizes:
    """Returns the sizes for rows of `length` tokens."""

    def divisor(most: int) -> int:
        return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)

    chunk = divisor(chunk_tokens(kind))
    steps = length // chunk
    if not window:
        return Sizes(chunk, chunk, math.gcd(chunk, 512), 0, steps, steps)
    return Sizes(chunk, chunk, LANES, LANES if steps > 1 else 0, steps, 1)


def chunk_tokens(kind: str) -> int:
    """Returns how many tokens a chunk has, if it divides the row."""
    return 1024 if kind in MEMORY else 512


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, heads, isolated, window, kind):
    """An `attention.Attention` without dropout; on anything but a TPU the kernels are interpreted, for tests."""
    arrays = q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation
    return _forward(*arrays, heads, isolated, window, kind)[0]


def _forward(q, k, v, segments_BxL, dropout_mask_LxL, rotation, heads, isolated, window, kind):
    inputs = (q, k, v, segments_BxL, rotation)
    outputs = _call(inputs, (), heads, isolated, window, kind)
    return outputs[0], (inputs, outputs)


def _backward(heads, isolated, window, kind, saved, grad):
    inputs, outputs = saved
    grads = _call(inputs, (*outputs, grad), heads, isolated, window, kind)
    return *grads, None, None, jax.tree.map(jnp.zeros_like, inputs[-1])


attend.defvjp(_forward, _backward)


def _specs(size: Sizes, length: int, at: Callable) -> Callable:
    """Returns `(of_keys, halo, shape, index) -> [specs]` of a chunk and its halos.

    They come from `shape(tokens)` and `index(row, block of H, chunk)`, and `at(*grid)` = (row, block, queries, keys).
    """

    def specs(of_keys: bool, halo: int, shape: Callable, index: Callable) -> list[pl.BlockSpec]:
        chunk = size.keys if of_keys else size.queries
        parts = [(chunk, lambda c: c)]
        if halo:
            per, last = chunk // halo, length // halo - 1
            before, after = lambda c: jnp.maximum(c * per - 1, 0), lambda c: jnp.minimum((c + 1) * per, last)
            parts = [(halo, before), *parts, (halo, after)]

        def spec(tokens: int, place: Callable) -> pl.BlockSpec:
            return pl.BlockSpec(shape(tokens), lambda *g: index(*at(*g)[:2], place(at(*g)[2 + of_keys])))

        return [spec(*part) for part in parts]

    return specs


def _grid(size: Sizes, rows: int, blocks: int, window: int, backward: bool) -> tuple[tuple[int, ...], Callable]:
    """Returns the grid, in the order in which blocks stay in memory longest, and `_specs`' `at`."""
    if window:
        return (rows, size.query_steps, blocks), lambda b, i, h: (b, h, i, i)
    if backward:
        return (rows, blocks, size.key_steps, size.query_steps), lambda b, h, j, i: (b, h, i, j)
    return (rows, blocks, size.query_steps, size.key_steps), lambda b, h, i, j: (b, h, i, j)


def _call(inputs: tuple, backward_inputs: tuple, heads: int, isolated: bool, window: int, kind: str) -> list[Array]:
    """Runs the backward kernel if it is given the forward kernel's outputs and their gradient, else the forward one."""
    q, k, v, segments_BxL, rotation = inputs
    (rows, length, hidden), backward = q.shape, bool(backward_inputs)
    width, size = width_of(hidden, heads), sizes(kind, length, window)
    blocks, together, half = hidden // width, width * heads // hidden, hidden // heads // 2
    grid, at = _grid(size, rows, blocks, window, backward)
    specs, halo, q_halo = _specs(size, length, at), size.halo, size.halo * backward
    x = lambda n: (None, n, width), lambda b, h, c: (b, c, h)
    stats = lambda n: (None, None, together, n), lambda b, h, c: (b, h, 0, c)
    q_spec, k_spec, stats_spec = specs(False, q_halo, *x), specs(True, halo, *x), specs(False, q_halo, *stats)
    key_spec = specs(True, halo, lambda n: (None, n, 1), lambda b, h, c: (b, c, 0))
    query_spec = specs(False, q_halo, lambda n: (None, 1, n), lambda b, h, c: (b, 0, c)) if isolated else []
    inputs = [(q, q_spec), (k, k_spec), (v, k_spec), (segments_BxL[:, :, None], key_spec)]
    inputs += [(segments_BxL[:, None, :], query_spec)]
    for of_keys, own in ((False, q_halo), (True, halo)):
        if rotation is None:
            inputs += [(None, [])] * 2
            continue
        each = int(len(rotation[0]) > 1)  # 0 if all rows share the angles
        place = specs(of_keys, own, lambda n: (None, half, n), lambda b, h, c, each=each: (b * each, 0, c))
        inputs += [(angles.swapaxes(1, 2), place) for angles in rotation]
    x_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if backward:
        inputs += zip(backward_inputs, (q_spec, stats_spec, q_spec), strict=True)
        own, last = specs(True, 0, *x), size.key_steps - 1

        def dq_index(*g: Array) -> tuple[Array, ...]:
            row, block, q_chunk, k_chunk = at(*g)  # a chunk is written once its gradient is complete
            return row, q_chunk if window else jnp.where(k_chunk < last, 0, q_chunk), block

        out_specs, out_shape = [pl.BlockSpec(x[0](size.queries), dq_index), *own, *own], [x_shape] * 3
        scratch = [(size.keys + 2 * halo, width)] * 2 + [(width, length)] * (size.key_steps > 1)
    else:
        out_specs = specs(False, 0, *x) + stats_spec
        out_shape = [x_shape, jax.ShapeDtypeStruct((rows, blocks, together, length), jnp.float32)]
        scratch = [(n, size.queries) for n in (width, together, together)] * (size.key_steps > 1)
    operand = jnp.dtype(jnp.float32) if kind in ROUNDING else q.dtype
    settings = {"head_size": 2 * half, "window": window, "size": size, "operand": operand}
    call = pl.pallas_call(
        functools.partial(backward_kernel if backward else forward_kernel, **settings),
        name=f"tiled_attention_{'backward' if backward else 'forward'}_{window}",  # as plan reads it
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        interpret=not kind.startswith("TPU"),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=MEMORY.get(kind, 16) * 2**20),
    )
    return call(*([array] * len(spec) for array, spec in inputs))
