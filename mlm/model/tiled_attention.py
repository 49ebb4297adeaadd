"""Attention of long rows and of windows, as one Pallas kernel forward and one backward, with rotary positions inside.

As in fused_attention.py, scores are keys x queries, and heads lie side by side in blocks of H. A step of the grid has a
chunk of queries and one of keys. With a window these are the same tokens and a halo on both sides, and only tiles of
the scores that the window touches are computed; without one the chunks of keys follow each other, with an online
softmax (Dao et al., 2022, FlashAttention). The scores' units are those of 2^x: queries are scaled by log2(e) too.

Dimensions: B rows, L tokens, H hidden size = heads x D, W entries of H in a block, N heads in a block, Q queries and K
keys of a chunk, halos included, C queries of a tile and S the keys that they read.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mlm.model import fused_attention
from mlm.model.fused_attention import LANES, MASK_VALUE, NN, NT, ROUNDING, dot, lanes_of, width_of

LONGEST = 8192  # tokens: the gradient of a row's queries stays in a core's memory, in float32
ALIGNED = 32  # keys: where the keys of a tile may start
MEMORY = {"TPU v5 lite": 48, "TPU v5": 48, "TPU v6 lite": 48, "TPU7x": 48}  # MB that a kernel may use; else 16


class Sizes(NamedTuple):
    """Tokens of a step of the grid, of a tile and of a halo; steps along queries and keys."""

    queries: int
    keys: int
    tile: int
    halo: int
    query_steps: int
    key_steps: int


def unsupported(length: int, window: int, heads: int, head_size: int) -> str | None:
    """Returns what the kernels can't do, None if they can."""
    if length > LONGEST or length % LANES:
        return f"rows of {length} tokens, only multiples of {LANES} up to {LONGEST}"
    if window > LANES:
        return f"windows of {window} tokens to each side, only up to {LANES}"
    return fused_attention.unsupported_heads(heads, head_size)


