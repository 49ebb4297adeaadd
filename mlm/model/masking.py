"""Masks drawn on the device, a pure function of (seed, record, epoch), and of the update's rate where that changes.

Which tokens are masked never depends on the batch size, the number of devices or hosts, or how often a run was
restarted: each row has a key of its own, and threefry gives the same bits everywhere.

    token   each token by itself (BERT, RoBERTa)
    word    whole words (BERT's whole-word masking)
    span    runs of whole words, of random lengths (SpanBERT)

A word is a run of ordinary tokens from one that starts a word to before the next; special tokens end it.

Dimensions: B rows, L tokens in a row, K predictions in a row (static), V entries of the vocabulary, S span lengths.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Masked(NamedTuple):
    """A batch with masks drawn. Slots of weight 0 fill rows that have fewer than K predictions."""

    ids_BxL: jax.Array  # int32: what the model reads
    positions_BxK: jax.Array  # int32: where it predicts, distinct within a row
    labels_BxK: jax.Array  # int32: the original tokens there
    weights_BxK: jax.Array  # float32: 1 for a prediction, 0 for an empty slot


def rate_schedule(rate: float, end_rate: float, steps: int) -> optax.Schedule | None:
    """Returns the masking rate of each of `steps` steps, linear; None where it is always the same.

    A rate that falls (Ankner et al., 2024, Dynamic Masking Rate Schedules) or stays high (Wettig et al., 2023, Should
    You Mask 15%) has been found better than a constant 0.15.
    """
    return optax.linear_schedule(rate, end_rate, max(steps - 1, 1)) if end_rate else None


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
      end_rate: the largest rate that a call asks for may be this one, too; 0 if all ask for `rate`.
      static: every epoch has the masks of epoch 0, as the data that BERT prepared once.
    """

    rate: float
    mask_share: float
    random_share: float
    mask_id: int
    special_ids: tuple[int, ...]
    vocab_size: int
    end_rate: float = 0.0
    static: bool = False

    def slots(self, length: int) -> int:
        """Returns K for rows of `length` tokens."""
        return math.ceil(max(self.rate, self.end_rate) * length)

    def __call__(
        self,
        key: jax.Array,
        ids_BxL: jax.Array,
        attention_BxL: jax.Array,
        record_B: jax.Array,
        epoch_B: jax.Array,
        rate: jax.Array | None = None,
    ) -> Masked:
        """Draws the masks of a batch.

        At a higher rate a row has the predictions of a lower one, and more.

        Args:
          key: stands for the mask seed.
          ids_BxL, attention_BxL: int32.
          record_B, epoch_B: uint32, of which the masks are a function.
          rate: of this update, at most the larger of `rate` and `end_rate`; None for `rate`.
        """
        epoch_B = jnp.zeros_like(epoch_B) if self.static else epoch_B
        row = functools.partial(self._row, rate=self.rate if rate is None else rate)
        return jax.vmap(row, in_axes=(None, 0, 0, 0, 0))(key, ids_BxL, attention_BxL, record_B, epoch_B)

    def _row(
        self,
        key: jax.Array,
        ids_L: jax.Array,
        attention_L: jax.Array,
        record: jax.Array,
        epoch: jax.Array,
        *,
        rate: float | jax.Array,
    ) -> Masked:
        length = ids_L.shape[0]
        slots = self.slots(length)
        key = jax.random.fold_in(jax.random.fold_in(key, record), epoch)
        bits = jax.random.bits(key, (length + 2 * slots + 1,))
        score_L, kind_K, token_K, rounding = jnp.split(bits, (length, length + slots, length + 2 * slots))

        ordinary_L = self._ordinary(ids_L, attention_L)
        count = self._count(ordinary_L, rate, rounding[0])
        order_L = jnp.where(ordinary_L, (score_L >> 1).astype(jnp.int32), -1)
        _, positions_K = jax.lax.top_k(order_L, slots)  # a uniform choice: the largest random scores
        weights_K = (jnp.arange(slots) < count).astype(jnp.float32)
        return self._masked(ids_L, positions_K, weights_K, kind_K, token_K)

    def _ordinary(self, ids_L: jax.Array, attention_L: jax.Array) -> jax.Array:
        return (attention_L > 0) & ~self._is_special()[ids_L]

    def _count(self, ordinary_L: jax.Array, rate: float | jax.Array, bits: jax.Array) -> jax.Array:
        """Returns rate * m, rounded at random; int32."""
        wanted = rate * jnp.sum(ordinary_L) + _unit(bits)
        most = jnp.minimum(self.slots(len(ordinary_L)), jnp.sum(ordinary_L))
        return jnp.minimum(jnp.floor(wanted).astype(jnp.int32), most)

    def _masked(
        self, ids_L: jax.Array, positions_K: jax.Array, weights_K: jax.Array, kind_K: jax.Array, token_K: jax.Array
    ) -> Masked:
        """Returns the row with its predictions masked, replaced or kept, as the bits `kind_K` and `token_K` say."""
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


