"""The kernels of fused_attention.py.

A step of the grid has a chunk of queries and one of keys of a row, or several short rows. The work on a tile of a chunk
is emitted in stages: the compiler keeps to the order of independent operations, and has the vector units work on one
tile while the matrix units work on the next. The scores' units are those of 2^x: queries are scaled by log2(e) too.

Dimensions: W entries of H in a block, N heads in a block, D head size, Q queries and K keys of a chunk, halos included,
C queries of a tile, S the keys that they read, T tokens.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

LANES = 128
INPUTS = 10  # of both kernels: a `Chunk`'s
ALIGNED = 32  # keys: where the keys of a tile may start
MASK_VALUE = -1e30
NT = (((1,), (1,)), ((), ()))  # x @ y.T
NN = (((1,), (0,)), ((), ()))  # x @ y

Stages = list[Callable[[], None]]  # of a tile


class Sizes(NamedTuple):
    """Rows and tokens of a step of the grid; tokens of a tile and of a halo; steps along queries and keys of a row."""

    rows: int
    queries: int
    keys: int
    tile: int
    halo: int
    query_steps: int
    key_steps: int

    @property
    def is_one(self) -> bool:
        """Whether a row is a single tile."""
        return self.tile == self.queries and self.query_steps == self.key_steps == 1


def step(*refs: Any, stages_of: Callable[..., list[Stages]], size: Sizes, **settings: Any) -> None:
    """Runs the tiles of a grid step as a software pipeline: each stage beside the previous stage of the next tile."""
    tiles = []
    for row in range(size.rows):
        of_row = jax.tree.map(lambda ref: ref.at[min(row, ref.shape[0] - 1)], refs)  # noqa: B023
        tiles += stages_of(*of_row, size=size, **settings)
    behind_most = len(tiles[0])
    for number in range(len(tiles) + behind_most - 1):
        for behind in range(behind_most):
            if 0 <= number - behind < len(tiles):
                tiles[number - behind][behind]()


def _dot(x: Array, y: Array, dims: tuple) -> Array:
    """Returns the product of two matrices in float32."""
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


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


class Chunk:
    """Inputs of both kernels for one chunk of a row, and its tiles.

    Arguments are lists of refs: the chunk, or halo before, chunk and halo after.
    """

    def __init__(self, q, k, v, keys, queries, mask, *angles, backward, head_size, window, size, operand):
        self.size, self.window, self.mask = size, window, mask
        angles = [_joined(refs, 1) for refs in angles if refs]
        self.q_angles, self.k_angles = (angles[:2], angles[2:]) if angles else (None, None)
        scale = math.log2(math.e) / math.sqrt(head_size)
        self.q_QxW = _load(q, self.q_angles, head_size, scale, operand)
        self.k_KxW, self.v_KxW = _load(k, self.k_angles, head_size, 1.0, operand), _joined(v).astype(operand)
        width = self.k_KxW.shape[1]
        self.heads = [slice(start, start + head_size) for start in range(0, width, head_size)]
        lane = lax.broadcasted_iota(jnp.int32, (1, width), 1)
        self.lanes = [(lane >= head.start) & (lane < head.stop) for head in self.heads]
        self.head_k = self.of_heads(self.k_KxW)
        self.keys_Kx1 = _joined(keys, steps=size.query_steps)
        self.queries_1xQ = _joined(queries, 1) if queries else None
        # Of each tile: its queries among Q, its keys among K, and how far the first key is from the first query.
        total, halo = size.keys + 2 * size.halo, size.halo
        reach = -(-window // ALIGNED) * ALIGNED if window else total
        first = -halo if backward else 0
        self.tiles = []
        for start in range(first, size.queries - first, size.tile):
            # Keys in the halo matter to the queries of the chunk alone.
            halo_read = 0 if backward and not 0 <= start < size.queries else halo
            begin = max(start - reach, -halo_read)
            end = min(start + size.tile + reach, size.keys + halo_read)
            here = slice(start - first, start - first + size.tile)
            self.tiles.append((here, slice(begin + halo, end + halo), begin - start if window else 0))

    def of_heads(self, x_KxW: Array) -> list[Array]:
        """Returns for each head x with 0 for the entries of other heads."""
        return [jnp.where(lanes, x_KxW, 0) for lanes in self.lanes]

    def transposed(self, x_KxW: Array) -> Callable[[slice], Array]:
        """Returns a function from a tile's slice of the keys to [W, S]; transposes once if all tiles read all keys."""
        if self.window:
            return lambda near: x_KxW[near].T
        x_WxK = x_KxW.T
        return lambda near: x_WxK

    def bias(self, tile: int) -> Array:
        """Returns the mask bias of a tile's scores, [S, C] or [S, 1]: 0, or MASK_VALUE."""
        here, near, offset = self.tiles[tile]
        keys_Sx1 = self.keys_Kx1[near]
        allowed = keys_Sx1 > 0
        if self.queries_1xQ is not None:
            allowed = allowed & (keys_Sx1 == self.queries_1xQ[:, here])
        if self.window:
            key, query = (lax.broadcasted_iota(jnp.int32, (near.stop - near.start, self.size.tile), i) for i in (0, 1))
            allowed = allowed & (jnp.abs(key - query + offset) <= self.window)
        return jnp.where(allowed, 0.0, MASK_VALUE)

    def dropped(self, tile: int, x_SxC: Array) -> Array:
        """Applies the dropout mask to a tile, if there is one."""
        here, near, _ = self.tiles[tile]
        return x_SxC * self.mask[0][near, here].astype(x_SxC.dtype) if self.mask else x_SxC

    def stages(self, *stages: Callable[[int], None]) -> list[Stages]:
        """Returns the stages of each tile."""
        return [[functools.partial(stage, tile) for stage in stages] for tile in range(len(self.tiles))]


