"""The paired bootstrap, on cases computed by hand."""

import numpy as np
import pytest

from mlm.sweep import bootstrap


def test_two_examples_by_hand():
    """The mean of two draws of the differences (1, 0) is 1, 1/2 or 0, with the odds 1 : 2 : 1."""
    found = bootstrap.paired([[1, 0]], [[0, 0]], resamples=40_000)
    assert (found.difference, found.low, found.high) == (0.5, 0, 1)
    assert found.same_sign == pytest.approx(0.75, abs=0.01)
    other = bootstrap.paired([[0, 0]], [[1, 0]], resamples=40_000)
    assert other == (-0.5, -1, 0, found.same_sign)


def test_two_seeds_by_hand():
    """One example: the first model's mean over two drawn seeds is 1, 1/2 or 0, with the odds 1 : 2 : 1."""
    found = bootstrap.paired([[1], [0]], [[0.25]], resamples=40_000)
    assert (found.difference, found.low, found.high) == (0.25, -0.25, 0.75)
    assert found.same_sign == pytest.approx(0.75, abs=0.01)


def test_equal_models_do_not_differ_and_a_seed_repeats():
    scores = np.random.default_rng(0).random((3, 100)) < 0.5
    same = bootstrap.paired(scores[:1], scores[:1])
    assert same == (0, 0, 0, 0)
    one, two, other = (bootstrap.paired(scores, scores[:2], seed=seed) for seed in (1, 1, 2))
    assert one == two != other


def test_examples_are_paired_whatever_the_block_size(monkeypatch):
    """Unpaired, the interval of models that differ in one example of 100 would be ten times as wide."""
    rng = np.random.default_rng(0)
    second = (rng.random((1, 100)) < 0.5).astype(float)
    first = second.copy()
    first[0, np.argmin(first)] = 1
    found = bootstrap.paired(first, second)
    assert found.difference == pytest.approx(0.01) and found.low >= 0 and found.high <= 0.05
    monkeypatch.setattr(bootstrap, "BLOCK", 100 * 999)
    assert bootstrap.paired(first, second).same_sign == pytest.approx(1 - 0.99**100, abs=0.02)


def test_other_examples_are_refused():
    for second in (np.ones((1, 3)), np.ones(2), np.ones((0, 2))):
        with pytest.raises(ValueError, match=r"must be \[seeds, examples\], of the same"):
            bootstrap.paired(np.ones((2, 2)), second)
