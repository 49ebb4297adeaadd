"""Attention in plain jax: to the whole row, or to a window around each token (Beltagy et al., 2020, Longformer, 3.1).

Little more than the window is computed if a row is longer than three times `window` (tokens to each side). Positions
may be rotary (Su et al., 2021, RoFormer). None depends on an ordinary token, so no replacement token can shift them.

Dimensions: B rows, L tokens in a row, Q queries and K keys, H hidden size = N heads x D head size.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Rotation = tuple[Array, Array]  # cosine and sine of the angles of rotary positions, [B or 1, L, D / 2]
# (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL or None, rotation or None) -> context_BxLxH. Segments are
# int32: the document of each token, 0 for padding. The probabilities of all rows and heads are multiplied by one mask,
# keys x queries. Queries and keys are rotated first.
Attention = Callable[[Array, Array, Array, Array, Array | None, Rotation | None], Array]


def position_ids(attention_BxL: Array, first: int) -> Array:
    """Returns `first`, `first` + 1, ... on real tokens, one less than `first` on padding."""
    attention_BxL = attention_BxL.astype(jnp.int32)
    return jnp.cumsum(attention_BxL, axis=-1) * attention_BxL + (first - 1)


def segment_and_position_ids(
    ids_BxL: Array, attention_BxL: Array, first: int, cls_id: int | None = None
) -> tuple[Array, Array]:
    """Returns segments_BxL (documents from 1 up, 0 for padding) and positions_BxL, which start again at `cls_id`."""
    segments_BxL, positions_BxL = attention_BxL.astype(jnp.int32), position_ids(attention_BxL, first)
    if cls_id is None:
        return segments_BxL, positions_BxL
    starts_BxL = (ids_BxL == cls_id) & (segments_BxL > 0)
    before_BxL = jax.lax.cummax(jnp.where(starts_BxL, positions_BxL - first, 0), axis=1)
    documents_BxL = segments_BxL * (1 + jnp.cumsum(starts_BxL, axis=1))
    return documents_BxL, positions_BxL - segments_BxL * before_BxL


def xla(*, heads: int, isolated: bool, window: int = 0) -> Attention:
    """Returns the kernel that runs on any device; `window` is in tokens to each side, 0 for the whole row.

    With `isolated`, tokens attend only within their document.
    """
    return functools.partial(rotated, functools.partial(_xla, heads=heads, isolated=isolated, window=window))


def rotated(kernel, q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, **kwargs) -> Array:
    """Rotates queries and keys, then calls a kernel that does not."""
    if rotation is not None:
        q_BxLxH, k_BxLxH = (rotate(x, *rotation) for x in (q_BxLxH, k_BxLxH))
    return kernel(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, **kwargs)


def rotate(x_BxLxH: Array, cos: Array, sin: Array) -> Array:
    """Returns x rotated by the angles (RoFormer): a head's first and second half are the planes' two coordinates."""
    rows, length, _ = x_BxLxH.shape
    halves = x_BxLxH.astype(jnp.float32).reshape(rows, length, -1, 2, cos.shape[-1])
    first, second = halves[..., 0, :], halves[..., 1, :]
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated_halves = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated_halves.reshape(x_BxLxH.shape).astype(x_BxLxH.dtype)


def allowed_keys(queries_BxQ: Array, keys_BxK: Array, isolated: bool, window: int, first: int = 0) -> Array:
    """Returns which keys each query attends to, bool, broadcastable to [B, 1, Q, K], given the segments of both.

    Key `first` is at query 0, from which a window counts.
    """
    allowed = (keys_BxK > 0)[:, None, None, :]
    if isolated:
        allowed = allowed & (queries_BxQ[:, None, :, None] == keys_BxK[:, None, None, :])
    if window:
        query_Q, key_K = (jnp.arange(segments.shape[1]) for segments in (queries_BxQ, keys_BxK))
        allowed = allowed & (jnp.abs(query_Q[:, None] + first - key_K) <= window)
    return allowed


def _xla(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, *, heads, isolated, window):
    if 0 < 3 * window < segments_BxL.shape[1]:
        return _blocks(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, heads, isolated, window)
    allowed = allowed_keys(segments_BxL, segments_BxL, isolated, window)
    return weigh(q_BxLxH, k_BxLxH, v_BxLxH, allowed, dropout_mask_LxL, heads)


def weigh(q_BxQxH, k_BxKxH, v_BxKxH, allowed_Bx1xQxK, dropout_mask, heads) -> Array:
    """Attention to the allowed keys; `dropout_mask` is [K, Q], or [B, 1, K, Q], or None."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxQxH, k_BxKxH, v_BxKxH))
    bias = jnp.where(allowed_Bx1xQxK, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q / math.sqrt(q.shape[-1]), k) + bias
    probs_BxNxQxK = jax.nn.softmax(scores_BxNxQxK)
    if dropout_mask is not None:
        probs_BxNxQxK = probs_BxNxQxK * dropout_mask.mT
    return jnp.einsum("bnqk,bknd->bqnd", probs_BxNxQxK, v).reshape(q_BxQxH.shape)


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
        dropout_mask = jnp.tile(cut(jnp.arange(0, length, window)), (rows, 1, 1))[:, None]
    allowed = allowed_keys(blocks(segments_BxL, 0), blocks(segments_BxL, 1), isolated, window, first=window)
    context = weigh(blocks(q_BxLxH, 0), blocks(k_BxLxH, 1), blocks(v_BxLxH, 1), allowed, dropout_mask, heads)
    return context.reshape(rows, count * window, -1)[:, :length]
