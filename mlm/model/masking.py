"""Masks drawn on the device, a pure function of (seed, record, epoch).

Which tokens are masked never depends on the batch size, the devices and hosts, or on restarts: each row has a key of
its own, and threefry gives the same bits everywhere.

Dimensions: B rows, L tokens in a row, K predictions in a row (static), V entries of the vocabulary, S span lengths.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from ml_collections import ConfigDict

from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
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


class IndependentMasking(TokenMasking):
    """Each ordinary token is predicted with probability `rate`, as transformers' and fairseq's collators draw them."""

    def max_predictions_per_row(self, length: int) -> int:
        """Returns K for rows of `length` tokens: all of them."""
        return length

    def _mask_row(self, key: Array, ids_L: Array, ordinary_L: Array) -> Masked:
        score_L, kind_L, token_L = jax.random.bits(key, (3, len(ids_L)), jnp.uint32)
        weights_L = (ordinary_L & (uniform(score_L) < self.rate)).astype(jnp.float32)
        return self._masked(
            ids_L, jnp.arange(len(ids_L), dtype=jnp.int32), weights_L, kind_L, token_L
        )


class _Units(NamedTuple):
    """The word or span of each token; undefined outside of any. A word ends before the next word or special token."""

    first_L: Array  # bool: the token is the first of its unit
    start_L: Array  # int32: position of the unit's first token
    size_L: Array  # int32: tokens in the unit


@dataclasses.dataclass(frozen=True)
class WordMasking(TokenMasking):
    """Whole words, in a random order (BERT's code, `do_whole_word_mask`), masked, replaced or kept token by token.

    BERT's own choice favours short words. Here they lie in a random order on a circle of m tokens, and those that start
    inside a randomly placed window of rate * m tokens are predicted: each with probability `rate`.
    """

    # `tokenizer.word_starts`, bool [V], as bytes, which are hashable; None if no mask is ever drawn
    starts: bytes | None = dataclasses.field(default=None, repr=False)
    longest: int = 10  # tokens of a word, where a longer one counts as several; of a span, words

    def max_predictions_per_row(self, length: int) -> int:
        """Returns K for rows of `length` tokens: the last word may end after the window."""
        return min(super().max_predictions_per_row(length) + self.longest - 1, length)

    def _mask_row(self, key, ids_L, ordinary_L):
        bits = jax.random.bits(key, (3 * len(ids_L) + 1,), jnp.uint32)
        score_L, kind_L, token_L, window = jnp.split(bits, np.cumsum([len(ids_L)] * 3))
        words = self._words(ids_L, ordinary_L)
        total = jnp.sum(ordinary_L).astype(jnp.float32)
        # Signed distance from the window's start to the word's: adding `total` to the negative ones would round.
        distance_L = _tokens_before(words, score_L).astype(jnp.float32) - uniform(window[0]) * total
        window_size = self.rate * total
        inside_L = jnp.where(
            distance_L >= 0, distance_L < window_size, distance_L < window_size - total
        )
        return self._masked_at(ids_L, ordinary_L & inside_L, kind_L, token_L)

    def _words(self, ids_L: Array, ordinary_L: Array) -> _Units:
        if self.starts is None:
            raise ValueError("masks of whole words need to know which tokens start a word")
        starts_V = jnp.asarray(np.frombuffer(self.starts, bool))
        first_L = ordinary_L & (starts_V[ids_L] | _after_a_gap(ordinary_L))
        within_L = jnp.arange(len(ids_L), dtype=jnp.int32) - _units(first_L, ordinary_L).start_L
        return _units(ordinary_L & (within_L % self.longest == 0), ordinary_L)

    def _masked_at(self, ids_L: Array, predicted_L: Array, kind_L: Array, token_L: Array) -> Masked:
        count = self.max_predictions_per_row(len(ids_L))
        predicted_K, positions_K = jax.lax.top_k(predicted_L.astype(jnp.int32), count)
        weights_K = predicted_K.astype(jnp.float32)
        return self._masked(
            ids_L, positions_K, weights_K, kind_L[positions_K], token_L[positions_K]
        )


@dataclasses.dataclass(frozen=True)
class SpanMasking(WordMasking):
    """Runs of whole words, masked, replaced or kept as a whole (SpanBERT; Joshi et al., 2020, 3.1).

    The text between special tokens is cut into spans whose lengths, in words, follow a geometric distribution truncated
    to 1..longest. They lie on a circle as in `WordMasking`, and the window holds as many tokens as `TokenMasking`
    predicts. It may cut its first and last span; to cut only the last, as SpanBERT does, would favour a row's start.
    """

    span_p: float = 0.2  # of the geometric distribution

    # the last span ends with the window
    max_predictions_per_row = TokenMasking.max_predictions_per_row

    def _mask_row(self, key, ids_L, ordinary_L):
        bits = jax.random.bits(key, (4 * len(ids_L) + 2,), jnp.uint32)
        score_L, length_L, kind_L, token_L, rest = jnp.split(bits, np.cumsum([len(ids_L)] * 4))
        spans = self._spans(self._words(ids_L, ordinary_L), ordinary_L, length_L)
        total = jnp.sum(ordinary_L)
        window = jnp.floor(uniform(rest[1]) * total).astype(jnp.int32)
        within_L = jnp.arange(len(ids_L), dtype=jnp.int32) - spans.start_L
        distance_L = _tokens_before(spans, score_L) + within_L - window
        distance_L = jnp.where(distance_L >= 0, distance_L, distance_L + total)
        predicted_L = ordinary_L & (distance_L < self._count(ordinary_L, rest[0]))
        return self._masked_at(ids_L, predicted_L, kind_L[spans.start_L], token_L)

    def length_probs(self) -> np.ndarray:
        """Returns the probabilities of the lengths 1, 2, ..., `longest`, [S]."""
        probs_S = (1 - self.span_p) ** np.arange(self.longest)
        return probs_S / probs_S.sum()

    def _spans(self, words: _Units, ordinary_L: Array, bits_L: Array) -> _Units:
        """Cuts each run of words into spans: the i-th one starts at the sum of the lengths of those before it."""
        ends_S = np.cumsum(self.length_probs())[:-1].astype(np.float32)
        length_L = 1 + jnp.sum(uniform(bits_L)[:, None] >= ends_S, axis=1)
        runs = _units(_after_a_gap(ordinary_L), ordinary_L)
        word_L = jnp.cumsum(words.first_L) - 1  # index of the token's word in the row
        length_L = jnp.where(words.first_L, length_L, 0)
        sum_L = jnp.cumsum(length_L) - length_L
        # index of the word that starts a span
        start_L = word_L[runs.start_L] + sum_L - sum_L[runs.start_L]
        within_L = words.first_L & (start_L <= word_L[runs.start_L + runs.size_L - 1])
        places_L = jnp.where(within_L, start_L, len(bits_L))
        starts_L = jnp.zeros_like(ordinary_L).at[places_L].set(True, mode="drop")
        return _units(words.first_L & starts_L[word_L], ordinary_L)


def _units(first_L: Array, ordinary_L: Array) -> _Units:
    """Returns the units that start at `first_L` and end before the next one or the next token that isn't ordinary."""
    length = len(first_L)
    position_L = jnp.arange(length, dtype=jnp.int32)
    start_L = jax.lax.cummax(jnp.where(first_L, position_L, 0))
    edge_L = jax.lax.cummin(jnp.where(first_L | ~ordinary_L, position_L, length), reverse=True)
    end_L = jnp.append(edge_L[1:], length)
    return _Units(first_L, start_L, end_L - start_L)


def _after_a_gap(ordinary_L: Array) -> Array:
    """Returns which ordinary tokens are the first of the row or follow one that isn't ordinary."""
    return ordinary_L & ~jnp.append(False, ordinary_L[:-1])


def _tokens_before(units: _Units, score_L: Array) -> Array:
    """Returns for each token how many tokens come before its unit when the units are sorted by score."""
    position_L = jnp.arange(len(score_L), dtype=jnp.int32)
    keys_L = jnp.where(units.first_L, score_L >> 1, jnp.uint32(2**32 - 1))
    _, position_L, size_L = jax.lax.sort(
        (keys_L, position_L, jnp.where(units.first_L, units.size_L, 0)), num_keys=1
    )
    _, before_L = jax.lax.sort((position_L, jnp.cumsum(size_L) - size_L), num_keys=1)
    return before_L[units.start_L]


def uniform(bits: Array) -> Array:
    """Returns float32 in [0, 1) from uint32 bits: 24 of them, so that every value is exact."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def make_masking(
    config: ConfigDict, info: DatasetInfo, word_starts_V: np.ndarray | None
) -> TokenMasking:
    """Returns the masking of the config's group `masking`; words and spans need the word starts to draw masks."""
    if word_starts_V is not None and len(word_starts_V) != info.vocab_size:
        raise InputError(
            f"config.masking.kind = {config.kind}: the tokenizer has {len(word_starts_V)} entries, the shards were "
            f"made with one of {info.vocab_size}; use a tokenizer and shards that belong together."
        )
    starts = None if word_starts_V is None else word_starts_V.tobytes()
    make = {
        "token": TokenMasking,
        "word": functools.partial(WordMasking, starts=starts),
        "span": functools.partial(SpanMasking, starts=starts),
    }
    return make[config.kind](
        rate=config.rate,
        mask_share=config.mask_share,
        mask_id=info.special_ids["mask"],
        special_ids=info.all_special_ids,
        vocab_size=info.vocab_size,
    )


def make_eval_masking(masking: TokenMasking, count: str) -> TokenMasking:
    """Returns the masking of evaluation, given that of training and evaluate.count."""
    if count == "fixed":
        return masking
    return IndependentMasking(
        masking.rate,
        masking.mask_share,
        masking.mask_id,
        masking.special_ids,
        masking.vocab_size,
    )
