"""Spikes on made-up curves: what jumps is reported with its steps, and nothing else."""

import numpy as np
import pytest

from mlm.monitor import loss_spikes
from mlm.monitor.loss_spikes import Detector


def detect(losses, *, every: int = 10):
    detector = Detector()
    found = (detector.add({"step": every * n, "kind": "train", "loss": loss}) for n, loss in enumerate(losses, 1))
    return [spike for spike in found if spike]


def falling(count: int = 300, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    """A loss that falls from 10 to 3 nats, with the noise of a line."""
    steps = np.arange(1, count + 1)
    return 3 + 7 * np.exp(-steps / 60) + np.random.default_rng(seed).normal(0, noise, count)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_curve_has_none(noise, seed):
    assert detect(falling(noise=noise, seed=seed)) == []


@pytest.mark.parametrize("place", [8, 100, 299])
def test_one_line_that_jumps(place):
    losses = falling()
    losses[place] += {8: 3, 100: 2, 299: 0.3}[place]  # where it falls steeply, a jump must be larger
    (spike,) = detect(losses)
    assert (spike.first, spike.last) == (10 * place + 1, 10 * place + 10)
    assert spike.loss == losses[place] and spike.begins
    assert spike.median == np.median(losses[max(0, place - 20) : place])


def test_a_spike_does_not_hide_the_next_one():
    losses = falling()
    losses[[150, 151, 160]] += 2
    found = detect(losses)
    assert [(spike.last, spike.begins) for spike in found] == [(1510, True), (1520, False), (1610, True)]


def test_what_stays_is_a_new_level():
    losses = falling()
    losses[200:] += 2
    found = detect(losses)
    assert [spike.last for spike in found] == [2010, 2020, 2030]


def test_too_early_too_small_and_not_finite():
    losses = np.full(40, 5.0)
    losses[loss_spikes.LEAST - 1] = 9
    assert detect(losses) == [], "too few lines before it"
    losses = np.full(40, 5.0)
    losses[20] += loss_spikes.FLOOR * 0.9
    assert detect(losses) == [], "however quiet it was before"
    assert detect([5.0] * 20 + [None] + [5.0] * 20) == []


def last_spike(steps):
    detector = Detector()
    lines = ({"step": step, "kind": "train", "loss": 9.0 if step == steps[-1] else 5.0} for step in steps)
    return [detector.add(line) for line in lines][-1]


def test_the_steps_of_a_line():
    """The loss is averaged since the line before, as far as that is: log.every may change on resume."""
    for steps, stretch in (
        ([*range(10, 120, 10), 117], (111, 117)),
        ([*range(10, 110, 10), 120], (101, 120)),
        ([7, *range(20, 100, 10)], (81, 90)),
    ):
        spike = last_spike(steps)
        assert (spike.first, spike.last) == stretch
        assert (spike.median, spike.deviation) == (5.0, 0.0)
