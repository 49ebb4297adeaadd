"""The parts of a layer: the numbers of flax and jax, forward and backward, and random bits that are random."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers.modeling_flax_utils import ACT2FN

from mlm.model import classifier_heads, layers
from mlm.training import sharding


def assert_same(ours, theirs, *args, tolerance=1e-5):
    """Values and gradients."""
    (found, pull), (expected, pull_expected) = (
        jax.vjp(jax.jit(function), *args) for function in (ours, theirs)
    )
    grad = jax.random.normal(jax.random.key(9), found.shape, found.dtype)
    pairs = zip((found, *pull(grad)), (expected, *pull_expected(grad)), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.abs(other).max()))


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu", "silu"])
def test_activations_are_transformers_own(name):
    x = jnp.concatenate([jnp.linspace(-12, 12, 4001), jnp.asarray([0.0, -40.0, 40.0])])
    assert_same(layers.ACTIVATIONS[name], ACT2FN[name], x, tolerance=1e-6)


@pytest.mark.parametrize(("inner", "outer"), [(24, 40), (40, 24)])
def test_products_biases_and_their_gradients(inner, outer):
    x, kernel, bias = (
        0.1 * jax.random.normal(key, shape)
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 3),
            ((4, 8, inner), (inner, outer), (outer,)),
            strict=True,
        )
    )
    assert_same(layers.product, lambda x, kernel: x @ kernel, x, kernel)
    assert_same(layers.add_bias, lambda x, bias: x + bias, x @ kernel, bias)
    assert_same(classifier_heads.logits, lambda x, kernel, bias: x @ kernel + bias, x, kernel, bias)


@pytest.mark.parametrize("platform", ["tpu", "default"])
def test_gradient_of_a_bias_is_added_up_in_float32(platform, monkeypatch):
    """And has the bias's type, or a step over bfloat16 parameters would return moments of other types."""
    monkeypatch.setattr(layers.lax, "platform_dependent", lambda x, **sums: sums[platform](x))
    grad = jnp.full((64, 64, 8), 1.001, jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        gradient = jax.vjp(layers.add_bias, grad, jnp.zeros(8, dtype))[1](grad)[1]
        assert gradient.dtype == dtype
        np.testing.assert_array_equal(gradient, dtype(64 * 64 * float(grad[0, 0, 0])))
    kernel = jnp.ones((8, 4), jnp.bfloat16)
    _, pull = jax.vjp(classifier_heads.logits, grad, kernel, kernel[0])
    assert {gradient.dtype for gradient in pull(jnp.ones((64, 64, 4)))} == {jnp.dtype("bfloat16")}


def test_dropout_has_its_rate_and_keeps_the_mean(monkeypatch):
    """The gradient is dropped where the value is."""
    ones = jnp.ones((32, 64, 128))
    rate = 0.3
    out, pull = jax.vjp(lambda x: layers.dropout(x, rate, jnp.uint32(7)), ones)
    np.testing.assert_array_equal(pull(ones)[0], out)
    out = np.asarray(out)
    assert set(np.unique(out)) == {np.float32(0), np.float32(1 / (1 - rate))}
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # of all; of each row, each token, each unit
        share = (out == 0).mean(axes)
        limit = 5 * np.sqrt(rate * (1 - rate) * share.size / out.size)
        assert np.abs(share - rate).max() < limit, axes
    bits = jnp.full(ones[0].shape, 2**31, jnp.uint32)
    monkeypatch.setattr(layers, "random_bits", lambda *_: bits)
    # of 2**32 bits as many are dropped as the rate says
    for rate, expected in ((0.5, 2), (0.5 + 2**-32, 0)):
        assert (layers.dropout(ones[0], rate, jnp.uint32(7)) == expected).all()


def test_random_bits_are_those_of_their_indices():
    """These numbers may change only with the format of a run: a change here breaks the resume of every run."""
    whole = np.asarray(layers.random_bits(jnp.uint32(5), (8, 16, 32)))
    assert whole[[0, 1, 7], [0, 2, 15], [0, 3, 31]].tolist() == [3568984768, 3063274614, 1039391821]
    rows = np.asarray([5, 2], np.uint32)
    tokens = np.asarray([[3, 3, 0], [15, 1, 7]], np.int32)
    found = layers.random_bits(jnp.uint32(5), (2, 3, 32), rows, tokens)
    np.testing.assert_array_equal(found, whole[rows[:, None], tokens])
    noise = layers.Noise(jnp.uint32(7), None)
    module = types.SimpleNamespace(path=("encoder", "dropout"))
    assert int(noise.seed_of(module)) == 2498657446
    mesh = sharding.make_mesh(data=4, fsdp=1, tensor=2)
    split = jax.jit(
        lambda seed: layers.random_bits(seed, (8, 16, 32)),
        out_shardings=jax.NamedSharding(mesh, jax.P("data", None, "tensor")),
    )
    np.testing.assert_array_equal(split(jnp.uint32(5)), whole)