def forward(*refs, operand, **settings):
    """Returns the forward stages of a row's tiles; `scratch` carries the online softmax over several key chunks."""
    chunk = Chunk(*refs[:INPUTS], backward=False, operand=operand, **settings)
    out_ref, logsumexp_ref, *scratch = refs[INPUTS:]
    v_near, is_first, work = chunk.transposed(chunk.v_KxW), pl.program_id(3) == 0 if scratch else None, {}

    def scores(tile: int) -> None:
        here, near, _ = chunk.tiles[tile]
        bias = chunk.bias(tile)
        work[tile] = [_dot(k_KxW[near], chunk.q_QxW[here], NT) + bias for k_KxW in chunk.head_k]

    def softmax(tile: int) -> None:
        here, heads = chunk.tiles[tile][0], []
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
            heads.append((chunk.dropped(tile, exp_SxC.astype(operand)), 1 / total_1xC, rest_1xC))
        work[tile] = heads

    def context(tile: int) -> None:
        here, near, _ = chunk.tiles[tile]
        v_WxS, out = v_near(near), []
        for rows, (exp_SxC, inverse_1xC, rest_1xC) in zip(chunk.heads, work.pop(tile), strict=True):
            sum_DxC = _dot(v_WxS[rows], exp_SxC, NN)
            if scratch:
                sum_DxC = sum_DxC + jnp.where(is_first, 0.0, scratch[0][rows, here] * rest_1xC)
                scratch[0][rows, here] = sum_DxC
            out.append(sum_DxC * inverse_1xC)
        out_ref[here] = jnp.concatenate(out, axis=0).T.astype(out_ref.dtype)

    return chunk.stages(scores, softmax, context)


