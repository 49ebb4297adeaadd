"""The loss by position in the row, and by distance of the nearest copy of the token, in octaves: 1, 2-3, 4-7, ...

Dimensions: B rows, L tokens in a row, K predictions in a row, C columns of RowSums, T octaves of L and "no copy".
"""

import jax
import jax.numpy as jnp
from jax import Array

from mlm.model.loss import RowSums
from mlm.model.masking import Masked

# and their heads
TABLES = {"by_position": "position in the row", "by_copy_distance": "distance of the nearest copy"}


def names(table: str, count: int) -> list[str]:
    """Returns the names of a table's `count` lines."""
    octaves = [f"{2**t}-{2 ** (t + 1) - 1}" for t in range(1, count - 1)]
    return ["0-1" if table == "by_position" else "1", *octaves, "no copy"]


def sums(scores: RowSums, ids_BxL: Array, segments_BxL: Array, masked: Masked) -> Array:
    """Returns the sums for each line of both tables, float32 [B, 2, T, C], given the scores of each prediction, [B, K].

    Copies are other tokens of the same original id and segment that the model sees: not predicted, whether they are
    masked, replaced or kept.
    """
    octaves = (ids_BxL.shape[1] - 1).bit_length()

    def row_bins(ids_L: Array, segments_L: Array, positions_K: Array, weights_K: Array) -> Array:
        # padding is a segment of its own
        visible_L = jnp.ones(ids_L.shape, bool).at[positions_K].set(weights_K == 0)
        # XLA takes the minimum without writing [K, L] to memory
        is_copy_KxL = (
            visible_L
            & (ids_L == ids_L[positions_K][:, None])
            & (segments_L == segments_L[positions_K][:, None])
        )
        places_L = jnp.arange(len(ids_L), dtype=jnp.int32)
        away_KxL = jnp.abs(places_L - positions_K[:, None])
        distance_K = jnp.min(jnp.where(is_copy_KxL, away_KxL, 2**octaves), axis=-1)
        distances_2xK = jnp.stack([positions_K, distance_K])
        return 31 - jax.lax.clz(jnp.maximum(distances_2xK, 1))  # floor(log2)

    bins_Bx2xK = jax.vmap(row_bins)(ids_BxL, segments_BxL, masked.positions_BxK, masked.weights_BxK)
    lines_Tx1x1 = jnp.arange(octaves + 1, dtype=jnp.int32)[:, None, None]
    scores_BxCxK = jnp.stack(scores, axis=1)
    in_line_Bx2xTx1xK = bins_Bx2xK[:, :, None, None] == lines_Tx1x1
    return jnp.sum(jnp.where(in_line_Bx2xTx1xK, scores_BxCxK[:, None, None], 0), axis=-1)
