"""The masked-language-model loss as sums and weights: they add up over rows, microbatches, devices and hosts.

Dimensions: B rows, K predictions in a row, V entries of the (padded) vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class RowSums(NamedTuple):
    """Per row, float32: divide sums of them once, at the end."""

    loss_B: jax.Array  # cross entropy in nats, summed over the row's predictions
    weight_B: jax.Array  # number of predictions
    correct_B: jax.Array  # predictions whose largest logit is the label's


def masked_cross_entropy(
    logits_BxKxV: jax.Array, labels_BxK: jax.Array, weights_BxK: jax.Array, vocab_size: int
) -> RowSums:
    """Cross entropy in float32 over the first `vocab_size` entries; the padding of the vocabulary has probability 0."""
    loss_BxK, correct_BxK = cross_entropy(logits_BxKxV, labels_BxK, vocab_size)
    return RowSums(
        loss_B=jnp.sum(loss_BxK * weights_BxK, axis=-1),
        weight_B=jnp.sum(weights_BxK, axis=-1),
        correct_B=jnp.sum(correct_BxK * weights_BxK, axis=-1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits_BxKxV: jax.Array, labels_BxK: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns (cross entropy in nats, is the largest logit the label's; the first of several largest), float32 [B, K].

    The derivative is the softmax less 1 at the label, in one pass and in the type of the logits: a plain derivative
    scatters the labels, and argmax is one more pass over the vocabulary.
    """
    return _forward(logits_BxKxV, labels_BxK, vocab_size)[0]


def _forward(logits_BxKxV: jax.Array, labels_BxK: jax.Array, vocab_size: int) -> tuple:
    masked_BxKxV = mask_padding(logits_BxKxV.astype(jnp.float32), vocab_size)
    label_logit_BxK = jnp.take_along_axis(logits_BxKxV, labels_BxK[..., None], axis=-1)[..., 0].astype(jnp.float32)
    largest_BxK = jnp.max(masked_BxKxV, axis=-1)
    total_BxK = jnp.sum(jnp.exp(masked_BxKxV - largest_BxK[..., None]), axis=-1)
    log_total_BxK = largest_BxK + jnp.log(total_BxK)
    before_BxKxV = _entries(logits_BxKxV) < labels_BxK[..., None]
    tied_BxK = jnp.any((masked_BxKxV == label_logit_BxK[..., None]) & before_BxKxV, axis=-1)
    correct_BxK = (label_logit_BxK == largest_BxK) & ~tied_BxK
    out = log_total_BxK - label_logit_BxK, correct_BxK.astype(jnp.float32)
    return out, (logits_BxKxV, labels_BxK, log_total_BxK)


def _backward(vocab_size: int, saved: tuple, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    logits_BxKxV, labels_BxK, log_total_BxK = saved
    share_BxKxV = jnp.exp(mask_padding(logits_BxKxV.astype(jnp.float32), vocab_size) - log_total_BxK[..., None])
    label_BxKxV = _entries(logits_BxKxV) == labels_BxK[..., None]
    return ((share_BxKxV - label_BxKxV) * grads[0][..., None]).astype(logits_BxKxV.dtype), None


cross_entropy.defvjp(_forward, _backward)


def _entries(logits_BxKxV: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, logits_BxKxV.shape, logits_BxKxV.ndim - 1)


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Sets the logits of the entries that pad the vocabulary, the last axis, to minus infinity."""
    if logits.shape[-1] == vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