def backward(*refs, operand, **settings):
    """Returns the backward stages of a row's tiles; `sums_KxW` are float32 scratch, for rows of more than one tile."""
    chunk = Chunk(*refs[:INPUTS], backward=True, operand=operand, **settings)
    out, logsumexp, grad, dq_ref, dk_ref, dv_ref, *sums_KxW = refs[INPUTS:]
    size, head_size, halo, work = chunk.size, settings["head_size"], chunk.size.halo, {}
    out_QxW, grad_QxW = _joined(out), _joined(grad).astype(operand)
    # Queries beyond the row have no probabilities.
    logsumexp_NxQ = _joined(logsumexp, 1, steps=size.query_steps, beyond=-MASK_VALUE)
    head_v, k_near = chunk.of_heads(chunk.v_KxW), chunk.transposed(chunk.k_KxW)
    # Without a window all chunks of queries add to the same keys.
    last_q_chunk = 0 if chunk.window else size.query_steps - 1
    q_chunk = pl.program_id(3) if last_q_chunk else 0

    def products(tile: int) -> None:
        (here, near, _), bias, pairs = chunk.tiles[tile], chunk.bias(tile), zip(chunk.head_k, head_v, strict=True)
        q_CxW, grad_CxW = chunk.q_QxW[here], grad_QxW[here]
        work[tile] = [(_dot(k[near], q_CxW, NT) + bias, _dot(v[near], grad_CxW, NT)) for k, v in pairs]

    def gradients(tile: int) -> None:
        here, heads = chunk.tiles[tile][0], []
        product_WxC = (grad_QxW[here].astype(jnp.float32) * out_QxW[here].astype(jnp.float32)).T
        for head, (scores_SxC, d_dropped_SxC) in enumerate(work[tile]):
            inner_1xC = jnp.sum(product_WxC[chunk.heads[head]], axis=0, keepdims=True)
            probs_SxC = jnp.exp2(scores_SxC - logsumexp_NxQ[head : head + 1, here])
            d_scores_SxC = probs_SxC * (chunk.dropped(tile, d_dropped_SxC) - inner_1xC)
            heads.append((chunk.dropped(tile, probs_SxC.astype(operand)), d_scores_SxC.astype(operand)))
        work[tile] = heads

    def sums(tile: int) -> None:
        here, near, _ = chunk.tiles[tile]
        q_WxC, grad_WxC, k_WxS, parts = chunk.q_QxW[here].T, grad_QxW[here].T, k_near(near), []
        for rows, (probs_SxC, d_scores_SxC) in zip(chunk.heads, work.pop(tile), strict=True):
            dq_DxC = _dot(k_WxS[rows], d_scores_SxC, NN)
            parts.append((dq_DxC, _dot(q_WxC[rows], d_scores_SxC, NT), _dot(grad_WxC[rows], probs_SxC, NT)))
        dq_WxC, dk_WxS, dv_WxS = (jnp.concatenate(heads, axis=0) for heads in zip(*parts, strict=True))
        angles = chunk.k_angles and [angle[:, near] for angle in chunk.k_angles]
        add_keys(tile, _rotate(dk_WxS, angles, head_size, -1).T, dv_WxS.T)
        place = slice(here.start - halo, here.stop - halo)
        if not 0 <= place.start < size.queries:
            return
        if size.key_steps > 1:
            columns = pl.ds(pl.multiple_of(pl.program_id(3) * size.queries + place.start, LANES), size.tile)
            dq_WxC = dq_WxC + jnp.where(pl.program_id(2) == 0, 0.0, sums_KxW[2][:, columns])
            sums_KxW[2][:, columns] = dq_WxC
        angles = chunk.q_angles and [angle[:, here] for angle in chunk.q_angles]
        dq_WxC = _rotate(dq_WxC, angles, head_size, -1) / math.sqrt(head_size)
        dq_ref[place] = dq_WxC.T.astype(dq_ref.dtype)

    def add_keys(tile: int, dk_SxW: Array, dv_SxW: Array) -> None:
        """Adds to the gradients of the keys that a tile reads."""
        if not sums_KxW:
            write_keys(dk_SxW, dv_SxW)
            return
        near, without_halo = chunk.tiles[tile][1], slice(halo, halo + size.keys)
        sums_KxW[0][near] += dk_SxW
        sums_KxW[1][near] += dv_SxW
        if tile == len(chunk.tiles) - 1:
            pl.when(q_chunk == last_q_chunk)(lambda: write_keys(*(total[without_halo] for total in sums_KxW[:2])))

    def write_keys(dk_KxW: Array, dv_KxW: Array) -> None:
        dk_ref[...] = (dk_KxW * math.log(2)).astype(dk_ref.dtype)
        dv_ref[...] = dv_KxW.astype(dv_ref.dtype)

    @pl.when(q_chunk == 0)
    def _clear() -> None:
        for sum_KxW in sums_KxW[:2]:
            sum_KxW[...] = jnp.zeros_like(sum_KxW)

    return chunk.stages(products, gradients, sums)
