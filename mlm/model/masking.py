"""Masks drawn on the device, a pure function of (seed, record, epoch).

Which tokens are masked never depends on the batch size, the number of devices or hosts, or how often a run was
restarted: each row has a key of its own, and threefry gives the same bits everywhere.

Dimensions: B rows, L tokens in a row, K predictions in a row (static), V entries of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Masked(NamedTuple):
    """A batch with masks drawn. Slots of weight 0 fill rows that have fewer than K predictions."""

    ids_BxL: jax.Array  # int32: what the model reads
    positions_BxK: jax.Array  # int32: where it predicts, distinct within a row
    labels_BxK: jax.Array  # int32: the original tokens there
    weights_BxK: jax.Array  # float32: 1 for a prediction, 0 for an empty slot


@dataclasses.dataclass(frozen=True)
class TokenMasking:
    """BERT's masking (Devlin et al., 2019, 3.1), drawn anew for each epoch as in RoBERTa (Liu et al., 2019, 4.1).

    A row with m ordinary tokens gets `rate * m` predictions, rounded up or down at random so that the mean is exact.
    Special tokens are never predicted, and never drawn as a replacement.

    Attributes:
      rate: share of the ordinary tokens that are predicted.
      mask_share: share of the predictions whose token is replaced by the mask token.
      random_share: share whose token is replaced by an ordinary token drawn uniformly. The rest keeps its token.
      mask_id: id of the mask token.
      special_ids: all ids that are special tokens.
      vocab_size: V, the tokenizer's; ids from there up do not exist.
    """

    rate: float
    mask_share: float
    random_share: float
    mask_id: int
    special_ids: tuple[int, ...]
    vocab_size: int

    def slots(self, length: int) -> int:
        """Returns K for rows of `length` tokens."""
        return math.ceil(self.rate * length)

    def __call__(
        self, key: jax.Array, ids_BxL: jax.Array, attention_BxL: jax.Array, record_B: jax.Array, epoch_B: jax.Array
    ) -> Masked:
        """Draws the masks of a batch; `key` stands for the mask seed, `record_B` and `epoch_B` are uint32."""
        return jax.vmap(self._row, in_axes=(None, 0, 0, 0, 0))(key, ids_BxL, attention_BxL, record_B, epoch_B)

    def _row(
        self, key: jax.Array, ids_L: jax.Array, attention_L: jax.Array, record: jax.Array, epoch: jax.Array
    ) -> Masked:
        length = ids_L.shape[0]
        slots = self.slots(length)
        key = jax.random.fold_in(jax.random.fold_in(key, record), epoch)
        bits = jax.random.bits(key, (length + 2 * slots + 1,))
        score_L, kind_K, token_K, rounding = jnp.split(bits, (length, length + slots, length + 2 * slots))

        ordinary_L = (attention_L > 0) & ~self._is_special()[ids_L]
        wanted = self.rate * jnp.sum(ordinary_L) + _unit(rounding[0])
        count = jnp.minimum(jnp.floor(wanted).astype(jnp.int32), jnp.minimum(slots, jnp.sum(ordinary_L)))
        order_L = jnp.where(ordinary_L, (score_L >> 1).astype(jnp.int32), -1)
        _, positions_K = jax.lax.top_k(order_L, slots)  # a uniform choice: the largest random scores
        weights_K = (jnp.arange(slots) < count).astype(jnp.float32)

        labels_K = ids_L[positions_K]
        kind_K = _unit(kind_K)
        random_K = self._ordinary_ids()[token_K % (self.vocab_size - len(set(self.special_ids)))]
        replaced_K = jnp.where(kind_K < self.mask_share + self.random_share, random_K, labels_K)
        replaced_K = jnp.where(kind_K < self.mask_share, self.mask_id, replaced_K)
        read_K = jnp.where(weights_K > 0, replaced_K, labels_K)
        return Masked(ids_L.at[positions_K].set(read_K), positions_K, labels_K, weights_K)

    def _is_special(self) -> jax.Array:
        table_V = np.zeros(self.vocab_size, bool)
        table_V[list(self.special_ids)] = True
        return jnp.asarray(table_V)

    def _ordinary_ids(self) -> jax.Array:
        return jnp.asarray(np.setdiff1d(np.arange(self.vocab_size), self.special_ids).astype(np.int32))


def _unit(bits: jax.Array) -> jax.Array:
    """Returns float32 in [0, 1) from uint32 bits: 24 of them, so that every value is exact."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
