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


def test_value_and_gradient_are_optax_s():
    logits, labels = logits_and_labels()
    weights = jnp.arange(ROWS, dtype=jnp.float32)

    def expected(logits):
        return jnp.sum(
            optax.softmax_cross_entropy_with_integer_labels(logits[:, :REAL], labels) * weights
        )

    def found(logits):
        return jnp.sum(loss.cross_entropy(logits, labels, REAL)[0] * weights)

    for one, other in zip(
        *(jax.jit(jax.value_and_grad(f))(logits) for f in (found, expected)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_logits_have_the_loss_of_their_values_and_a_gradient_of_their_type():
    logits, labels = logits_and_labels(jnp.bfloat16)
    function = jax.jit(lambda x: loss.cross_entropy(x, labels, REAL))
    (value, correct), pull = jax.vjp(function, logits)
    wanted = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :REAL].astype(jnp.float32), labels
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_array_equal(correct, jnp.argmax(logits[:, :REAL], axis=1) == labels)
    (grad,) = pull((jnp.ones(ROWS), jnp.zeros(ROWS)))
    assert grad.dtype == jnp.bfloat16 and float(jnp.abs(grad[:, REAL:]).max()) == 0


@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_correct_is_the_first_of_the_largest(platform, monkeypatch):
    monkeypatch.setattr(loss.lax, "platform_dependent", lambda *args, **sums: sums[platform](*args))
    # many ties; the padding never counts
    logits = jnp.round(logits_and_labels()[0]).at[:, REAL:].set(99)
    best = jnp.argmax(logits[:, :REAL], axis=1)
    tied = (logits[:, :REAL] == logits[:, :REAL].max(1, keepdims=True)).sum(1)
    assert (tied > 1).any(), "no ties: nothing is tested"
    last = (
        REAL
        - 1
        - jnp.argmax(logits[:, :REAL][:, ::-1] == logits[:, :REAL].max(1, keepdims=True), axis=1)
    )
    for labels in (best, last, (best + 1) % REAL):
        value, correct = jax.jit(loss.cross_entropy, static_argnums=2)(logits, labels, REAL)
        np.testing.assert_array_equal(correct, best == labels)
        np.testing.assert_allclose(
            value,
            optax.softmax_cross_entropy_with_integer_labels(logits[:, :REAL], labels),
            rtol=1e-5,
        )


def test_sums_of_rows_leave_out_what_has_no_weight():
    logits, labels = logits_and_labels()
    weights = jnp.asarray([[1.0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    sums = loss.masked_cross_entropy(
        logits.reshape(4, 3, ENTRIES), labels.reshape(4, 3), weights, REAL
    )
    losses, correct = loss.cross_entropy(logits, labels, REAL)
    np.testing.assert_allclose(sums.loss_B, (losses.reshape(4, 3) * weights).sum(1), rtol=1e-6)
    np.testing.assert_allclose(sums.correct_B, (correct.reshape(4, 3) * weights).sum(1))
    assert sums.weight_B.tolist() == [2, 1, 3, 0]
    assert sums.metrics() == {
        "loss": (sums.loss_B, sums.weight_B),
        "accuracy": (sums.correct_B, sums.weight_B),
    }
    assert sums._replace(correct_B=None).metrics().keys() == {"loss"}
