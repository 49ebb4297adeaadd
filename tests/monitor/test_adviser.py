"""The adviser on made-up curves and the shape of the quickstart: each trouble is reported once, and nothing else."""

import math

import numpy as np
import pytest

from mlm.monitor import adviser
from mlm.monitor.adviser import Adviser
from tests.monitor.logged import advise, falling, lines


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_gives_none(noise, seed):
    losses = falling(noise=noise, seed=seed)
    losses[[60, 90]] += 3  # spikes are not the adviser's
    smooth = falling(noise=0.01)
    evals = {step: smooth[step // 50 - 1] + 0.1 for step in range(500, 10_001, 500)}
    assert advise(lines(losses.tolist(), evals=evals)) == []


def test_the_shape_of_the_quickstart_gives_none():
    """Its own losses and gradient norms, rounded; warmup 110, and the unigram entropy of its training split."""
    losses = [6.74, 6.16, 5.42, 4.95, 4.63, 4.44, 4.30, 4.13, 4.03, 3.95, 3.85, 3.80, 3.73, 3.69, 3.67, 3.54]
    losses += [3.58, 3.49, 3.46, 3.40, 3.41, 3.33, 3.28, 3.29, 3.20, 3.21, 3.21, 3.19, 3.16, 3.15, 3.14]
    norms = [1.22, 2.43, 1.92, 2.17, 2.08, 1.94, 1.90, 1.97, 1.94, 1.93, 2.29, 2.00, 2.07, 1.98, 2.07, 1.95]
    norms += [2.14, 2.02, 2.04, 2.24, 2.22, 2.10, 2.14, 2.27, 1.91, 2.02, 2.02, 2.19, 1.87, 1.96, 1.91]
    run = Adviser(steps=1575, warmup_steps=110, global_batch=32, unigram_entropy=6.63, mask_share=0.8, random_share=0.1)
    assert advise(lines(losses, evals={500: 4.37, 1000: 3.88, 1500: 3.60}, norm=norms), run) == []


@pytest.mark.parametrize(
    ("level", "place", "rate"), [(6.0, "at", "too high or"), (5.6, "at", "too high or"), (8.9, "above", "too low")]
)
def test_stuck(level, place, rate):
    """Behind the warmup, for a twentieth of the run; not where another token is looked at, not where it falls."""
    noise = np.random.default_rng(0).normal(0, 0.02, 200)
    losses = np.maximum(falling(low=level, noise=0), level) + noise
    (advice,) = advise(lines(losses.tolist(), rate=3e-5))
    assert advice.kind == "stuck" and 600 <= advice.step <= 2_500
    assert f"{place} what the frequencies of tokens alone give (6.00 nats behind a mask, 5.54 over all" in advice.text
    assert f"a learning rate that is {rate}" in advice.text and "(3e-05 now)" in advice.text
    causes = ("learning rate", "(32 rows)", "duplicate lines", "wrong ids", "warmup that is too short (100")
    places = [advice.text.index(words) for words in causes]
    assert places == sorted(places)
    assert "\n" not in advice.text and advice.text.endswith(".")
    assert advise(lines((losses - level + 5.2).tolist())) == [], "below what is known without context"
    assert advise(lines((losses - np.arange(200) * 0.02).tolist())) == [], "slowly falling"
    unknown = Adviser(10_000, 100, 32, None, 0.8, 0.1)
    assert advise(lines(losses.tolist()), unknown) == []


def test_a_long_warmup_and_a_long_run_have_time():
    losses = [6.0] * 200
    assert advise(lines(losses), Adviser(10_000, 9_600, 32, 6.0, 0.8, 0.1)) == []
    assert advise(lines(losses), Adviser(300_000, 0, 32, 6.0, 0.8, 0.1)) == []
    (advice,) = advise(lines(losses, every=500), Adviser(300_000, 24_000, 32, 6.0, 0.8, 0.1))
    assert advice.step == 39_000, "warmup and a twentieth"


def test_what_is_known_without_context():
    """All masked: the unigram entropy. Nothing random: what is visible is right. All random: it says nothing."""
    free = lambda mask, random: Adviser(1, 0, 1, 6.0, mask, random).context_free_loss  # noqa: E731
    assert free(1.0, 0.0) == 6.0
    assert free(0.8, 0.0) == pytest.approx(0.8 * 6)
    assert free(0.8, 0.2) == pytest.approx(6)
    assert free(0.8, 0.1) == pytest.approx(0.8 * 6 + 0.2 * (math.log(2) + 3))


def test_diverging():
    losses = falling()
    losses[120:] += np.linspace(0, 4, 80)
    found = advise(lines(losses.tolist(), rate=0.02))
    assert [advice.kind for advice in found] == ["diverging"]
    assert 6_300 < found[0].step < 7_000
    assert "too high (0.02 now)" in found[0].text and " 2.99 in those before" in found[0].text
    losses = falling()
    losses[120:] += 0.4
    assert advise(lines(losses.tolist())) == []


def test_dead_by_its_gradient():
    losses, norms = falling(noise=0.001), np.ones(200)
    norms[150:], losses[150:] = 1e-5, losses[149]
    (advice,) = advise(lines(losses.tolist(), norm=norms))
    assert (advice.kind, advice.step) == ("dead", 50 * 155)
    assert "gradient norm is at most 1e-05" in advice.text
    assert advise(lines(losses.tolist(), norm=np.maximum(norms, 1e-2))) == []
    assert advise(lines([0.01] * 200, norm=norms)) == [], "all is learned"


def test_dead_from_the_beginning():
    (advice,) = advise(lines([5.0] * 20, norm=1e-9))
    assert advice.kind == "dead" and advice.step == 300


def test_dead_by_skipped_steps():
    skipped = [0] * 100 + [30 * n for n in range(1, 101)]
    (advice,) = advise(lines(falling().tolist(), skipped=skipped))
    assert (advice.kind, advice.step) == ("dead", 50 * 105)
    assert "150 of the 250 steps" in advice.text
    losses = [*falling(100).tolist(), *[None] * 100]
    assert [a.kind for a in advise(lines(losses, skipped=[0] * 100 + [50 * n for n in range(1, 101)]))] == ["dead"]
    assert advise(lines(falling().tolist(), skipped=[n // 2 for n in range(200)])) == []


def test_drift():
    losses = falling(low=2.0)
    evals = {step: 3 + abs(step - 4_000) / 4_000 for step in range(500, 10_001, 500)}
    (advice,) = advise(lines(losses.tolist(), evals=evals))
    assert (advice.kind, advice.step) == ("drift", 5_500)
    assert "from 3.000 nats at step 4,000 to 3.375 at step 5,500" in advice.text
    rising = falling(low=2.0, noise=0)
    rising[80:] = rising[79] + np.linspace(0, 0.4, 120)
    assert advise(lines(rising.tolist(), evals=evals)) == [], "both rise: no overfitting"
    flat = {step: 3 + 0.02 * (step > 4_000) for step in range(500, 10_001, 500)}
    assert advise(lines(losses.tolist(), evals=flat)) == []


def test_each_kind_once():
    losses = np.concatenate([np.full(100, 6.0), np.linspace(6, 12, 50), np.full(300, 12.0)])
    norms = np.concatenate([np.ones(200), np.full(250, 1e-6)])
    evals = {step: 6 + step / 1e5 for step in range(500, 22_001, 500)}
    found = advise(lines(losses.tolist(), norm=norms, evals=evals))
    assert [advice.kind for advice in found] == ["stuck", "diverging", "dead"]
    assert all(kind in adviser.LINES for kind in ("stuck", "diverging", "dead", "drift"))
