"""Masks of words and spans: which words are chosen together, where spans begin and end, and how long they are."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.model.masks import draw, long_batch, make, ordinary_of, predicted, within, words_of


def test_words_are_never_cut_and_each_has_the_same_chance():
    batch, words = long_batch(8192, 2)
    found = predicted(draw(make("word"), batch), batch)
    surplus = {size: [] for size in range(1, 7)}  # for each row, predicted words of that size, less those expected
    for row, hits in zip(words, found, strict=True):
        sizes = np.bincount(row[row >= 0])
        taken = np.bincount(row[(row >= 0) & hits], minlength=len(sizes))
        assert np.all((taken == 0) | (taken == sizes)), "a word is cut"
        for size, rows in surplus.items():
            rows.append(np.sum((sizes == size) & (taken > 0)) - 0.15 * np.sum(sizes == size))
    for size, rows in surplus.items():
        assert np.std(rows) > 0.1, f"no words of {size} tokens to tell from"
        assert within(np.array(rows)), f"words of {size} tokens: {np.mean(rows)}"


def test_words_are_masked_token_by_token_and_spans_as_a_whole():
    batch, words = long_batch(2048)
    for kind, mixed in (("word", True), ("span", False)):
        masked = draw(make(kind, 0.3, 0.5, 0.0), batch)
        found = predicted(masked, batch)
        seen = 0
        for row in range(2048):
            word, masked_here = words[row][found[row]], masked.ids_BxL[row][found[row]] == 4
            counts, hits = np.bincount(word), np.bincount(word, weights=masked_here)
            seen += np.sum((hits > 0) & (hits < counts))
        assert (seen > 1000) == mixed and (mixed or seen == 0), f"{kind}: {seen} words of both kinds"


def test_spans_begin_and_end_with_words_but_for_the_first_and_the_last_one():
    batch, words = long_batch(2048)
    found = predicted(draw(make("span"), batch), batch)
    cut, runs = 0, 0
    for row, hits in zip(words, found, strict=True):
        edges = np.diff(np.concatenate([[0], hits.astype(int), [0]]))
        begins, ends = np.flatnonzero(edges > 0), np.flatnonzero(edges < 0)
        begun = sum(begin > 0 and row[begin - 1] == row[begin] for begin in begins)
        ended = sum(end < len(row) and row[end] == row[end - 1] for end in ends)
        assert begun <= 1 and ended <= 1, "more than the first and the last span is cut"
        cut, runs = cut + ended, runs + len(begins)
    assert cut > 100, "spans are cut to give the exact number"
    assert found.sum() / runs > 3, "runs of several words"


@pytest.mark.parametrize("p", [0.2, 0.6])
def test_lengths_of_spans_are_geometric_and_truncated(p):
    """The first spans after each special token: as many as surely fit."""
    masking = dataclasses.replace(make("span", span_p=p), longest=8)
    batch, _ = long_batch(2048, 3)
    words = words_of(batch, longest=8)[:-1]

    def spans(ids_L, ordinary_L, bits_L):
        return masking._spans(masking._words(ids_L, ordinary_L), ordinary_L, bits_L).first_L

    bits = jax.random.bits(jax.random.key(5), (2047, 96))
    first = np.asarray(jax.jit(jax.vmap(spans))(batch["input_ids"][:-1], ordinary_of(batch)[:-1], bits))
    counts = np.zeros(9)
    for row, begins in zip(words, first, strict=True):
        for part in (slice(1, 32), slice(33, 96)):  # random_batch has special tokens at 0 and 32
            number = row[part][begins[part]]
            assert number[0] == row[part][0], "a special token ends the span"
            sure = (row[part][-1] - row[part][0]) // 8
            lengths = np.diff(number)[:sure]
            assert len(lengths) == sure
            counts += np.bincount(lengths, minlength=9)
    shares = (1 - p) ** np.arange(8) / np.sum((1 - p) ** np.arange(8))
    expected = shares * counts.sum()
    assert counts[0] == 0 and counts.sum() > 5000
    assert np.sum((counts[1:] - expected) ** 2 / expected) < 24.3  # chi-square of 7 degrees of freedom, p = 0.001
    assert np.allclose(masking.length_probs(), shares)


def test_mean_length_of_a_span_is_spanberts():
    lengths = make("span", longest=10).length_probs()
    assert np.sum(lengths * np.arange(1, 11)) == pytest.approx(3.8, abs=0.01)


@pytest.mark.parametrize("kind", ["word", "span"])
def test_all_of_a_row_can_be_predicted(kind):
    batch, _ = long_batch(256)
    assert np.array_equal(predicted(draw(make(kind, 1.0), batch), batch), ordinary_of(batch))


def test_masks_of_words_need_to_know_the_words():
    batch, _ = long_batch(64)
    with pytest.raises(ValueError, match="which tokens start a word"):
        draw(dataclasses.replace(make("word"), starts=None), batch)
