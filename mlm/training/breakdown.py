"""The loss by position in the row, and by distance of the nearest copy of the token, in octaves: 1, 2-3, 4-7, ...

Dimensions: B rows, L tokens in a row, K predictions in a row, C columns of RowSums, T octaves of L and "no copy".
"""

import jax
import jax.numpy as jnp
from jax import Array

from mlm.model.loss import RowSums
from mlm.model.token_masking import Masked

# and their heads
TABLES = {"by_position": "position in the row", "by_copy_distance": "distance of the nearest copy"}
LONGEST = 2**15  # tokens in a row: `copy_distances` counts in int32


def names(table: str, count: int) -> list[str]:
    """Returns the names of a table's `count` lines."""
    octaves = [f"{2**t}-{2 ** (t + 1) - 1}" for t in range(1, count - 1)]
    return ["0-1" if table == "by_position" else "1", *octaves, "no copy"]


def sums(scores: RowSums, ids_BxL: Array, segments_BxL: Array, masked: Masked) -> Array:
    """Returns the sums for each line of both tables, float32 [B, 2, T, C], given the scores of each prediction, [B, K].

    Copies are other tokens of the same original id and segment that the model sees: not predicted, whether they are
    masked, replaced or kept.
    """

    def row_bins(ids_L: Array, segments_L: Array, positions_K: Array, weights_K: Array) -> Array:
        # padding is a segment of its own
        visible_L = jnp.ones(ids_L.shape, bool).at[positions_K].set(weights_K == 0)
        distance_L = copy_distances(ids_L, segments_L, visible_L)
        distances_2xK = jnp.stack([positions_K, distance_L[positions_K]])
        return 31 - jax.lax.clz(jnp.maximum(distances_2xK, 1))  # floor(log2)

    bins_Bx2xK = jax.vmap(row_bins)(ids_BxL, segments_BxL, masked.positions_BxK, masked.weights_BxK)
    lines_Tx1x1 = jnp.arange(_octaves(ids_BxL.shape[1]) + 1, dtype=jnp.int32)[:, None, None]
    scores_BxCxK = jnp.stack(scores, axis=1)
    in_line_Bx2xTx1xK = bins_Bx2xK[:, :, None, None] == lines_Tx1x1
    return jnp.sum(jnp.where(in_line_Bx2xTx1xK, scores_BxCxK[:, None, None], 0), axis=-1)


def copy_distances(ids_L: Array, segments_L: Array, visible_L: Array) -> Array:
    """Returns how far the nearest visible token of the same id and segment is, int32; 2**octaves where there is none.

    A visible token finds itself. Sorting takes L log L steps, and no [K, L] array.
    """
    size = 2 ** _octaves(len(ids_L))
    columns = (segments_L, ids_L, jnp.arange(len(ids_L), dtype=jnp.int32), visible_L)
    # stable: by position within a group
    segments_L, ids_L, position_L, visible_L = jax.lax.sort(columns, num_keys=2)
    other_L = (segments_L[1:] != segments_L[:-1]) | (ids_L[1:] != ids_L[:-1])
    group_L = jnp.append(0, jnp.cumsum(other_L, dtype=jnp.int32))
    offset_L = group_L * (2 * size) + position_L  # more than `size` between two groups
    before_L = jax.lax.cummax(jnp.where(visible_L, offset_L, -size))
    after_L = jax.lax.cummin(jnp.where(visible_L, offset_L, jnp.iinfo(jnp.int32).max), reverse=True)
    distance_L = jnp.minimum(jnp.minimum(offset_L - before_L, after_L - offset_L), size)
    return jax.lax.sort((position_L, distance_L), num_keys=1)[1]


def _octaves(length: int) -> int:
    return (length - 1).bit_length()
