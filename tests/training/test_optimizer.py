"""Schedules at points computed by hand; optimizers against their formulas, on the parameters that each may touch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from mlm.errors import InputError
from mlm.training import optimizer
from tests.support.tiny import flat, tiny_config

RATE = 1e-2
DECAY = 0.1
B1 = 0.9
B2 = 0.98
EPS = 1e-6


@pytest.mark.parametrize(
    ("name", "options", "points"),
    [
        ("linear", {}, {0: 0.8, 25: 0.6, 100: 0.0, 150: 0.0}),
        ("linear", {"warmup": 0.2}, {0: 0.0, 5: 0.2, 20: 0.8, 60: 0.4}),
        ("linear", {"warmup": 20, "final_fraction": 0.25}, {20: 0.8, 60: 0.5, 100: 0.2, 120: 0.2}),
        ("cosine", {}, {0: 0.8, 50: 0.4, 100: 0.0, 25: 0.4 * (1 + np.cos(np.pi / 4))}),
        ("cosine", {"warmup": 20, "final_fraction": 0.1}, {10: 0.4, 20: 0.8, 60: 0.44, 100: 0.08}),
        ("inverse_sqrt", {"warmup": 16}, {0: 0.0, 8: 0.4, 16: 0.8, 64: 0.4, 100: 0.32}),
        (
            "wsd",
            {"warmup": 40, "final_fraction": 0.5},
            {20: 0.4, 40: 0.8, 80: 0.8, 90: 0.6, 100: 0.4},
        ),
        (
            "wsd_sqrt",
            {"warmup": 40, "final_fraction": 0.5},
            {20: 0.4, 80: 0.8, 85: 0.6, 100: 0.4, 120: 0.4},
        ),
        ("constant", {"warmup": 10}, {0: 0.0, 5: 0.4, 10: 0.8, 1000: 0.8}),
        ("linear", {"warmup": 100}, {0: 0.0, 50: 0.4, 100: 0.8}),  # a run that is all warmup
    ],
)
def test_schedules_by_hand(name, options, points):
    settings = {"name": name, "warmup": 0, "decay_fraction": 0.2, "final_fraction": 0.0}
    config = ConfigDict({"schedule": settings | options, "optimizer": {"learning_rate": 0.8}})
    rate = optimizer.make_schedule(config, 100)
    for count, value in points.items():
        assert float(rate(count)) == pytest.approx(value, rel=1e-6, abs=1e-7), f"{name} at {count}"
        assert float(jax.jit(rate)(jnp.float32(count))) == pytest.approx(value, rel=1e-6, abs=1e-7)


def test_a_schedule_longer_than_a_run_of_epochs_is_refused():
    wsd = ("schedule.name=wsd", "schedule.decay_fraction=0.5")
    few = ("train.steps=0", "train.epochs=3", "schedule.warmup=100")
    for overrides, steps in (
        ((), 1),
        (few, 100),
        ((*few, *wsd), 199),
        ((*few, "schedule.decay_fraction=0.5"), 100),
    ):
        optimizer.check_schedule(tiny_config(*overrides), steps)
    with pytest.raises(
        InputError, match=r"warmup = 100: the run has 99 steps \(train.epochs = 3\)"
    ):
        optimizer.check_schedule(tiny_config(*few), 99)
    for name in ("wsd", "wsd_sqrt"):
        with pytest.raises(
            InputError, match=r"decay_fraction = 0.5: the run has 197 steps, and a warmup of 100;"
        ):
            optimizer.check_schedule(tiny_config(*few, f"schedule.name={name}", wsd[1]), 197)


def make(name: str, **settings: float) -> optax.GradientTransformation:
    default = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, "clip_norm": 0.0}
    group = ConfigDict(default | {"name": name, "muon_iterations": 5} | settings)
    return optimizer.make_optimizer(group, optax.constant_schedule(RATE))


SHAPES = {
    "embeddings": {"embedding": (50, 16)},
    "query": {"kernel": (16, 24), "bias": (24,)},
    "norm": {"scale": (16,)},
}


@pytest.fixture(scope="module")
def params():
    """Named as those of a model; biases and norms are off 0 and 1, so that a decay would show."""
    return draw(0.1, seed=0)


@pytest.fixture(scope="module")
def grads():
    return draw(1.0, seed=1)


def draw(size: float, seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(size * rng.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def first_update(tx: optax.GradientTransformation, grads, params) -> dict[str, np.ndarray]:
    # not jitted: that takes longer than it runs
    return flat(tx.update(grads, tx.init(params), params)[0])


def assert_near(found: np.ndarray, wanted: np.ndarray, what: str):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7, err_msg=what)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def by_hand(name: str, g: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The first update of an optimizer that knows nothing yet; matrices and embeddings alone decay."""
    decay = DECAY * p if p.ndim > 1 else 0.0
    if name == "lion":
        return -RATE * (np.sign(g) + decay)
    if name == "adafactor":  # of the size of the parameter, and a momentum that starts at 0
        return -RATE * ((1 - B1) * rms(p) * np.sign(g) + decay)
    adam = (
        g / (np.abs(g) + EPS) + decay
    )  # both moments, corrected for their bias, are the gradient's own
    if name == "lamb":
        return -RATE * np.linalg.norm(p) / np.linalg.norm(adam) * adam
    return -RATE * adam  # of stable_adamw, too: g / sqrt(v) is 1 at first


@pytest.mark.parametrize("name", ["adamw", "stable_adamw", "lamb", "lion", "adafactor"])
def test_first_update_by_hand(name, params, grads):
    updates = first_update(make(name), grads, params)
    for path, g in flat(grads).items():
        assert_near(updates[path], by_hand(name, g, flat(params)[path]), f"{name}: {path}")


def test_muon_orthogonalises_kernels_alone(params, grads):
    muon, adamw = (first_update(make(name), grads, params) for name in ("muon", "adamw"))
    weights = flat(params)
    kernels = [path for path in weights if path.endswith("/kernel")]
    assert kernels == ["query/kernel"]
    for path in weights:
        if path not in kernels:
            assert_near(muon[path], adamw[path], f"{path}: must be AdamW's")
            continue
        direction = muon[path] / -RATE - DECAY * weights[path]
        scale = 0.2 * np.sqrt(max(direction.shape))
        singular = np.linalg.svd(direction, compute_uv=False) / scale
        assert singular.min() > 0.6, f"{path}: not orthogonal"
        assert singular.max() < 1.3, f"{path}: not orthogonal"
        assert rms(direction) == pytest.approx(0.2, rel=0.25), (
            f"{path}: AdamW's size, for AdamW's learning rate"
        )


def test_of_a_zero_gradient_muon_decays_matrices_alone(params):
    updates = first_update(make("muon"), jax.tree.map(jnp.zeros_like, params), params)
    for path, p in flat(params).items():
        assert_near(updates[path], -RATE * DECAY * p * (p.ndim > 1), path)
