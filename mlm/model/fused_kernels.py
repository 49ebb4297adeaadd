"""The kernels of fused_attention.py.

A step of the grid has a chunk of queries and one of keys of a row, or several short rows. The work on a tile of a chunk
is a generator of STAGES stages: the compiler keeps to the order of independent operations, and has the vector units
work on one tile while the matrix units work on the next. The scores' units are those of 2^x: queries are scaled by
log2(e) too.

Dimensions: W entries of H in a block, N heads in a block, D head size, Q queries and K keys of a chunk, halos included,
C queries of a tile, S the keys that they read, T tokens.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

LANES = 128
INPUTS = 10  # of both kernels: a `Chunk`'s
STAGES = 3  # of both kernels' tiles
ALIGNED = 32  # keys: where the keys of a tile may start
MASK_VALUE = -1e30
NT = (((1,), (1,)), ((), ()))  # x @ y.T
NN = (((1,), (0,)), ((), ()))  # x @ y

Stages = Iterator[None]  # of a tile, to be advanced STAGES times


class Sizes(NamedTuple):
    """Rows and tokens of a step of the grid; tokens of a tile, of a halo; chunks of a row, and of one query's keys."""

    rows: int
    chunk: int
    tile: int
    halo: int
    steps: int
    key_steps: int

    @property
    def is_one(self) -> bool:
        """Whether a row is a single tile."""
        return self.tile == self.chunk and self.steps == 1


class Tile(NamedTuple):
    """Queries of a chunk, and the keys that they read."""

    queries: slice  # of Q
    keys: slice  # of K
    offset: int  # of the first key from the first query


def step(*refs: Any, kernel: "type[Forward | Backward]", size: Sizes, **settings: Any) -> None:
    """Runs the tiles of a grid step as a software pipeline: each stage beside the previous stage of the next tile."""
    tiles = []
    for row in range(size.rows):
        of_row = jax.tree.map(lambda ref: ref.at[min(row, ref.shape[0] - 1)], refs)  # noqa: B023
        chunk = kernel(*of_row, size=size, **settings)
        tiles += [chunk.work(tile) for tile in chunk.tiles]
    for newest in range(len(tiles) + STAGES - 1):
        for behind in range(STAGES):
            if 0 <= newest - behind < len(tiles):
                next(tiles[newest - behind], None)


def _dot(x: Array, y: Array, dims: tuple) -> Array:
    """Returns the product of two matrices in float32."""
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _joined(refs: list, axis: int = 0, *, steps: int = 0, beyond: float = 0.0) -> Array:
    """Returns a chunk and its halos; if the grid has `steps` chunks, with `beyond` for tokens beyond the row."""
    parts = [ref[...] for ref in refs]
    if steps and len(parts) > 1:
        for part, edge in ((0, 0), (2, steps - 1)):
            parts[part] = jnp.where(
                pl.program_id(1) == edge, jnp.asarray(beyond, parts[part].dtype), parts[part]
            )
    return jnp.concatenate(parts, axis)


def _rotate(x_WxT: Array, angles: list[Array] | None, head_size: int, direction: int = 1) -> Array:
    """Returns tokens in float32, rotated, or rotated back with a direction of -1; halves of a head are whole rows."""
    if angles is None:
        return x_WxT
    half = head_size // 2
    parts = []
    cos, sin = angles
    for start in range(0, x_WxT.shape[0], head_size):
        first = x_WxT[start : start + half]
        second = x_WxT[start + half : start + head_size]
        parts += [
            first * cos - second * (direction * sin),
            second * cos + first * (direction * sin),
        ]
    return jnp.concatenate(parts, axis=0)


def _load(
    refs: list, angles: list[Array] | None, head_size: int, scale: float, operand: jnp.dtype
) -> Array:
    x = _joined(refs)
    if angles is None:
        return (x.astype(jnp.float32) * scale).astype(operand)
    return (_rotate(x.T.astype(jnp.float32), angles, head_size) * scale).T.astype(operand)


