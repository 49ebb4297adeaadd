"""The masked-language-model loss as sums and weights, which add up over rows, microbatches, devices and hosts.

Dimensions: B rows, K predictions in a row, N = B x K, V entries of the (padded) vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class RowSums(NamedTuple):
    """Float32 sums of each row (or prediction): add them up, and divide once, at the end."""

    loss_B: Array  # cross entropy in nats, summed over the row's predictions
    weight_B: Array  # number of predictions
    correct_B: Array  # predictions whose largest logit is the label's


def masked_cross_entropy(logits_BxKxV: Array, labels_BxK: Array, weights_BxK: Array, vocab_size: int) -> RowSums:
    """Cross entropy in float32 over the first `vocab_size` entries; the padding of the vocabulary has probability 0."""
    return sum_rows(prediction_scores(logits_BxKxV, labels_BxK, weights_BxK, vocab_size))


def prediction_scores(logits_BxKxV: Array, labels_BxK: Array, weights_BxK: Array, vocab_size: int) -> RowSums:
    """Returns the loss, weight and correctness of each prediction, [B, K]."""
    logits_NxV = logits_BxKxV.reshape(-1, logits_BxKxV.shape[-1])
    found = cross_entropy(logits_NxV, labels_BxK.reshape(-1), vocab_size)
    loss_BxK, correct_BxK = (each_N.reshape(labels_BxK.shape) * weights_BxK for each_N in found)
    return RowSums(loss_BxK, weights_BxK, correct_BxK)


def sum_rows(scores: RowSums) -> RowSums:
    """Returns the sums over the predictions of each row."""
    return RowSums(*(jnp.sum(each_BxK, axis=-1) for each_BxK in scores))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits_NxV: Array, labels_N: Array, vocab_size: int) -> tuple[Array, Array]:
    """Returns (cross entropy in nats, 1 where the first of the largest logits is the label's), float32 [N].

    On a TPU it takes two passes over the logits and one for the derivative, where plain code takes five and a scatter.
    """
    return _forward(logits_NxV, labels_N, vocab_size)[0]


def _forward(logits_NxV: Array, labels_N: Array, vocab_size: int) -> tuple:
    masked_NxV = mask_padding(logits_NxV.astype(jnp.float32), vocab_size)
    label_logit_Nx1 = jnp.take_along_axis(logits_NxV, labels_N[:, None], axis=-1).astype(jnp.float32)
    largest_Nx1 = jnp.max(masked_NxV, axis=-1, keepdims=True)
    entries_NxV = lax.broadcasted_iota(jnp.int32, logits_NxV.shape, 1)
    earlier_tie_NxV = (masked_NxV == label_logit_Nx1) & (entries_NxV < labels_N[:, None])
    exp_NxV = jnp.exp(masked_NxV - largest_Nx1)
    total_N, tied_N = lax.platform_dependent(
        exp_NxV, earlier_tie_NxV, tpu=_sum_and_any, default=lambda x, flag: (jnp.sum(x, axis=1), jnp.any(flag, axis=1))
    )
    log_total_N = largest_Nx1[:, 0] + jnp.log(total_N)
    correct_N = (label_logit_Nx1 == largest_Nx1)[:, 0] & ~tied_N
    return (log_total_N - label_logit_Nx1[:, 0], correct_N.astype(jnp.float32)), (logits_NxV, labels_N, log_total_N)


def _sum_and_any(x_NxV: Array, flag_NxV: Array) -> tuple[Array, Array]:
    """Sum and any over axis 1 in one explicit pass: a TPU's compiler would make two, a CPU is slower with it."""
    zero = jnp.zeros((), jnp.float32)
    add = lambda x, y: (x[0] + y[0], x[1] + y[1])  # noqa: E731
    total_N, count_N = lax.reduce((x_NxV, flag_NxV.astype(jnp.float32)), (zero, zero), add, (1,))
    return total_N, count_N > 0


def _backward(vocab_size: int, saved: tuple, grads: tuple[Array, Array]) -> tuple[Array, None]:
    logits_NxV, labels_N, log_total_N = saved
    probs_NxV = jnp.exp(mask_padding(logits_NxV.astype(jnp.float32), vocab_size) - log_total_N[:, None])
    label_NxV = lax.broadcasted_iota(jnp.int32, logits_NxV.shape, 1) == labels_N[:, None]
    return ((probs_NxV - label_NxV) * grads[0][:, None]).astype(logits_NxV.dtype), None


cross_entropy.defvjp(_forward, _backward)


def mask_padding(logits: Array, vocab_size: int) -> Array:
    """Sets the logits of the entries that pad the vocabulary, the last axis, to minus infinity."""
    if logits.shape[-1] == vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
