"""The kernels of tiled_attention.py.

A step of the grid has a chunk of queries and one of keys, and a chunk has tiles, whose work is emitted in stages: the
compiler keeps to the order of independent operations, and has the vector units work on one tile while the matrix units
work on the next. The scores' units are those of 2^x: queries are scaled by log2(e) too.

Dimensions: W entries of H in a block, N heads in a block, D head size, Q queries and K keys of a chunk, halos included,
C queries of a tile, S the keys that they read, T tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from mlm.model.fused_attention import LANES, MASK_VALUE, NN, NT, dot, lanes_of

ALIGNED = 32  # keys: where the keys of a tile may start


class Sizes(NamedTuple):
    """Tokens of a step of the grid, of a tile and of a halo; steps along queries and keys."""

    queries: int
    keys: int
    tile: int
    halo: int
    query_steps: int
    key_steps: int


def _joined(refs: list, axis: int = 0, *, steps: int = 0, beyond: float = 0.0) -> Array:
    """Returns a chunk and its halos; if the grid has `steps` chunks, with `beyond` for tokens beyond the row."""
    parts = [ref[...] for ref in refs]
    if steps and len(parts) > 1:
        for part, edge in ((0, 0), (2, steps - 1)):
            parts[part] = jnp.where(pl.program_id(1) == edge, jnp.asarray(beyond, parts[part].dtype), parts[part])
    return jnp.concatenate(parts, axis)


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


class Chunk:
    """What both kernels read of a chunk, and its tiles."""

    def __init__(self, q, k, v, keys, queries, q_angles, k_angles, *, backward, head_size, window, size, operand):
        self.size, self.window, self.head_size = size, window, head_size
        self.q_angles, self.k_angles = (
            [_joined(refs, 1) for refs in each] if each[0] else None for each in (q_angles, k_angles)
        )
        scale = math.log2(math.e) / math.sqrt(head_size)
        self.q_QxW = _load(q, self.q_angles, head_size, scale, operand)
        k_KxW, self.v_KxW = _load(k, self.k_angles, head_size, 1.0, operand), _joined(v).astype(operand)
        self.k_KxW, width = k_KxW, k_KxW.shape[1]
        self.heads = [slice(start, start + head_size) for start in range(0, width, head_size)]
        self.lanes = [lanes_of(head, head_size, width) for head in range(len(self.heads))]
        self.head_k = [jnp.where(lanes, k_KxW, 0) for lanes in self.lanes]
        self.keys_Kx1 = _joined(keys, steps=size.query_steps)
        self.queries_1xQ = _joined(queries, 1) if queries else None
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


def forward_kernel(
    q, k, v, keys, queries, q_cos, q_sin, k_cos, k_sin, out_ref, logsumexp_ref, *scratch, operand, **settings
):
    """Lists of refs, one of a chunk or three with its halos; `scratch` is there if keys come in several chunks."""
    chunk = Chunk(q, k, v, keys, queries, (q_cos, q_sin), (k_cos, k_sin), backward=False, operand=operand, **settings)
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


def backward_kernel(
    q, k, v, keys, queries, q_cos, q_sin, k_cos, k_sin, out, logsumexp, grad, *rest, operand, **settings
):
    """As `forward_kernel`; `rest` are the outputs, and sums in float32."""
    chunk = Chunk(q, k, v, keys, queries, (q_cos, q_sin), (k_cos, k_sin), backward=True, operand=operand, **settings)
    dq_ref, dk_ref, dv_ref, dk_KxW, dv_KxW, *dq_WxL = rest
    size, head_size, halo, work = chunk.size, chunk.head_size, chunk.size.halo, {}
    out_QxW, grad_QxW = _joined(out), _joined(grad).astype(operand)
    # Queries beyond the row have no probabilities.
    logsumexp_NxQ = _joined(logsumexp, 1, steps=size.query_steps, beyond=-MASK_VALUE)
    head_v = [jnp.where(lanes, chunk.v_KxW, 0) for lanes in chunk.lanes]
    k_WxK = None if chunk.window else chunk.k_KxW.T

    def start() -> None:
        dk_KxW[...] = dv_KxW[...] = jnp.zeros_like(dk_KxW)

    def products(tile: int) -> None:
        (here, near, _), bias, pairs = chunk.tiles[tile], chunk.bias(tile), zip(chunk.head_k, head_v, strict=True)
        q_CxW, grad_CxW = chunk.q_QxW[here], grad_QxW[here]
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
        q_WxC, grad_WxC, parts = chunk.q_QxW[here].T, grad_QxW[here].T, []
        k_WxS = chunk.k_KxW[near].T if k_WxK is None else k_WxK
        for rows, (probs_SxC, d_scores_SxC) in zip(chunk.heads, work.pop(tile), strict=True):
            dq_DxC = dot(k_WxS[rows], d_scores_SxC, NN)
            parts.append((dq_DxC, dot(q_WxC[rows], d_scores_SxC, NT), dot(grad_WxC[rows], probs_SxC, NT)))
        dq_WxC, dk_WxS, dv_WxS = (jnp.concatenate(each, axis=0) for each in zip(*parts, strict=True))
        angles = chunk.k_angles and [each[:, near] for each in chunk.k_angles]
        dk_KxW[near] += _rotate(dk_WxS, angles, head_size, -1).T
        dv_KxW[near] += dv_WxS.T
        place = slice(here.start - halo, here.stop - halo)
        if not 0 <= place.start < size.queries:
            return
        if dq_WxL:
            columns = pl.ds(pl.multiple_of(pl.program_id(3) * size.queries + place.start, LANES), size.tile)
            dq_WxC = dq_WxC + jnp.where(pl.program_id(2) == 0, 0.0, dq_WxL[0][:, columns])
            dq_WxL[0][:, columns] = dq_WxC
        angles = chunk.q_angles and [each[:, here] for each in chunk.q_angles]
        dq_WxC = _rotate(dq_WxC, angles, head_size, -1) / math.sqrt(head_size)
        dq_ref[place] = dq_WxC.T.astype(dq_ref.dtype)

    def finish() -> None:
        dk_ref[...] = (dk_KxW[halo : halo + size.keys] * math.log(2)).astype(dk_ref.dtype)
        dv_ref[...] = dv_KxW[halo : halo + size.keys].astype(dv_ref.dtype)

    in_order = size.query_steps > 1 and not chunk.window  # the chunks of queries add to the same keys
    at = pl.program_id(3) if in_order else 0
    pl.when(at == 0)(start) if in_order else start()
    _pipeline(len(chunk.tiles), products, gradients, sums)
    pl.when(at == size.query_steps - 1)(finish) if in_order else finish()