@dataclasses.dataclass(frozen=True)
class WordMasking(TokenMasking):
    """Whole words, in a random order (BERT's code, `do_whole_word_mask`), masked, replaced or kept token by token.

    BERT takes words until the next would be too many, which favours short ones. Here the words lie in a random order
    along a circle of m tokens, and those that begin in a window of rate * m that is laid on it anywhere are taken: each
    word, short or long, with probability `rate`, so that the mean number of predictions is exact.

    Attributes:
      starts: which entries start a word (see `tokenizer.word_starts`), the bytes of a bool [V], for bytes have a hash;
        None for what never draws a mask.
      longest: tokens of a word; a longer one counts as several.
    """

    starts: bytes | None = dataclasses.field(default=None, repr=False)
    longest: int = 10

    def slots(self, length: int) -> int:
        """Returns K for rows of `length` tokens: the last word may end behind the window."""
        return min(super().slots(length) + self.longest - 1, length)

    def _row(self, key, ids_L, attention_L, record, epoch, *, rate):
        key = jax.random.fold_in(jax.random.fold_in(key, record), epoch)
        bits = jax.random.bits(key, (3 * len(ids_L) + 1,))
        score_L, kind_L, token_L, place = jnp.split(bits, np.cumsum([len(ids_L)] * 3))
        ordinary_L = self._ordinary(ids_L, attention_L)
        words = self._words(ids_L, ordinary_L)
        total = jnp.sum(ordinary_L).astype(jnp.float32)
        # From the window's begin to the word's, the short way; an addition of `total` would round.
        way_L = _before(words, score_L).astype(jnp.float32) - _unit(place[0]) * total
        taken_L = ordinary_L & jnp.where(way_L >= 0, way_L < rate * total, way_L < rate * total - total)
        return self._masked_at(ids_L, taken_L, kind_L, token_L)

    def _words(self, ids_L: jax.Array, ordinary_L: jax.Array) -> _Units:
        if self.starts is None:
            raise ValueError("masks of whole words need to know which tokens start a word")
        starts_V = jnp.asarray(np.frombuffer(self.starts, bool))
        first_L = ordinary_L & (starts_V[ids_L] | _after_a_gap(ordinary_L))
        within_L = jnp.arange(len(ids_L)) - _units(first_L, ordinary_L).begin_L
        return _units(ordinary_L & (within_L % self.longest == 0), ordinary_L)

    def _masked_at(self, ids_L: jax.Array, taken_L: jax.Array, kind_L: jax.Array, token_L: jax.Array) -> Masked:
        chosen_K, positions_K = jax.lax.top_k(taken_L.astype(jnp.int32), self.slots(len(ids_L)))
        weights_K = chosen_K.astype(jnp.float32)
        return self._masked(ids_L, positions_K, weights_K, kind_L[positions_K], token_L[positions_K])


