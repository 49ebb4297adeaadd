"""The masked-language-model loss as sums and weights: they add up over rows, microbatches, devices and hosts.

Dimensions: B rows, K predictions in a row, V entries of the (padded) vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowSums(NamedTuple):
    """Per row, float32: divide sums of them once, at the end."""

    loss_B: jax.Array  # cross entropy in nats, summed over the row's predictions
    weight_B: jax.Array  # number of predictions
    correct_B: jax.Array  # predictions whose largest logit is the label's


def masked_cross_entropy(
    logits_BxKxV: jax.Array, labels_BxK: jax.Array, weights_BxK: jax.Array, vocab_size: int
) -> RowSums:
    """Cross entropy in float32 over the first `vocab_size` entries; the padding of the vocabulary has probability 0."""
    logits_BxKxV = mask_padding(logits_BxKxV.astype(jnp.float32), vocab_size)
    log_total_BxK = jax.nn.logsumexp(logits_BxKxV, axis=-1)
    label_logit_BxK = jnp.take_along_axis(logits_BxKxV, labels_BxK[..., None], axis=-1)[..., 0]
    correct_BxK = jnp.argmax(logits_BxKxV, axis=-1) == labels_BxK
    return RowSums(
        loss_B=jnp.sum((log_total_BxK - label_logit_BxK) * weights_BxK, axis=-1),
        weight_B=jnp.sum(weights_BxK, axis=-1),
        correct_B=jnp.sum(correct_BxK * weights_BxK, axis=-1),
    )


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Sets the logits of the entries that pad the vocabulary, the last axis, to minus infinity."""
    if logits.shape[-1] == vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