class Chunk:
    """Inputs of both kernels for one chunk of a row, and its tiles.

    Arguments are lists of refs: the chunk, or halo before, chunk and halo after.
    """

    is_backward = False

    def __init__(self, q, k, v, keys, queries, mask, *angles, head_size, window, size, operand):
        self.size = size
        self.window = window
        self.mask = mask
        self.head_size = head_size
        self.operand = operand
        angles = [_joined(refs, 1) for refs in angles if refs]
        self.q_angles, self.k_angles = (angles[:2], angles[2:]) if angles else (None, None)
        scale = math.log2(math.e) / math.sqrt(head_size)
        self.q_QxW = _load(q, self.q_angles, head_size, scale, operand)
        self.k_KxW = _load(k, self.k_angles, head_size, 1.0, operand)
        self.v_KxW = _joined(v).astype(operand)
        width = self.k_KxW.shape[1]
        self.heads = [slice(start, start + head_size) for start in range(0, width, head_size)]
        lane = lax.broadcasted_iota(jnp.int32, (1, width), 1)
        self.lanes = [(lane >= head.start) & (lane < head.stop) for head in self.heads]
        self.head_k = self.of_heads(self.k_KxW)
        self.keys_Kx1 = _joined(keys, steps=size.steps)
        self.queries_1xQ = _joined(queries, 1) if queries else None
        self.tiles = list(self._tiles())

    def _tiles(self) -> Iterator[Tile]:
        size = self.size
        halo = size.halo
        reach = -(-self.window // ALIGNED) * ALIGNED or size.chunk
        first = -halo if self.is_backward else 0
        for start in range(first, size.chunk - first, size.tile):
            # Keys in the halo matter to the queries of the chunk alone.
            halo_read = halo if 0 <= start < size.chunk else 0
            begin = max(start - reach, -halo_read)
            end = min(start + size.tile + reach, size.chunk + halo_read)
            queries = slice(start - first, start - first + size.tile)
            yield Tile(queries, slice(begin + halo, end + halo), begin - start)

    def of_heads(self, x_KxW: Array) -> list[Array]:
        """Returns for each head x with 0 for the entries of other heads."""
        return [jnp.where(lanes, x_KxW, 0) for lanes in self.lanes]

    def transposed(self, x_KxW: Array) -> Callable[[slice], Array]:
        """Returns a function from a tile's slice of the keys to [W, S]; transposes once if all tiles read all keys."""
        if self.window:
            return lambda near: x_KxW[near].T
        x_WxK = x_KxW.T
        return lambda near: x_WxK

    def bias(self, tile: Tile) -> Array:
        """Returns the mask bias of a tile's scores, [S, C] or [S, 1]: 0, or MASK_VALUE."""
        keys_Sx1 = self.keys_Kx1[tile.keys]
        allowed = keys_Sx1 > 0
        if self.queries_1xQ is not None:
            allowed = allowed & (keys_Sx1 == self.queries_1xQ[:, tile.queries])
        if self.window:
            shape = tile.keys.stop - tile.keys.start, self.size.tile
            key, query = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
            allowed = allowed & (jnp.abs(key - query + tile.offset) <= self.window)
        return jnp.where(allowed, 0.0, MASK_VALUE)

    def dropped(self, tile: Tile, x_SxC: Array) -> Array:
        """Applies the dropout mask to a tile, if there is one."""
        if not self.mask:
            return x_SxC
        return x_SxC * self.mask[0][tile.keys, tile.queries].astype(x_SxC.dtype)


class Forward(Chunk):
    """The forward kernel; `scratch` carries the online softmax over several key chunks."""

    def __init__(self, *refs, **settings):
        super().__init__(*refs[:INPUTS], **settings)
        self.out_ref, self.logsumexp_ref, *self.scratch = refs[INPUTS:]
        self.v_near = self.transposed(self.v_KxW)
        self.is_first = pl.program_id(3) == 0 if self.scratch else None

    def work(self, tile: Tile) -> Stages:
        """Scores, softmax, context."""
        bias = self.bias(tile)
        scores = [
            _dot(k_KxW[tile.keys], self.q_QxW[tile.queries], NT) + bias for k_KxW in self.head_k
        ]
        yield
        heads = [
            self.softmax(tile, slice(head, head + 1), scores_SxC)
            for head, scores_SxC in enumerate(scores)
        ]
        yield
        v_WxS = self.v_near(tile.keys)
        out = []
        for rows, (exp_SxC, inverse_1xC, rest_1xC) in zip(self.heads, heads, strict=True):
            sum_DxC = _dot(v_WxS[rows], exp_SxC, NN)
            if self.scratch:
                sums_WxQ = self.scratch[0]
                sum_DxC = sum_DxC + jnp.where(
                    self.is_first, 0.0, sums_WxQ[rows, tile.queries] * rest_1xC
                )
                sums_WxQ[rows, tile.queries] = sum_DxC
            out.append(sum_DxC * inverse_1xC)
        self.out_ref[tile.queries] = jnp.concatenate(out, axis=0).T.astype(self.out_ref.dtype)

    def softmax(
        self, tile: Tile, head: slice, scores_SxC: Array
    ) -> tuple[Array, Array, Array | None]:
        """Returns exponentials, the inverse of their sum, and the factor by which sums of earlier chunks shrink."""
        largest_1xC = jnp.max(scores_SxC, axis=0, keepdims=True)
        rest_1xC = None
        if self.scratch:
            _, largest_NxQ, total_NxQ = self.scratch
            before_1xC = jnp.where(self.is_first, MASK_VALUE, largest_NxQ[head, tile.queries])
            largest_1xC = jnp.maximum(largest_1xC, before_1xC)
            rest_1xC = jnp.where(self.is_first, 0.0, jnp.exp2(before_1xC - largest_1xC))
        exp_SxC = jnp.exp2(scores_SxC - largest_1xC)
        total_1xC = jnp.sum(exp_SxC, axis=0, keepdims=True)
        if self.scratch:
            total_1xC = total_1xC + jnp.where(
                self.is_first, 0.0, total_NxQ[head, tile.queries] * rest_1xC
            )
            largest_NxQ[head, tile.queries] = largest_1xC
            total_NxQ[head, tile.queries] = total_1xC
        self.logsumexp_ref[head, tile.queries] = largest_1xC + jnp.log2(total_1xC)
        return self.dropped(tile, exp_SxC.astype(self.operand)), 1 / total_1xC, rest_1xC


class Backward(Chunk):
    """The backward kernel; `sums` are float32 scratch, for rows of more than one tile."""

    is_backward = True

    def __init__(self, *refs, **settings):
        super().__init__(*refs[:INPUTS], **settings)
        out, logsumexp, grad, self.dq_ref, self.dk_ref, self.dv_ref, *self.sums = refs[INPUTS:]
        self.out_QxW = _joined(out)
        self.grad_QxW = _joined(grad).astype(self.operand)
        # Queries beyond the row have no probabilities.
        self.logsumexp_NxQ = _joined(logsumexp, 1, steps=self.size.steps, beyond=-MASK_VALUE)
        self.head_v = self.of_heads(self.v_KxW)
        self.k_near = self.transposed(self.k_KxW)
        # Without a window all chunks of queries add to the same keys.
        self.last_q_chunk = 0 if self.window else self.size.steps - 1
        self.q_chunk = pl.program_id(3) if self.last_q_chunk else 0

        @pl.when(self.q_chunk == 0)
        def _clear() -> None:
            for sum_KxW in self.sums[:2]:
                sum_KxW[...] = jnp.zeros_like(sum_KxW)

    def work(self, tile: Tile) -> Stages:
        """Products of keys and queries, values and gradients; gradients of the scores; sums over queries and keys."""
        bias = self.bias(tile)
        q_CxW = self.q_QxW[tile.queries]
        grad_CxW = self.grad_QxW[tile.queries]
        products = [
            (_dot(k_KxW[tile.keys], q_CxW, NT) + bias, _dot(v_KxW[tile.keys], grad_CxW, NT))
            for k_KxW, v_KxW in zip(self.head_k, self.head_v, strict=True)
        ]
        yield
        heads = []
        out_CxW = self.out_QxW[tile.queries].astype(jnp.float32)
        product_WxC = (grad_CxW.astype(jnp.float32) * out_CxW).T
        for head, (scores_SxC, d_dropped_SxC) in enumerate(products):
            inner_1xC = jnp.sum(product_WxC[self.heads[head]], axis=0, keepdims=True)
            probs_SxC = jnp.exp2(scores_SxC - self.logsumexp_NxQ[head : head + 1, tile.queries])
            d_scores_SxC = probs_SxC * (self.dropped(tile, d_dropped_SxC) - inner_1xC)
            probs_SxC = self.dropped(tile, probs_SxC.astype(self.operand))
            heads.append((probs_SxC, d_scores_SxC.astype(self.operand)))
        yield
        q_WxC = q_CxW.T
        grad_WxC = grad_CxW.T
        k_WxS = self.k_near(tile.keys)
        grads = [
            (
                _dot(k_WxS[rows], d_scores_SxC, NN),
                _dot(q_WxC[rows], d_scores_SxC, NT),
                _dot(grad_WxC[rows], probs_SxC, NT),
            )
            for rows, (probs_SxC, d_scores_SxC) in zip(self.heads, heads, strict=True)
        ]
        dq_WxC, dk_WxS, dv_WxS = map(jnp.concatenate, zip(*grads, strict=True))
        angles = self.k_angles and [angle[:, tile.keys] for angle in self.k_angles]
        self.add_keys(tile, _rotate(dk_WxS, angles, self.head_size, -1).T, dv_WxS.T)
        if 0 <= tile.queries.start - self.size.halo < self.size.chunk:
            self.write_queries(tile, dq_WxC)

    def write_queries(self, tile: Tile, dq_WxC: Array) -> None:
        """Writes the gradient of a tile's queries, added to that from earlier chunks of keys."""
        size = self.size
        place = slice(tile.queries.start - size.halo, tile.queries.stop - size.halo)
        if size.key_steps > 1:
            columns = pl.ds(
                pl.multiple_of(pl.program_id(3) * size.chunk + place.start, LANES), size.tile
            )
            dq_WxC = dq_WxC + jnp.where(pl.program_id(2) == 0, 0.0, self.sums[2][:, columns])
            self.sums[2][:, columns] = dq_WxC
        angles = self.q_angles and [angle[:, tile.queries] for angle in self.q_angles]
        dq_WxC = _rotate(dq_WxC, angles, self.head_size, -1) / math.sqrt(self.head_size)
        self.dq_ref[place] = dq_WxC.T.astype(self.dq_ref.dtype)

    def add_keys(self, tile: Tile, dk_SxW: Array, dv_SxW: Array) -> None:
        """Adds to the gradients of the keys that a tile reads, and writes them after the last tile."""
        if not self.sums:
            self.write_keys(dk_SxW, dv_SxW)
            return
        dk_sum, dv_sum = self.sums[:2]
        dk_sum[tile.keys] += dk_SxW
        dv_sum[tile.keys] += dv_SxW
        if tile is self.tiles[-1]:
            chunk_K = slice(self.size.halo, self.size.halo + self.size.chunk)
            is_last = self.q_chunk == self.last_q_chunk
            pl.when(is_last)(lambda: self.write_keys(dk_sum[chunk_K], dv_sum[chunk_K]))

    def write_keys(self, dk_KxW: Array, dv_KxW: Array) -> None:
        self.dk_ref[...] = (dk_KxW * math.log(2)).astype(self.dk_ref.dtype)
        self.dv_ref[...] = dv_KxW.astype(self.dv_ref.dtype)
