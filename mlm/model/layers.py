"""The parts of a transformer layer: transformers' parameters and numbers, with a cheaper backward pass.

Where automatic differentiation gives a slow program, by the TPU compiler's cycles and by the clock on CPUs, a part has
a derivative of its own: the bias's sum over tokens, GELU's error function; dropout has cheaper random bits.

Dimensions: B rows, L tokens in a row, H size of a token's vector, O size of the output's, N = B x L.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GOLDEN = np.uint32(0x9E3779B1)  # odd: multiplying by it maps 32-bit numbers one to one


def dense(params: dict[str, jax.Array], x_BxLxH: jax.Array) -> jax.Array:
    """Returns x @ kernel + bias in the type of x."""
    return add_bias(product(x_BxLxH, params["kernel"].astype(x_BxLxH.dtype)), params["bias"])


@jax.custom_vjp
def product(x_BxLxH: jax.Array, kernel_HxO: jax.Array) -> jax.Array:
    """Returns x @ kernel.

    For the kernel's gradient, XLA copies and transposes the first factor on CPUs, so the narrower factor comes first.
    """
    return x_BxLxH @ kernel_HxO


def _product_gradients(saved: tuple[jax.Array, jax.Array], grad_BxLxO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BxLxH, kernel_HxO = saved
    x_NxH, grad_NxO = (each.reshape(-1, each.shape[-1]) for each in (x_BxLxH, grad_BxLxO))
    d_kernel_HxO = x_NxH.T @ grad_NxO if x_NxH.shape[1] <= grad_NxO.shape[1] else (grad_NxO.T @ x_NxH).T
    return grad_BxLxO @ kernel_HxO.T, d_kernel_HxO


product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _product_gradients)


@jax.custom_vjp
def add_bias(x_BxLxH: jax.Array, bias_H: jax.Array) -> jax.Array:
    """Returns x + bias in the type of x.

    On a TPU, the bias's gradient, a float32 sum over all tokens, is a product with ones: its matrix unit is much faster
    at it than its vector units.
    """
    return x_BxLxH + bias_H.astype(x_BxLxH.dtype)


def _bias_gradient(_: None, grad_BxLxH: jax.Array) -> tuple[jax.Array, jax.Array]:
    grad_NxH = grad_BxLxH.reshape(-1, grad_BxLxH.shape[-1])
    return grad_BxLxH, lax.platform_dependent(grad_NxH, tpu=_sum_by_product, default=_sum)


def _sum(x_NxH: jax.Array) -> jax.Array:
    return jnp.sum(x_NxH, axis=0, dtype=jnp.float32)


def _sum_by_product(x_NxH: jax.Array) -> jax.Array:
    ones_8xN = jnp.ones((8, x_NxH.shape[0]), x_NxH.dtype)  # 8 rows: the compiler would turn one into a sum again
    return jnp.matmul(ones_8xN, x_NxH, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)[0]


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), None), _bias_gradient)


def layer_norm(params: dict[str, jax.Array], x_BxLxH: jax.Array, epsilon: float) -> jax.Array:
    """Layer normalisation (Ba et al., 2016) in float32 as flax computes it, returned in the type of x."""
    x = x_BxLxH.astype(jnp.float32)
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.maximum(jnp.mean(x * x, -1, keepdims=True) - mean * mean, 0)
    scale = lax.rsqrt(variance + epsilon) * params["scale"]
    return ((x - mean) * scale + params["bias"]).astype(x_BxLxH.dtype)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Returns x times the normal distribution function (Hendrycks and Gimpel, 2016), exact, in float32 inside.

    The forward pass computes the derivative and saves it instead of x, so that the backward pass needs no error
    function: the same memory, a third of the transcendentals.
    """
    return _gelu_and_derivative(x)[0]


def _gelu_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = x.astype(jnp.float32)
    cdf = 0.5 + 0.5 * lax.erf(y * np.float32(math.sqrt(0.5)))
    density = jnp.exp(-0.5 * y * y) * np.float32(1 / math.sqrt(2 * math.pi))
    return (y * cdf).astype(x.dtype), (cdf + y * density).astype(x.dtype)


gelu.defvjp(lambda x: lax.optimization_barrier(_gelu_and_derivative(x)), lambda derivative, grad: (grad * derivative,))


def activation(name: str, x: jax.Array) -> jax.Array:
    """Returns the activation that transformers calls `name`: gelu (exact), gelu_new (tanh), relu or silu."""
    functions = {"gelu": gelu, "gelu_new": jax.nn.gelu, "relu": jax.nn.relu, "silu": jax.nn.silu}
    return functions[name](x)


def dropout(
    x_BxLxH: jax.Array,
    rate: float,
    seed: jax.Array | None,
    rows_B: jax.Array | None = None,
    tokens_BxL: jax.Array | None = None,
) -> jax.Array:
    """Dropout with the bits of `random_bits`; returns x where the seed is None or the rate 0.

    Args:
      seed: a uint32 scalar, a different one for each call and each step.
    """
    if seed is None or rate == 0:
        return x_BxLxH
    keep = random_bits(seed, x_BxLxH.shape, rows_B, tokens_BxL) >= np.uint32(round(rate * 2**32))
    return jnp.where(keep, x_BxLxH * np.asarray(1 / (1 - rate), x_BxLxH.dtype), 0)


def random_bits(
    seed: jax.Array,
    shape: tuple[int, int, int],
    rows_B: jax.Array | None = None,
    tokens_BxL: jax.Array | None = None,
) -> jax.Array:
    """Returns uint32 bits of a shape [B, L, H]: a function of only the seed and each element's indices.

    A counter goes through an integer hash ("lowbias32" of Wellons' hash-prospector, with nearly the least bias possible
    for two multiplications), once for the row and once within it. It needs no memory, fuses with its consumers, is the
    same on every kind and number of devices, and takes a few operations where jax's threefry takes twenty rounds.

    Args:
      rows_B: index of each row, uint32; None for 0, 1, ...
      tokens_BxL: index of each token in its row; None for 0, 1, ...
    """
    row, token, unit_H = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    if rows_B is not None:
        row = rows_B[:, None, None]
    if tokens_BxL is not None:
        token = tokens_BxL.astype(jnp.uint32)[:, :, None]
    row_key = _hash(row * GOLDEN + seed)
    return _hash((token * np.uint32(shape[2]) + unit_H) * GOLDEN ^ row_key)


def _hash(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
