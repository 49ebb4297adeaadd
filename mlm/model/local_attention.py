"""Local attention in plain jax: a token attends to a window around it (Beltagy et al., 2020, Longformer, 3.1).

Little more than that is computed if a row is longer than three times `window` (tokens to each side).

Dimensions: B rows, L tokens, H hidden size.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from mlm.model.module import Attention, allowed_keys, weigh
from mlm.model.rotary import rotate


def xla(*, heads: int, isolated: bool, window: int) -> Attention:
    """Returns the kernel, as `module.xla`, for windows of `window` tokens to each side."""
    return functools.partial(rotated, functools.partial(_xla, heads=heads, isolated=isolated, window=window))


def rotated(kernel, q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, **kwargs) -> Array:
    """Rotates queries and keys, then calls a kernel that does not."""
    if rotation is not None:
        q_BxLxH, k_BxLxH = (rotate(x, *rotation) for x in (q_BxLxH, k_BxLxH))
    return kernel(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, **kwargs)


def near_keys(queries_BxQ: Array, keys_BxK: Array, isolated: bool, window: int, first: int = 0) -> Array:
    """Returns `allowed_keys` within the window, if that is not 0; key `first` is at query 0."""
    allowed = allowed_keys(queries_BxQ, keys_BxK, isolated)
    if window:
        query_Q, key_K = (jnp.arange(segments.shape[1], dtype=jnp.int32) for segments in (queries_BxQ, keys_BxK))
        allowed = allowed & (jnp.abs(query_Q[:, None] + first - key_K) <= window)
    return allowed


def _xla(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, *, heads, isolated, window):
    if 3 * window < segments_BxL.shape[1]:
        return _blocks(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, heads, isolated, window)
    allowed = near_keys(segments_BxL, segments_BxL, isolated, window)
    return weigh(q_BxLxH, k_BxLxH, v_BxLxH, allowed, dropout_mask_LxL, heads)


def _blocks(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, heads, isolated, window):
    """Local attention: a block of `window` queries attends to the keys of that block and of both adjacent ones."""
    rows, length = segments_BxL.shape
    count = -(-length // window)

    def blocks(x_BxL: Array, beside: int) -> Array:
        """Returns each block's tokens and those of `beside` blocks on both sides, 0 beyond the row."""
        ends = (beside * window, (beside + count) * window - length)
        padded = jnp.pad(x_BxL, [(0, 0), ends, *[(0, 0)] * (x_BxL.ndim - 2)])
        padded = padded.reshape(rows, count + 2 * beside, window, *x_BxL.shape[2:])
        near = jnp.concatenate([padded[:, i : i + count] for i in range(2 * beside + 1)], axis=2)
        return near.reshape(rows * count, -1, *x_BxL.shape[2:])

    dropout_mask = None
    if dropout_mask_LxL is not None:
        rest = count * window - length
        padded = jnp.pad(dropout_mask_LxL, [(window, window + rest), (0, rest)])
        cut = jax.vmap(lambda start: jax.lax.dynamic_slice(padded, (start, start), (3 * window, window)))
        dropout_mask = jnp.tile(cut(jnp.arange(0, length, window, dtype=jnp.int32)), (rows, 1, 1))[:, None]
    allowed = near_keys(blocks(segments_BxL, 0), blocks(segments_BxL, 1), isolated, window, first=window)
    context = weigh(blocks(q_BxLxH, 0), blocks(k_BxLxH, 1), blocks(v_BxLxH, 1), allowed, dropout_mask, heads)
    return context.reshape(rows, count * window, -1)[:, :length]
