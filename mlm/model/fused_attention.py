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
from collections.abc import Callable

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


def sizes(kind: str, length: int, window: int, rows: int = 1) -> Sizes:
    """Returns the sizes for `rows` rows of `length` tokens."""
    chunk = max(size for size in range(LANES, chunk_tokens(kind) + 1, LANES) if length % size == 0)
    steps = length // chunk
    together = math.gcd(rows, max(1, (512 if kind in ROUNDING else 1024) // length))
    if not window:
        return Sizes(together, chunk, chunk, math.gcd(chunk, 512), 0, steps, steps)
    return Sizes(together, chunk, chunk, LANES, LANES if steps > 1 else 0, steps, 1)


def chunk_tokens(kind: str) -> int:
    """Returns how many tokens a chunk has at most."""
    return 1024 if kind in MEMORY else 512


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def attend(
    q_BxLxH,
    k_BxLxH,
    v_BxLxH,
    segments_BxL,
    dropout_mask_LxL,
    rotation,
    heads,
    isolated,
    window,
    kind,
):
    """An `attention.Attention` for a device of `kind`; on anything but a TPU the kernels are interpreted, for tests."""
    arrays = q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation
    return _forward(*arrays, heads, isolated, window, kind)[0]


def _forward(*args):
    inputs = args[:6]
    settings = args[6:]
    outputs = _call(inputs, (), *settings)
    return outputs[0], (inputs, outputs)


def _backward(*args):
    *settings, (inputs, outputs), grad = args
    return (
        *_call(inputs, (*outputs, grad), *settings),
        None,
        *jax.tree.map(jnp.zeros_like, inputs[4:]),
    )


attend.defvjp(_forward, _backward)


def width_of(hidden: int, heads: int) -> int:
    """Returns W, the entries of H in a block: LANES or one head, whichever is larger; all of H if not whole lanes."""
    return max(LANES, hidden // heads) if hidden % LANES == 0 else hidden


def _parts(chunk: int, halo: int, length: int) -> list[tuple[int, Callable]]:
    """Returns [(tokens, chunk's index -> its index)] of a chunk; with a halo, of those before and after it as well."""
    if not halo:
        return [(chunk, lambda c: c)]
    halos_of_chunk = chunk // halo
    last_halo = length // halo - 1
    return [
        (halo, lambda c: jnp.maximum(c * halos_of_chunk - 1, 0)),
        (chunk, lambda c: c),
        (halo, lambda c: jnp.minimum((c + 1) * halos_of_chunk, last_halo)),
    ]


def _specs(size: Sizes, length: int, at: Callable) -> Callable:
    """Returns `(of_keys, halo, shape, index) -> [specs]` of a chunk and its halos.

    They come from `shape(tokens)` and `index(row, block of H, chunk)`, and `at(*grid)` = (row, block, queries, keys).
    """

    def specs(of_keys: bool, halo: int, shape: Callable, index: Callable) -> list[pl.BlockSpec]:
        def spec(tokens: int, chunk_index: Callable) -> pl.BlockSpec:
            def block_index(*grid: Array) -> tuple[Array, ...]:
                row, block, *chunks = at(*grid)
                return index(row, block, chunk_index(chunks[of_keys]))

            return pl.BlockSpec(shape(tokens), block_index)

        return [
            spec(*part) for part in _parts(size.keys if of_keys else size.queries, halo, length)
        ]

    return specs


def _grid(
    size: Sizes, rows: int, blocks: int, window: int, is_backward: bool
) -> tuple[tuple[int, ...], Callable]:
    """Returns the grid, ordered so that blocks are reused in VMEM, and the `at` of `_specs`."""
    if window:
        return (rows, size.query_steps, blocks), lambda b, i, h: (b, h, i, i)
    if is_backward:
        return (rows, blocks, size.key_steps, size.query_steps), lambda b, h, j, i: (b, h, i, j)
    return (rows, blocks, size.query_steps, size.key_steps), lambda b, h, i, j: (b, h, i, j)


def _call(
    inputs: tuple, saved: tuple, heads: int, isolated: bool, window: int, kind: str
) -> list[Array]:
    """Runs the backward kernel if it is given the forward kernel's outputs and their gradient, else the forward one."""
    q, k, v, segments_BxL, dropout_mask_LxL, rotation = inputs
    rows, length, hidden = q.shape
    is_backward = bool(saved)
    width = width_of(hidden, heads)
    size = sizes(kind, length, window, rows)
    operand = jnp.dtype(jnp.float32) if kind in ROUNDING else q.dtype
    blocks = hidden // width
    together = width * heads // hidden
    head_size = hidden // heads
    grid, at = _grid(size, rows // size.rows, blocks, window, is_backward)
    specs = _specs(size, length, at)
    halo = size.halo
    q_halo = size.halo * is_backward
    x = lambda n: (size.rows, n, width), lambda b, h, c: (b, c, h)
    stats = lambda n: (size.rows, None, together, n), lambda b, h, c: (b, h, 0, c)
    q_spec = specs(False, q_halo, *x)
    k_spec = specs(True, halo, *x)
    stats_spec = specs(False, q_halo, *stats)
    key_spec = specs(True, halo, lambda n: (size.rows, n, 1), lambda b, h, c: (b, c, 0))
    query_spec = (
        specs(False, q_halo, lambda n: (size.rows, 1, n), lambda b, h, c: (b, 0, c))
        if isolated
        else []
    )
    inputs = [(q, q_spec), (k, k_spec), (v, k_spec), (segments_BxL[:, :, None], key_spec)]
    inputs += [(segments_BxL[:, None, :], query_spec), (dropout_mask_LxL, [])]
    if dropout_mask_LxL is not None:  # only in rows of one chunk, so a step sees all of L
        spec = pl.BlockSpec((1, length, length), lambda *_: (0, 0, 0))
        inputs[-1] = dropout_mask_LxL.astype(operand)[None], [spec]
    inputs += _angles(rotation, specs, size, False, q_halo) + _angles(
        rotation, specs, size, True, halo
    )
    x_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if is_backward:
        inputs += zip(saved, (q_spec, stats_spec, q_spec), strict=True)
        key_grad_spec = specs(True, 0, *x)
        last = size.key_steps - 1

        def dq_index(*g: Array) -> tuple[Array, ...]:
            # a chunk is written once its gradient is complete
            row, block, q_chunk, k_chunk = at(*g)
            return row, q_chunk if window else jnp.where(k_chunk < last, 0, q_chunk), block

        out_specs = [pl.BlockSpec(x[0](size.queries), dq_index), *key_grad_spec * 2]
        out_shape = [x_shape] * 3
        scratch = [] if size.is_one else [(size.keys + 2 * halo, width)] * 2
        scratch += [(width, length)] if size.key_steps > 1 else []
    else:
        out_specs = specs(False, 0, *x) + stats_spec
        out_shape = [x_shape, jax.ShapeDtypeStruct((rows, blocks, together, length), jnp.float32)]
        scratch = (
            [(n, size.queries) for n in (width, together, together)] if size.key_steps > 1 else []
        )
    kernel = Backward if is_backward else Forward
    rotated = "" if rotation is None else "_rotated"
    call = pl.pallas_call(
        functools.partial(
            step, kernel=kernel, head_size=head_size, window=window, size=size, operand=operand
        ),
        name=f"fused_attention_{kernel.__name__.lower()}_{window}{rotated}",
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((size.rows, *shape), jnp.float32) for shape in scratch],
        interpret=not kind.startswith("TPU"),
        cost_estimate=cost_estimate(q.shape, heads, window, is_backward),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 2 + ("arbitrary",) * (len(grid) - 2),
            vmem_limit_bytes=MEMORY.get(kind, 16) * 2**20,
        ),
    )
    return call(*([array] * len(spec) for array, spec in inputs))


def cost_estimate(
    shape: tuple[int, int, int], heads: int, window: int, is_backward: bool
) -> pl.CostEstimate:
    """Returns what XLA, which can't look into a kernel, and `plan` are told of one: the work that the scores take."""
    rows, length, hidden = shape
    # of each query: its tile and a halo on both sides
    keys = min(length, LANES + 2 * LANES) if window else length
    products = 5 if is_backward else 2  # of queries and keys, each as long as a head
    return pl.CostEstimate(
        flops=2 * products * rows * length * keys * hidden,
        transcendentals=rows * heads * length * keys,
        bytes_accessed=2 * (7 if is_backward else 4) * rows * length * hidden,
    )


def _angles(
    rotation: tuple | None, specs: Callable, size: Sizes, of_keys: bool, halo: int
) -> list[tuple]:
    """Returns [(array, specs)] of cosines and sines."""
    if rotation is None:
        return [(None, [])] * 2
    rows, _, half = rotation[0].shape
    if rows > 1:
        spec = specs(of_keys, halo, lambda n: (size.rows, half, n), lambda b, h, c: (b, 0, c))
    else:  # all rows share the angles
        spec = specs(of_keys, halo, lambda n: (1, half, n), lambda b, h, c: (0, 0, c))
    return [(angles.swapaxes(1, 2), spec) for angles in rotation]
