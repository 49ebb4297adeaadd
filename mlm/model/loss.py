"""The masked-language-model loss as sums and weights, which add up over rows, microbatches, devices and hosts.

Dimensions: B rows, K predictions in a row, N = B x K, V entries of the (padded) vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Mean(NamedTuple):
    """A metric as a sum and its weight, float32, of each row or in all: add them up, and divide once, at the end."""

    sum: Array
    weight: Array


class RowSums(NamedTuple):
    """Float32 sums of each row (or prediction): add them up, and divide once, at the end."""

    loss_B: Array  # cross entropy in nats, summed over the row's predictions
    weight_B: Array  # number of predictions
    # predictions whose largest logit is the label's; None where nothing can be correct
    correct_B: Array | None

    def metrics(self) -> dict[str, Mean]:
        """Returns the loss and, if there is one, the accuracy, as sums and weights."""
        metrics = {"loss": Mean(self.loss_B, self.weight_B)}
        if self.correct_B is not None:
            metrics["accuracy"] = Mean(self.correct_B, self.weight_B)
        return metrics


def masked_cross_entropy(
    logits_BxKxV: Array, labels_BxK: Array, weights_BxK: Array, vocab_size: int
) -> RowSums:
    """Cross entropy in float32 over the first `vocab_size` entries; the padding of the vocabulary has probability 0."""
    return sum_rows(prediction_scores(logits_BxKxV, labels_BxK, weights_BxK, vocab_size))


def prediction_scores(
    logits_BxKxV: Array, labels_BxK: Array, weights_BxK: Array, vocab_size: int
) -> RowSums:
    """Returns the loss, weight and correctness of each prediction, [B, K]."""
    logits_NxV = logits_BxKxV.reshape(-1, logits_BxKxV.shape[-1])
    scores = cross_entropy(logits_NxV, labels_BxK.reshape(-1), vocab_size)
    loss_BxK, correct_BxK = (score_N.reshape(labels_BxK.shape) * weights_BxK for score_N in scores)
    return RowSums(loss_BxK, weights_BxK, correct_BxK)


def sum_rows(scores: RowSums) -> RowSums:
    """Returns the sums over the predictions of each row."""
    return RowSums(*(jnp.sum(score_BxK, axis=-1) for score_BxK in scores))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits_NxV: Array, labels_N: Array, vocab_size: int) -> tuple[Array, Array]:
    """Returns (cross entropy in nats, 1 where the first of the largest logits is the label's), float32 [N].

    On a TPU it takes two passes over the logits and one for the derivative, where plain code takes five and a scatter.
    """
    return _forward(logits_NxV, labels_N, vocab_size)[0]


def _forward(logits_NxV: Array, labels_N: Array, vocab_size: int) -> tuple:
    masked_NxV = mask_padding(logits_NxV.astype(jnp.float32), vocab_size)
    largest_N = jnp.max(masked_NxV, axis=-1)
    inputs = (masked_NxV, jnp.exp(masked_NxV - largest_N[:, None]), labels_N)
    # XLA may take the maximum of bfloat16 logits before they are rounded, and read the label's after it
    # (xla_allow_excess_precision). So `largest_N` only scales, and all else is of one reduction over the same values.
    # Float32 logits are never rounded, and a CPU is faster with separate reductions.
    if logits_NxV.dtype == jnp.float32:
        separately = functools.partial(_reduce_float32, logits_NxV, largest_N)
        sums = lax.platform_dependent(*inputs, cpu=separately, default=_reduce_at_once)
    else:
        sums = _reduce_at_once(*inputs)
    total_N, label_logit_N, correct_N = sums
    log_total_N = largest_N + jnp.log(total_N)
    return (log_total_N - label_logit_N, correct_N.astype(jnp.float32)), (
        logits_NxV,
        labels_N,
        log_total_N,
    )


def _reduce_at_once(masked_NxV: Array, exp_NxV: Array, labels_N: Array) -> tuple[Array, ...]:
    """Returns (sum of exp_NxV, logit of the label, whether the first of the largest logits is the label's), [N]."""
    entries_NxV = lax.broadcasted_iota(jnp.int32, masked_NxV.shape, 1)
    label_logit_NxV = jnp.where(entries_NxV == labels_N[:, None], masked_NxV, 0)
    start = (jnp.float32(0), jnp.float32(0), jnp.float32(-jnp.inf), jnp.int32(masked_NxV.shape[1]))

    def combine(x: tuple[Array, ...], y: tuple[Array, ...]) -> tuple[Array, ...]:
        take_y = (y[2] > x[2]) | ((y[2] == x[2]) & (y[3] < x[3]))
        return (
            x[0] + y[0],
            x[1] + y[1],
            jnp.where(take_y, y[2], x[2]),
            jnp.where(take_y, y[3], x[3]),
        )

    columns = (exp_NxV, label_logit_NxV, masked_NxV, entries_NxV)
    total_N, label_logit_N, _, best_N = lax.reduce(columns, start, combine, (1,))
    return total_N, label_logit_N, best_N == labels_N


def _reduce_float32(
    logits_NxV: Array, largest_N: Array, masked_NxV: Array, exp_NxV: Array, labels_N: Array
) -> tuple[Array, ...]:
    """Returns what `_reduce_at_once` does; compares logits, which must not be rounded ones."""
    label_logit_Nx1 = jnp.take_along_axis(logits_NxV, labels_N[:, None], axis=-1)
    entries_NxV = lax.broadcasted_iota(jnp.int32, masked_NxV.shape, 1)
    earlier_tie_NxV = (masked_NxV == label_logit_Nx1) & (entries_NxV < labels_N[:, None])
    correct_N = (label_logit_Nx1[:, 0] == largest_N) & ~jnp.any(earlier_tie_NxV, axis=1)
    return jnp.sum(exp_NxV, axis=1), label_logit_Nx1[:, 0], correct_N


def _backward(vocab_size: int, saved: tuple, grads: tuple[Array, Array]) -> tuple[Array, None]:
    logits_NxV, labels_N, log_total_N = saved
    probs_NxV = jnp.exp(
        mask_padding(logits_NxV.astype(jnp.float32), vocab_size) - log_total_N[:, None]
    )
    label_NxV = lax.broadcasted_iota(jnp.int32, logits_NxV.shape, 1) == labels_N[:, None]
    return ((probs_NxV - label_NxV) * grads[0][:, None]).astype(logits_NxV.dtype), None


cross_entropy.defvjp(_forward, _backward)


def mask_padding(logits: Array, vocab_size: int) -> Array:
    """Sets the logits of the entries that pad the vocabulary, the last axis, to minus infinity."""
    if logits.shape[-1] == vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1], dtype=jnp.int32) < vocab_size, logits, -jnp.inf)