@dataclasses.dataclass(frozen=True)
class SpanMasking(WordMasking):
    """Runs of whole words, masked, replaced or kept as a whole (SpanBERT; Joshi et al., 2020, 3.1).

    What stands between special tokens is cut into spans of lengths, in words, from a geometric distribution that is
    truncated to 1..longest. They lie in a random order along a circle, as words do in `WordMasking`; in the window on
    it is the number of tokens that `TokenMasking` predicts, so that the first and the last span may be cut. SpanBERT's
    code cuts its last one; were it so here, the first tokens of a row would be predicted more often than others.

    Attributes:
      span_p: parameter of the geometric distribution.
      longest: words of a span, and tokens of a word.
    """

    span_p: float = 0.2

    def slots(self, length: int) -> int:
        """Returns K for rows of `length` tokens: those of `TokenMasking`."""
        return TokenMasking.slots(self, length)

    def _row(self, key, ids_L, attention_L, record, epoch, *, rate):
        key = jax.random.fold_in(jax.random.fold_in(key, record), epoch)
        bits = jax.random.bits(key, (4 * len(ids_L) + 2,))
        score_L, length_L, kind_L, token_L, rest = jnp.split(bits, np.cumsum([len(ids_L)] * 4))
        ordinary_L = self._ordinary(ids_L, attention_L)
        spans = self._spans(self._words(ids_L, ordinary_L), ordinary_L, length_L)
        total = jnp.sum(ordinary_L)
        window = jnp.floor(_unit(rest[1]) * total).astype(jnp.int32)
        way_L = _before(spans, score_L) + jnp.arange(len(ids_L)) - spans.begin_L - window
        way_L = jnp.where(way_L >= 0, way_L, way_L + total)
        taken_L = ordinary_L & (way_L < self._count(ordinary_L, rate, rest[0]))
        return self._masked_at(ids_L, taken_L, kind_L[spans.begin_L], token_L)

    def lengths(self) -> np.ndarray:
        """Returns the probabilities of the lengths 1, 2, ..., `longest`, [S]."""
        shares_S = (1 - self.span_p) ** np.arange(self.longest)
        return shares_S / shares_S.sum()

    def _spans(self, words: _Units, ordinary_L: jax.Array, bits_L: jax.Array) -> _Units:
        """Cuts each run of words anew: its i-th span begins at the sum of the lengths of those before it."""
        ends_S = np.cumsum(self.lengths())[:-1].astype(np.float32)
        drawn_L = 1 + jnp.sum(_unit(bits_L)[:, None] >= ends_S, axis=1)
        runs = _units(_after_a_gap(ordinary_L), ordinary_L)
        number_L = jnp.cumsum(words.first_L) - 1  # of the token's word, in the row
        drawn_L = jnp.where(words.first_L, drawn_L, 0)
        sum_L = jnp.cumsum(drawn_L) - drawn_L
        begin_L = number_L[runs.begin_L] + sum_L - sum_L[runs.begin_L]  # number of the word that begins a span
        within_L = words.first_L & (begin_L <= number_L[runs.begin_L + runs.size_L - 1])
        begins_L = jnp.zeros_like(ordinary_L).at[jnp.where(within_L, begin_L, len(bits_L))].set(True, mode="drop")
        return _units(words.first_L & begins_L[number_L], ordinary_L)


class _Units(NamedTuple):
    """Words or spans of a row, told to each of their tokens; what is told to other tokens means nothing."""

    first_L: jax.Array  # bool: the token is the first of its unit
    begin_L: jax.Array  # int32: where the unit's first token stands
    size_L: jax.Array  # int32: tokens in the unit


def _units(first_L: jax.Array, ordinary_L: jax.Array) -> _Units:
    """Returns the units that begin at `first_L` and end before the next one or the next token that isn't ordinary."""
    length = len(first_L)
    place_L = jnp.arange(length)
    begin_L = jax.lax.cummax(jnp.where(first_L, place_L, 0))
    edge_L = jax.lax.cummin(jnp.where(first_L | ~ordinary_L, place_L, length), reverse=True)
    end_L = jnp.append(edge_L[1:], length)
    return _Units(first_L, begin_L, end_L - begin_L)


def _after_a_gap(ordinary_L: jax.Array) -> jax.Array:
    """Returns which ordinary tokens are the first of the row or follow one that isn't ordinary."""
    return ordinary_L & ~jnp.append(False, ordinary_L[:-1])


def _before(units: _Units, score_L: jax.Array) -> jax.Array:
    """Returns for each token how many tokens the units before its own have, in the order of the units' scores."""
    place_L = jnp.arange(len(score_L))
    last = jnp.uint32(2**32 - 1)
    keys_L = jnp.where(units.first_L, score_L >> 1, last)
    _, place_L, size_L = jax.lax.sort((keys_L, place_L, jnp.where(units.first_L, units.size_L, 0)), num_keys=1)
    _, before_L = jax.lax.sort((place_L, jnp.cumsum(size_L) - size_L), num_keys=1)
    return before_L[units.begin_L]


def _unit(bits: jax.Array) -> jax.Array:
    """Returns float32 in [0, 1) from uint32 bits: 24 of them, so that every value is exact."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
