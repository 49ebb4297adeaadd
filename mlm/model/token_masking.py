"""Masks drawn on the device, a pure function of (seed, record, epoch).

Which tokens are masked never depends on the batch size, the devices and hosts, or on restarts: each row has a key of
its own, and threefry gives the same bits everywhere.

Dimensions: B rows, L tokens in a row, K predictions in a row (static), V entries of the vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mlm.model.keys import in_32_bits


class Masked(NamedTuple):
    """A batch with masks drawn; predictions of weight 0 fill up rows that have fewer than K."""

    ids_BxL: Array  # int32: what the model reads
    attention_BxL: Array  # int32: 1 for tokens, 0 for padding
    positions_BxK: Array  # int32: where it predicts, distinct within a row
    labels_BxK: Array  # int32: the original tokens there
    weights_BxK: Array  # float32: 1 for a prediction, 0 for a filler


# (key, ids_BxL, attention_BxL, record_B, epoch_B) -> the batch's masks, a pure function of the key and of each row's
# record and epoch: a TokenMasking, or your own.
Masking = Callable[[Array, Array, Array, Array, Array], Masked]


@dataclasses.dataclass(frozen=True)
class TokenMasking:
    """BERT's masking (Devlin et al., 2019, 3.1), drawn anew for each epoch as in RoBERTa (Liu et al., 2019, 4.1).

    A row with m ordinary tokens gets `rate * m` predictions, rounded up or down at random so that the mean is exact.
    Special tokens are never predicted, and never drawn as a replacement.
    """

    rate: float
    mask_share: float  # of the predictions; half of the others are random, half are kept
    mask_id: int
    special_ids: tuple[int, ...]
    vocab_size: int

    def max_predictions_per_row(self, length: int) -> int:
        """Returns K for rows of `length` tokens."""
        return math.ceil(self.rate * length)

    @in_32_bits
    def __call__(
        self,
        key: Array,
        ids_BxL: Array,
        attention_BxL: Array,
        record_B: Array,
        epoch_B: Array,
    ) -> Masked:
        """Draws the masks of a batch."""

        def mask_row(ids_L: Array, attention_L: Array, record: Array, epoch: Array) -> Masked:
            row_key = jax.random.fold_in(jax.random.fold_in(key, record), epoch)
            special_V = np.isin(np.arange(self.vocab_size), self.special_ids)
            ordinary_L = (attention_L > 0) & ~jnp.asarray(special_V)[ids_L]
            return self._mask_row(row_key, ids_L, ordinary_L)._replace(attention_BxL=attention_L)

        return jax.vmap(mask_row)(ids_BxL, attention_BxL, record_B, epoch_B)

    def _mask_row(self, key: Array, ids_L: Array, ordinary_L: Array) -> Masked:
        length = len(ids_L)
        count = self.max_predictions_per_row(length)
        bits = jax.random.bits(key, (length + 2 * count + 1,), jnp.uint32)
        score_L, kind_K, token_K, rounding = jnp.split(
            bits, (length, length + count, length + 2 * count)
        )
        predictions = self._count(ordinary_L, rounding[0])
        order_L = jnp.where(ordinary_L, (score_L >> 1).astype(jnp.int32), -1)
        # a uniform choice: the largest random scores
        _, positions_K = jax.lax.top_k(order_L, count)
        weights_K = (jnp.arange(count, dtype=jnp.int32) < predictions).astype(jnp.float32)
        return self._masked(ids_L, positions_K, weights_K, kind_K, token_K)

    def _count(self, ordinary_L: Array, bits: Array) -> Array:
        """Returns rate * m, rounded at random; int32."""
        ordinary = jnp.sum(ordinary_L, dtype=jnp.int32)
        expected = self.rate * ordinary + uniform(bits)
        limit = jnp.minimum(self.max_predictions_per_row(len(ordinary_L)), ordinary)
        return jnp.minimum(jnp.floor(expected).astype(jnp.int32), limit)

    def _masked(
        self, ids_L: Array, positions_K: Array, weights_K: Array, kind_K: Array, token_K: Array
    ) -> Masked:
        """Masks, replaces or keeps each predicted token, as the random bits `kind_K` and `token_K` decide."""
        labels_K = ids_L[positions_K]
        kind_K = uniform(kind_K)
        ordinary_ids = np.setdiff1d(np.arange(self.vocab_size), self.special_ids).astype(np.int32)
        random_K = jnp.asarray(ordinary_ids)[token_K % len(ordinary_ids)]
        replaced_K = jnp.where(kind_K < (1 + self.mask_share) / 2, random_K, labels_K)
        replaced_K = jnp.where(kind_K < self.mask_share, self.mask_id, replaced_K)
        read_K = jnp.where(weights_K > 0, replaced_K, labels_K)
        return Masked(ids_L.at[positions_K].set(read_K), None, positions_K, labels_K, weights_K)


def uniform(bits: Array) -> Array:
    """Returns float32 in [0, 1) from uint32 bits: 24 of them, so that every value is exact."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
