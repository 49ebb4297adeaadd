"""The loss against optax's, its derivative too, and what counts as correct."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlm.model import loss

ROWS = 12
ENTRIES = 40
REAL = 37  # the last entries pad the vocabulary


def logits_and_labels(dtype=jnp.float32):
    logits = 3 * jax.random.normal(jax.random.key(0), (ROWS, ENTRIES)).astype(dtype)
    return logits, jax.random.randint(jax.random.key(1), (ROWS,), 0, REAL)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_value_and_gradient_are_optax_s(dtype, tolerance):
    """In bfloat16 the value is that of the logits as they are, and the gradient has their type."""
    logits, labels = logits_and_labels(dtype)

    def expected(logits):
        logits = logits[:, :REAL].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    (value, pull), (wanted, pull_wanted) = (
        jax.vjp(jax.jit(f), logits)
        for f in (lambda logits: loss.cross_entropy(logits, labels, REAL)[0], expected)
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    weights = jnp.arange(ROWS, dtype=jnp.float32)
    (grad,), (wanted_grad,) = pull(weights), pull_wanted(weights)
    assert grad.dtype == dtype
    np.testing.assert_allclose(*map(np.float32, (grad, wanted_grad)), atol=ROWS * tolerance)


@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_correct_is_the_first_of_the_largest(platform, monkeypatch):
    monkeypatch.setattr(loss.lax, "platform_dependent", lambda *args, **sums: sums[platform](*args))
    # many ties; the padding never counts
    logits = jnp.round(logits_and_labels()[0]).at[:, REAL:].set(99)
    best = jnp.argmax(logits[:, :REAL], axis=1)
    largest = logits[:, :REAL].max(1, keepdims=True)
    assert ((logits[:, :REAL] == largest).sum(1) > 1).any(), "no ties: nothing is tested"
    cross_entropy = jax.jit(loss.cross_entropy, static_argnums=2)
    for label in range(REAL):
        _, correct = cross_entropy(logits, jnp.full(ROWS, label), REAL)
        np.testing.assert_array_equal(correct, best == label)


def test_sums_of_rows_leave_out_what_has_no_weight():
    logits, labels = logits_and_labels()
    weights = jnp.asarray([[1.0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    losses, correct = loss.cross_entropy(logits, labels, REAL)
    rows = (logits.reshape(4, 3, ENTRIES), labels.reshape(4, 3))
    sums = loss.masked_cross_entropy(*rows, weights, REAL)
    for found, each in zip(sums, (losses, jnp.ones(ROWS), correct), strict=True):
        np.testing.assert_allclose(found, (each.reshape(4, 3) * weights).sum(1), rtol=1e-6)
    assert sums.metrics() == {
        "loss": (sums.loss_B, sums.weight_B),
        "accuracy": (sums.correct_B, sums.weight_B),
    }
    assert sums._replace(correct_B=None).metrics().keys() == {"loss"}
