"""Batches of words, and what a masking makes of them."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from mlm.model.masking import SpanMasking, WordMasking
from mlm.model.token_masking import Masked, TokenMasking
from tests.support.tiny import INFO, random_batch

SPECIAL = (0, 1, 2, 3, 4)
STARTS = np.random.default_rng(0).random(INFO.vocab_size) < 0.5
LONG = dataclasses.replace(INFO, length=96)
KINDS = {"token": TokenMasking, "word": WordMasking, "span": SpanMasking}


def make(kind: str, rate: float = 0.15, mask_share: float = 0.8, random_share: float = 0.1, **settings):
    settings |= {} if kind == "token" else {"starts": STARTS.tobytes(), "longest": settings.get("longest", 6)}
    return KINDS[kind](rate, mask_share, random_share, 4, SPECIAL, INFO.vocab_size, **settings)


def draw(masking: TokenMasking, batch: dict, seed: int = 0, rate: float | None = None) -> Masked:
    arguments = (batch[key] for key in ("input_ids", "attention_mask", "record_id", "epoch"))
    return jax.tree.map(np.asarray, jax.jit(masking)(jax.random.key(seed), *arguments, rate))


def predicted(masked: Masked, batch: dict) -> np.ndarray:
    """Returns which tokens are predicted, bool [B, L]."""
    found = np.zeros(batch["input_ids"].shape)
    np.put_along_axis(found, masked.positions_BxK, masked.weights_BxK, 1)
    return found > 0


def ordinary_of(batch: dict) -> np.ndarray:
    return (batch["input_ids"] > 4) & (batch["attention_mask"] > 0)


class Drawn(NamedTuple):
    """Many rows, the number of each token's word in its row (-1 for other tokens), and masks of them."""

    batch: dict
    words: np.ndarray
    masked: Masked
    predicted: np.ndarray


@functools.cache
def many_rows(kind: str) -> Drawn:
    batch = random_batch(4096, 0, LONG)
    masked = draw(make(kind), batch)
    return Drawn(batch, words_of(batch, longest=6), masked, predicted(masked, batch))


def words_of(batch: dict, longest: int) -> np.ndarray:
    """Counts the words token by token in plain Python."""
    numbers = np.full(batch["input_ids"].shape, -1)
    for row, (ids, ordinary) in enumerate(zip(batch["input_ids"], ordinary_of(batch), strict=True)):
        word, size = -1, 0
        for position in np.flatnonzero(ordinary):
            if STARTS[ids[position]] or position == 0 or not ordinary[position - 1] or size == longest:
                word, size = word + 1, 0
            size += 1
            numbers[row, position] = word
    return numbers


def within(sample: np.ndarray, sigmas: float = 4) -> bool:
    """Returns whether the mean of independent numbers is 0 but for chance."""
    return abs(sample.mean()) <= sigmas * sample.std() / np.sqrt(len(sample))
