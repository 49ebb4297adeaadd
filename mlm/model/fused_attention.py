"""Pallas attention for TPU, one forward and one backward kernel, with windows, rotary positions and dropout.

Scores never leave the core. Heads stay side by side in the last axis, so no copy is needed: a kernel works on a block
of 128 entries of it (one head if that is larger). Scores are laid out keys x queries, so that the softmax reduces along
the short axis of the vector registers. A grid step covers several short rows, or one chunk of queries and one of keys.
With a window, both chunks are the same tokens, with a halo on each side, and tiles outside the window are skipped.
Without one, the grid runs over the chunks of keys with an online softmax (Dao et al., 2022, FlashAttention).

Dimensions: B rows, L tokens, H hidden size = heads x head size.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mlm.model.fused_kernels import LANES, Backward, Forward, Sizes, step

LONGEST = 8192  # tokens: the gradient of a row's queries stays in a core's memory, in float32
LONGEST_WITH_DROPOUT = 512  # tokens: so does the mask
# their matrix units take float32 from a kernel, and round it to bfloat16
ROUNDING = ("TPU v2", "TPU v3")
# MiB of VMEM that a kernel may use; else 16
MEMORY = {"TPU v5 lite": 48, "TPU v5": 48, "TPU v6 lite": 48, "TPU7x": 48}


def unsupported(
    kind: str, length: int, window: int, dropout: float, heads: int, head_size: int
) -> str | None:
    """Returns why the kernels can't run `heads` heads and such rows on a device of `kind`, None if they can."""
    hidden = heads * head_size
    chunk = chunk_tokens(kind)
    of_length = f"rows of {length} tokens"
    if length > LONGEST or length % LANES:
        return f"{of_length}, only multiples of {LANES} up to {LONGEST}"
    if kind in ROUNDING and length > chunk and not window:
        return f"{of_length} without a window on a {kind}, only up to {chunk}"
    if dropout > 0 and length > LONGEST_WITH_DROPOUT:
        return f"dropout (model.attention_dropout = {dropout}) in {of_length}, only up to {LONGEST_WITH_DROPOUT}"
    if window > LANES and length > chunk:
        return f"windows of {window} tokens to each side, only up to {LANES}"
    if LANES % head_size and head_size != 2 * LANES:
        return f"heads of {head_size}, only sizes that divide {LANES}, and {2 * LANES}"
    if hidden > LANES and hidden % LANES:
        return f"{heads} heads of {head_size} on a device, only a total of up to {LANES} or multiples of it"
    room = 4 if kind in MEMORY else 2
    if kind.startswith("TPU") and (together := width_of(hidden, heads) // head_size) > room:
        return f"{together} heads of {head_size} at a time on a {kind}, whose cores have room for {room}"
    return None


def sizes(kind: str, length: int, window: int, rows: int) -> Sizes:
    """Returns the sizes for `rows` rows of `length` tokens."""
    chunk = max(size for size in range(LANES, chunk_tokens(kind) + 1, LANES) if length % size == 0)
    steps = length // chunk
    together = math.gcd(rows, max(1, (512 if kind in ROUNDING else 1024) // length))
    if not window:
        return Sizes(together, chunk, math.gcd(chunk, 512), 0, steps, steps)
    return Sizes(together, chunk, LANES, LANES if steps > 1 else 0, steps, 1)


def chunk_tokens(kind: str) -> int:
    """Returns how many tokens a chunk has at most."""
    return 1024 if kind in MEMORY else 512


class Settings(NamedTuple):
    """What the kernels are compiled for."""

    heads: int  # on the device
    isolated: bool
    window: int
    kind: str  # of the device; on anything but a TPU the kernels are interpreted, for tests


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, settings: Settings):
    """An `attention.Attention`."""
    arrays = (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation)
    return _call(arrays, (), settings)[0]


def _forward(*args):
    *arrays, settings = args
    outputs = _call(arrays, (), settings)
    return outputs[0], (arrays, outputs)


def _backward(settings, saved, grad):
    arrays, outputs = saved
    grads = _call(arrays, (*outputs, grad), settings)
    return (*grads, None, *jax.tree.map(jnp.zeros_like, arrays[4:]))


attend.defvjp(_forward, _backward)


def width_of(hidden: int, heads: int) -> int:
    """Returns W, the entries of H in a block: LANES or one head, whichever is larger; all of H if not whole lanes."""
    return max(LANES, hidden // heads) if hidden % LANES == 0 else hidden


def _call(arrays: Sequence, saved: tuple, settings: Settings) -> list[Array]:
    """Runs the backward kernel if it is given the forward kernel's outputs and their gradient, else the forward one."""
    q, k, v, segments_BxL, dropout_mask_LxL, rotation = arrays
    heads, isolated, window, kind = settings
    rows, length, hidden = q.shape
    is_backward = bool(saved)
    width = width_of(hidden, heads)
    size = sizes(kind, length, window, rows)
    operand = jnp.dtype(jnp.float32) if kind in ROUNDING else q.dtype
    blocks = hidden // width
    together = width * heads // hidden
    # The grid is ordered so that blocks are reused in VMEM: `order` has its axes of rows, blocks of H, queries, keys.
    if window:
        grid = (rows // size.rows, size.steps, blocks)
        order = (0, 2, 1, 1)
    else:
        grid = (rows // size.rows, blocks, size.steps, size.steps)
        order = (0, 1, 3, 2) if is_backward else (0, 1, 2, 3)

    def specs(of_keys: bool, halo: int, axes: dict[str, int | None]) -> list[pl.BlockSpec]:
        """Returns the specs of a chunk, with a halo of those before and after it too, for an array with these axes.

        A block has its part of the axes "rows", "H" and "tokens", and all of the others.
        """

        def spec(tokens: int, chunk_index: Callable) -> pl.BlockSpec:
            def block_index(*point: Array) -> tuple[Array | int, ...]:
                row, block, *chunks = (point[axis] for axis in order)
                places = {"rows": row, "H": block, "tokens": chunk_index(chunks[of_keys])}
                return tuple(places.get(axis, 0) for axis in axes)

            return pl.BlockSpec(tuple((axes | {"tokens": tokens}).values()), block_index)

        whole = spec(size.chunk, lambda c: c)
        if not halo:
            return [whole]
        halos = size.chunk // halo
        last = length // halo - 1
        before = spec(halo, lambda c: jnp.maximum(c * halos - 1, 0))
        return [before, whole, spec(halo, lambda c: jnp.minimum((c + 1) * halos, last))]

    of_queries = functools.partial(specs, False, size.halo * is_backward)
    of_keys = functools.partial(specs, True, size.halo)
    x = {"rows": size.rows, "tokens": 0, "H": width}
    q_spec = of_queries(x)
    k_spec = of_keys(x)
    stats_spec = of_queries({"rows": size.rows, "H": None, "heads": together, "tokens": 0})
    query_spec = of_queries({"rows": size.rows, "one": 1, "tokens": 0}) if isolated else []
    mask_spec = []
    if dropout_mask_LxL is not None:  # only in rows of one chunk, so a step sees all of L
        dropout_mask_LxL = dropout_mask_LxL.astype(operand)[None]
        mask_spec = [pl.BlockSpec(dropout_mask_LxL.shape, lambda *_: (0, 0, 0))]
    inputs = [(q, q_spec), (k, k_spec), (v, k_spec)]
    inputs += [(segments_BxL[:, :, None], of_keys({"rows": size.rows, "tokens": 0, "one": 1}))]
    inputs += [(segments_BxL[:, None, :], query_spec), (dropout_mask_LxL, mask_spec)]
    for specs_of in (of_queries, of_keys):
        for angles in rotation or (None, None):
            if angles is None:
                inputs.append((None, []))
                continue
            count, _, half = angles.shape
            # one row of angles is shared by all rows
            axis = ("rows", size.rows) if count > 1 else ("all", 1)
            spec = specs_of(dict([axis, ("half", half), ("tokens", 0)]))
            inputs.append((angles.swapaxes(1, 2), spec))
    x_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if is_backward:
        inputs += zip(saved, (q_spec, stats_spec, q_spec), strict=True)
        last = size.key_steps - 1

        def dq_index(*point: Array) -> tuple[Array, ...]:
            # a chunk is written once its gradient is complete
            row, block, q_chunk, k_chunk = (point[axis] for axis in order)
            return row, q_chunk if window else jnp.where(k_chunk < last, 0, q_chunk), block

        dq_spec = pl.BlockSpec((size.rows, size.chunk, width), dq_index)
        out_specs = [dq_spec, *specs(True, 0, x) * 2]
        out_shape = [x_shape] * 3
        scratch = [] if size.is_one else [(size.chunk + 2 * size.halo, width)] * 2
        scratch += [(width, length)] if size.key_steps > 1 else []
    else:
        out_specs = q_spec + stats_spec
        out_shape = [x_shape, jax.ShapeDtypeStruct((rows, blocks, together, length), jnp.float32)]
        sums = [(entries, size.chunk) for entries in (width, together, together)]
        scratch = sums if size.key_steps > 1 else []
    kernel = Backward if is_backward else Forward
    rotated = "" if rotation is None else "_rotated"
    # What XLA, which can't look into a kernel, and `plan` are told: the work that the scores take. With a window, a
    # query reads its tile and a halo on both sides.
    keys_read = min(length, LANES + 2 * LANES) if window else length
    products = 5 if is_backward else 2  # of queries and keys, each as long as a head
    cost = pl.CostEstimate(
        flops=2 * products * rows * length * keys_read * hidden,
        transcendentals=rows * heads * length * keys_read,
        bytes_accessed=2 * (7 if is_backward else 4) * rows * length * hidden,
    )
    call = pl.pallas_call(
        functools.partial(
            step,
            kernel=kernel,
            head_size=hidden // heads,
            window=window,
            size=size,
            operand=operand,
        ),
        name=f"fused_attention_{kernel.__name__.lower()}_{window}{rotated}",
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((size.rows, *shape), jnp.float32) for shape in scratch],
        interpret=not kind.startswith("TPU"),
        cost_estimate=cost,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 2 + ("arbitrary",) * (len(grid) - 2),
            vmem_limit_bytes=MEMORY.get(kind, 16) * 2**20,
        ),
    )
    return call(*([array] * len(spec) for array, spec in inputs))