def sizes(kind: str, length: int, window: int) -> Sizes:
    """Returns the sizes for rows of `length` tokens."""

    def divisor(most: int) -> int:
        return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)

    room = 1024 if kind in MEMORY else 512
    if not window:
        queries, keys = divisor(room // 2), divisor(room)
        tile = 2 * LANES if queries % (2 * LANES) == 0 else LANES
        return Sizes(queries, keys, tile, 0, length // queries, length // keys)
    chunk = divisor(room)
    return Sizes(chunk, chunk, LANES, LANES if chunk < length else 0, length // chunk, 1)


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


def _call(inputs: tuple, backward_inputs: tuple, heads: int, isolated: bool, window: int, kind: str) -> list[Array]:
    """Runs the backward kernel if it is given the forward kernel's outputs and their gradient, else the forward one."""
    q, k, v, segments_BxL, rotation = inputs
    (rows, length, hidden), backward = q.shape, bool(backward_inputs)
    width, size = width_of(hidden, heads), sizes(kind, length, window)
    blocks, together = hidden // width, width * heads // hidden
    if window:  # (row, block of H, chunk of queries, of keys) of a step; what the heads share stays where it is
        grid, at = (rows, size.query_steps, blocks), lambda b, i, h: (b, h, i, i)
    elif backward:
        grid, at = (rows, blocks, size.key_steps, size.query_steps), lambda b, h, j, i: (b, h, i, j)
    else:
        grid, at = (rows, blocks, size.query_steps, size.key_steps), lambda b, h, i, j: (b, h, i, j)

    def specs(of_keys: bool, halo: int, shape: Callable, index: Callable) -> list[pl.BlockSpec]:
        """Returns the specs of a chunk, and of its halos, from `shape(tokens)` and `index(b, h, chunk)`."""
        chunk = size.keys if of_keys else size.queries
        parts = [(chunk, lambda c: c)]
        if halo:
            per, last = chunk // halo, length // halo - 1
            before, after = lambda c: jnp.maximum(c * per - 1, 0), lambda c: jnp.minimum((c + 1) * per, last)
            parts = [(halo, before), *parts, (halo, after)]

        def spec(tokens: int, place: Callable) -> pl.BlockSpec:
            return pl.BlockSpec(shape(tokens), lambda *g: index(*at(*g)[:2], place(at(*g)[2 + of_keys])))

        return [spec(*part) for part in parts]

    def x(of_keys: bool, halo: int = 0) -> list[pl.BlockSpec]:
        return specs(of_keys, halo, lambda n: (None, n, width), lambda b, h, c: (b, c, h))

    q_halo, dims = size.halo * backward, lambda n: (None, None, together, n)
    angles, cos_sin = [None, None], (None, None)
    if rotation is not None:
        cos_sin, each = [x.swapaxes(1, 2) for x in rotation], int(rotation[0].shape[0] > 1)
        angles = [
            specs(of_keys, halo, lambda n: (None, hidden // heads // 2, n), lambda b, h, c: (b * each, 0, c))
            for of_keys, halo in ((False, q_halo), (True, size.halo))
        ]
    key_spec = specs(True, size.halo, lambda n: (None, n, 1), lambda b, h, c: (b, c, 0))
    query_spec = specs(False, q_halo, lambda n: (None, 1, n), lambda b, h, c: (b, 0, c)) if isolated else None
    stats = specs(False, q_halo, dims, lambda b, h, c: (b, h, 0, c))
    x_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    in_specs = [x(False, q_halo), x(True, size.halo), x(True, size.halo), key_spec, query_spec]
    in_specs += [[spec, spec] if spec else None for spec in angles]
    if backward:
        in_specs += [x(False, q_halo), stats, x(False, q_halo)]
        late = size.key_steps - 1  # until then the gradients of the queries are not complete
        dq = pl.BlockSpec(
            (None, size.queries, width), lambda *g: ((o := at(*g))[0], jnp.where(o[3] < late, 0, o[2]), o[1])
        )
        out_specs, out_shape = [x(False)[0] if window else dq, x(True)[0], x(True)[0]], [x_shape] * 3
        scratch = [pltpu.VMEM((size.keys + 2 * size.halo, width), jnp.float32)] * 2
        scratch += [pltpu.VMEM((width, length), jnp.float32)] * (size.key_steps > 1)
    else:
        out_specs = [x(False)[0], specs(False, 0, dims, lambda b, h, c: (b, h, 0, c))[0]]
        out_shape = [x_shape, jax.ShapeDtypeStruct((rows, blocks, together, length), jnp.float32)]
        scratch = [pltpu.VMEM((n, size.queries), jnp.float32) for n in (width, together, together)]
        scratch *= size.key_steps > 1
    settings = {"head_size": hidden // heads, "window": window, "size": size}
    settings["operand"] = jnp.dtype(jnp.float32) if kind in ROUNDING else q.dtype
    call = pl.pallas_call(
        functools.partial(_backward_kernel if backward else _forward_kernel, **settings),
        name=f"tiled_attention_{'backward' if backward else 'forward'}_{window}",  # as plan reads it
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        interpret=not kind.startswith("TPU"),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=MEMORY.get(kind, 16) * 2**20),
    )
    arrays = [q, k, v, segments_BxL[:, :, None], segments_BxL[:, None, :], cos_sin, cos_sin, *backward_inputs]
    arrays[5:7] = [None, None] if rotation is None else [list(cos_sin)] * 2
    args = []
    for array, spec in zip(arrays, in_specs, strict=True):
        if spec is None:
            args.append(None)
        elif isinstance(array, list):
            args.append([[one] * len(each) for one, each in zip(array, spec, strict=True)])
        else:
            args.append([array] * len(spec))
    return call(*args)


def _joined(refs: list, axis: int = 0) -> Array:
    return refs[0][...] if len(refs) == 1 else jnp.concatenate([ref[...] for ref in refs], axis)


def _rotate(x_WxT: Array, angles: list[Array] | None, head_size: int, direction: int = 1) -> Array:
    """Returns tokens in float32, rotated, or rotated back with a direction of -1; halves of a head are whole rows."""
    if angles is None:
        return x_WxT
    half, parts, (cos, sin) = head_size // 2, [], angles
    for start in range(0, x_WxT.shape[0], head_size):
        first, second = x_WxT[start : start + half], x_WxT[start + half : start + head_size]
        parts += [first * cos - second * (direction * sin), second * cos + first * (direction * sin)]
    return jnp.concatenate(parts, axis=0)


def _load(refs: list, angles: list[Array] | None, head_size: int, scale: float, operand: jnp.dtype) -> Array:
    x = _joined(refs)
    if angles is None:
        return (x.astype(jnp.float32) * scale).astype(operand)
    return (_rotate(x.T.astype(jnp.float32), angles, head_size) * scale).T.astype(operand)


def _pipeline(count: int, *stages: Callable[[int], None]) -> None:
    """Calls the stages for 0, 1, ..., each one behind the stage before it: the compiler keeps to such an order."""
    for number in range(count + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= number - behind < count:
                stage(number - behind)


class _Chunk:
    """What both kernels read of a chunk, and its tiles."""

    def __init__(self, q, k, v, keys, queries, q_angles, k_angles, *, backward, head_size, window, size, operand):
        self.size, self.window, self.head_size = size, window, head_size
        self.q_angles, self.k_angles = (each and [_joined(refs, 1) for refs in each] for each in (q_angles, k_angles))
        scale = math.log2(math.e) / math.sqrt(head_size)
        self.q_QxW = _load(q, self.q_angles, head_size, scale, operand)
        k_KxW, self.v_KxW = _load(k, self.k_angles, head_size, 1.0, operand), _joined(v).astype(operand)
        self.k_KxW, width = k_KxW, k_KxW.shape[1]
        self.heads = [slice(start, start + head_size) for start in range(0, width, head_size)]
        self.lanes = [lanes_of(head, head_size, width) for head in range(len(self.heads))]
        self.head_k = [jnp.where(lanes, k_KxW, 0) for lanes in self.lanes]
        self.keys = [ref[...] for ref in keys]
        if size.halo:  # beyond the row there are no tokens
            for part, edge in ((0, 0), (2, size.query_steps - 1)):
                self.keys[part] = jnp.where(pl.program_id(1) == edge, 0, self.keys[part])
        self.keys_Kx1 = jnp.concatenate(self.keys) if size.halo else self.keys[0]
        self.queries_1xQ = queries and _joined(queries, 1)
        # Of each tile: its queries among Q, its keys among K, and how far the first key is from the first query.
        total, halo = size.keys + 2 * size.halo, size.halo
        reach = -(-window // ALIGNED) * ALIGNED if window else total
        first = -halo if backward else 0
        self.tiles = []
        for start in range(first, size.queries - first, size.tile):
            # Keys in the halo matter to the queries of the chunk alone.
            own = 0 if backward and not 0 <= start < size.queries else halo
            begin = max(start - reach, -own)
            end = min(start + size.tile + reach, size.keys + own)
            here = slice(start - first, start - first + size.tile)
            self.tiles.append((here, slice(begin + halo, end + halo), begin - start if window else 0))

    def bias(self, tile: int) -> Array:
        """Returns what is added to the scores of a tile, [S, C] or [S, 1]."""
        here, near, offset = self.tiles[tile]
        keys_Sx1 = self.keys_Kx1[near]
        allowed = keys_Sx1 > 0
        if self.queries_1xQ is not None:
            allowed = allowed & (keys_Sx1 == self.queries_1xQ[:, here])
        if self.window:
            key, query = (lax.broadcasted_iota(jnp.int32, (near.stop - near.start, self.size.tile), i) for i in (0, 1))
            allowed = allowed & (jnp.abs(key - query + offset) <= self.window)
        return jnp.where(allowed, 0.0, MASK_VALUE)


def _forward_kernel(q, k, v, keys, queries, q_angles, k_angles, out_ref, logsumexp_ref, *scratch, operand, **settings):
    chunk = _Chunk(q, k, v, keys, queries, q_angles, k_angles, backward=False, operand=operand, **settings)
    v_WxK = None if chunk.window else chunk.v_KxW.T
    is_first, work = pl.program_id(3) == 0 if scratch else None, {}

    def scores(tile: int) -> None:
        here, near, _ = chunk.tiles[tile]
        bias = chunk.bias(tile)
        work[tile] = [dot(k_KxW[near], chunk.q_QxW[here], NT) + bias for k_KxW in chunk.head_k]

    def softmax(tile: int) -> None:
        here, found = chunk.tiles[tile][0], []
        for head, scores_SxC in enumerate(work[tile]):
            largest_1xC, rest_1xC = jnp.max(scores_SxC, axis=0, keepdims=True), None
            row = slice(head, head + 1)
            if scratch:
                before_1xC = jnp.where(is_first, MASK_VALUE, scratch[1][row, here])
                largest_1xC = jnp.maximum(largest_1xC, before_1xC)
                rest_1xC = jnp.where(is_first, 0.0, jnp.exp2(before_1xC - largest_1xC))
            exp_SxC = jnp.exp2(scores_SxC - largest_1xC)
            total_1xC = jnp.sum(exp_SxC, axis=0, keepdims=True)
            if scratch:
                total_1xC = total_1xC + jnp.where(is_first, 0.0, scratch[2][row, here] * rest_1xC)
                scratch[1][row, here], scratch[2][row, here] = largest_1xC, total_1xC
            logsumexp_ref[row, here] = largest_1xC + jnp.log2(total_1xC)
            found.append((exp_SxC.astype(operand), 1 / total_1xC, rest_1xC))
        work[tile] = found

    def context(tile: int) -> None:
        here, near, _ = chunk.tiles[tile]
        v_WxS, out = chunk.v_KxW[near].T if v_WxK is None else v_WxK, []
        for rows, (exp_SxC, inverse_1xC, rest_1xC) in zip(chunk.heads, work.pop(tile), strict=True):
            sum_DxC = dot(v_WxS[rows], exp_SxC, NN)
            if scratch:
                sum_DxC = sum_DxC + jnp.where(is_first, 0.0, scratch[0][rows, here] * rest_1xC)
                scratch[0][rows, here] = sum_DxC
            out.append(sum_DxC * inverse_1xC)
        out_ref[here] = jnp.concatenate(out, axis=0).T.astype(out_ref.dtype)

    _pipeline(len(chunk.tiles), scores, softmax, context)


def _backward_kernel(q, k, v, keys, queries, q_angles, k_angles, out, logsumexp, grad, *rest, operand, **settings):
    chunk = _Chunk(q, k, v, keys, queries, q_angles, k_angles, backward=True, operand=operand, **settings)
    dq_ref, dk_ref, dv_ref, dk_KxW, dv_KxW, *dq_WxL = rest
    size, head_size, halo, work = chunk.size, chunk.head_size, chunk.size.halo, {}
    out_QxW, grad_QxW = _joined(out), _joined(grad).astype(operand)
    stats = [ref[...] for ref in logsumexp]
    if halo:  # queries beyond the row have no probabilities
        for part, edge in ((0, 0), (2, size.query_steps - 1)):
            stats[part] = jnp.where(pl.program_id(1) == edge, -MASK_VALUE, stats[part])
    logsumexp_NxQ = jnp.concatenate(stats, axis=1) if halo else stats[0]
    head_v = [jnp.where(lanes, chunk.v_KxW, 0) for lanes in chunk.lanes]
    k_WxK = None if chunk.window else chunk.k_KxW.T

    def start() -> None:
        dk_KxW[...] = jnp.zeros_like(dk_KxW)
        dv_KxW[...] = jnp.zeros_like(dv_KxW)

    def products(tile: int) -> None:
        here, near, _ = chunk.tiles[tile]
        bias, q_CxW, grad_CxW = chunk.bias(tile), chunk.q_QxW[here], grad_QxW[here]
        pairs = zip(chunk.head_k, head_v, strict=True)
        work[tile] = [(dot(k[near], q_CxW, NT) + bias, dot(v[near], grad_CxW, NT)) for k, v in pairs]

    def gradients(tile: int) -> None:
        here, found = chunk.tiles[tile][0], []
        product_WxC = (grad_QxW[here].astype(jnp.float32) * out_QxW[here].astype(jnp.float32)).T
        for head, (scores_SxC, d_probs_SxC) in enumerate(work[tile]):
            inner_1xC = jnp.sum(product_WxC[chunk.heads[head]], axis=0, keepdims=True)
            probs_SxC = jnp.exp2(scores_SxC - logsumexp_NxQ[head : head + 1, here])
            found.append((probs_SxC.astype(operand), (probs_SxC * (d_probs_SxC - inner_1xC)).astype(operand)))
        work[tile] = found

    def sums(tile: int) -> None:
        here, near, _ = chunk.tiles[tile]
        q_WxC, grad_WxC = chunk.q_QxW[here].T, grad_QxW[here].T
        k_WxS, parts = chunk.k_KxW[near].T if k_WxK is None else k_WxK, []
        for rows, (probs_SxC, d_scores_SxC) in zip(chunk.heads, work.pop(tile), strict=True):
            dq_DxC = dot(k_WxS[rows], d_scores_SxC, NN)
            parts.append((dq_DxC, dot(q_WxC[rows], d_scores_SxC, NT), dot(grad_WxC[rows], probs_SxC, NT)))
        dq_WxC, dk_WxS, dv_WxS = (jnp.concatenate(each, axis=0) for each in zip(*parts, strict=True))
        angles = chunk.k_angles and [each[:, near] for each in chunk.k_angles]
        dk_SxW, dv_SxW = _rotate(dk_WxS, angles, head_size, -1).T, dv_WxS.T
        dk_KxW[near] += dk_SxW
        dv_KxW[near] += dv_SxW
        place = slice(here.start - halo, here.stop - halo)
        if not 0 <= place.start < size.queries:
            return
        if dq_WxL:
            columns = pl.ds(pl.multiple_of(pl.program_id(3) * size.queries + place.start, LANES), size.tile)
            dq_WxC = dq_WxC + jnp.where(pl.program_id(2) == 0, 0.0, dq_WxL[0][:, columns])
            dq_WxL[0][:, columns] = dq_WxC
        angles = chunk.q_angles and [each[:, here] for each in chunk.q_angles]
        dq_CxW = _rotate(dq_WxC, angles, head_size, -1).T
        dq_ref[place] = (dq_CxW / math.sqrt(head_size)).astype(dq_ref.dtype)

    def finish() -> None:
        own = slice(halo, halo + size.keys)
        dk_ref[...] = (dk_KxW[own] * math.log(2)).astype(dk_ref.dtype)
        dv_ref[...] = dv_KxW[own].astype(dv_ref.dtype)

    several = not chunk.window and size.query_steps > 1
    pl.when(pl.program_id(3) == 0)(start) if several else start()
    _pipeline(len(chunk.tiles), products, gradients, sums)
    pl.when(pl.program_id(3) == size.query_steps - 1)(finish) if several else finish()
