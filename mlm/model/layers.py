"""Linen layers with transformers' parameters and results, and custom VJPs where autodiff is slow on TPUs or CPUs.

Dimensions: B rows, L tokens in a row, H size of a token's vector, O size of the output's, N = B x L.
"""

import functools
import math
import zlib
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Initializer = nn.initializers.Initializer
GOLDEN = np.uint32(0x9E3779B1)  # odd: multiplying by it maps 32-bit numbers one to one


class Dense(nn.Module):
    """Returns x @ kernel + bias in the type of x."""

    features: int
    kernel_init: Initializer
    use_bias: bool = True

    @nn.compact
    def __call__(self, x_BxLxH: Array) -> Array:
        kernel_HxO = self.param("kernel", self.kernel_init, (x_BxLxH.shape[-1], self.features))
        y_BxLxO = product(x_BxLxH, kernel_HxO.astype(x_BxLxH.dtype))
        if not self.use_bias:
            return y_BxLxO
        return add_bias(y_BxLxO, self.param("bias", nn.initializers.zeros, (self.features,)))


class Embedding(nn.Module):
    """A table of vectors [V, H]; what is read of it is cast, so that gradients are summed in float32.

    As in transformers' Flax classes, an index beyond its end gives NaN: a too long row, an unknown token.
    """

    entries: int
    features: int
    embedding_init: Initializer
    dtype: Any

    def setup(self) -> None:
        self.embedding = self.param("embedding", self.embedding_init, (self.entries, self.features))

    def __call__(self, ids_BxL: Array) -> Array:
        # clips; mode="fill" would not be fused
        x_BxLxH = jnp.asarray(self.embedding)[ids_BxL].astype(self.dtype)
        return jnp.where((jnp.asarray(ids_BxL) < self.entries)[..., None], x_BxLxH, jnp.nan)


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al., 2016) in float32 as flax computes it, in the type of x."""

    epsilon: float
    use_bias: bool = True

    @nn.compact
    def __call__(self, x_BxLxH: Array) -> Array:
        scale_H = self.param("scale", nn.initializers.ones, (x_BxLxH.shape[-1],))
        x = x_BxLxH.astype(jnp.float32)
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.maximum(jnp.mean(x * x, -1, keepdims=True) - mean * mean, 0)
        normed = (x - mean) * (lax.rsqrt(variance + self.epsilon) * scale_H)
        if self.use_bias:
            normed = normed + self.param("bias", nn.initializers.zeros, (x_BxLxH.shape[-1],))
        return normed.astype(x_BxLxH.dtype)


class Noise(NamedTuple):
    """What the dropout of a step depends on, besides the module and the token: never the mesh."""

    seed: Array  # uint32
    rows_B: Array  # uint32: each row's number in the global batch

    def seed_of(self, module: nn.Module) -> Array:
        """Returns the seed of a module, by its path: threefry for each would be dozens of kernels on a GPU."""
        return _hash(self.seed ^ np.uint32(zlib.crc32("/".join(module.path).encode())))


class Dropout(nn.Module):
    """Dropout with `random_bits`: a function of the step's key, the module, the row and the token."""

    rate: float

    def __call__(
        self, x_BxLxH: Array, noise: Noise | None, tokens_BxL: Array | None = None
    ) -> Array:
        """Drops entries of x; `noise` is None for no dropout, `tokens_BxL` if x has all tokens of its rows."""
        if noise is None or self.rate == 0:
            return x_BxLxH
        return dropout(x_BxLxH, self.rate, noise.seed_of(self), noise.rows_B, tokens_BxL)


@jax.custom_vjp
def product(x_BxLxH: Array, kernel_HxO: Array) -> Array:
    """Returns x @ kernel."""
    return x_BxLxH @ kernel_HxO


def product_gradients(saved: tuple[Array, Array], grad_BxLxO: Array) -> tuple[Array, Array]:
    """Returns the gradients of x and of the kernel in `product`."""
    x_BxLxH, kernel_HxO = saved
    x_NxH, grad_NxO = (array.reshape(-1, array.shape[-1]) for array in (x_BxLxH, grad_BxLxO))
    # On CPU, XLA transposes a copy of the left operand, so the narrower one goes there.
    is_narrower = x_NxH.shape[1] <= grad_NxO.shape[1]
    d_kernel_HxO = x_NxH.T @ grad_NxO if is_narrower else (grad_NxO.T @ x_NxH).T
    return grad_BxLxO @ kernel_HxO.T, d_kernel_HxO


product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), product_gradients)


@jax.custom_vjp
def add_bias(x_BxLxH: Array, bias_H: Array) -> Array:
    """Returns x + bias in the type of x; the gradient of the bias is a float32 sum over all tokens."""
    return x_BxLxH + bias_H.astype(x_BxLxH.dtype)


def bias_gradient(bias_H: Array, grad_BxLxH: Array) -> tuple[Array, Array]:
    """Returns the gradients of x and of the bias, in its type, in `add_bias`."""
    grad_NxH = grad_BxLxH.reshape(-1, grad_BxLxH.shape[-1])
    total = functools.partial(jnp.sum, axis=0, dtype=jnp.float32)
    sum_H = lax.platform_dependent(grad_NxH, tpu=_sum_by_product, default=total)
    return grad_BxLxH, sum_H.astype(bias_H.dtype)


def _sum_by_product(x_NxH: Array) -> Array:
    """The sum over axis 0 as a product with ones, at which a TPU's matrix unit is much faster than its vector units."""
    # 8 rows: the compiler would turn one into a sum again
    ones_8xN = jnp.ones((8, x_NxH.shape[0]), x_NxH.dtype)
    return jnp.matmul(ones_8xN, x_NxH, precision="highest", preferred_element_type=jnp.float32)[0]


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), bias), bias_gradient)


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """Exact GELU (Hendrycks and Gimpel, 2016) in float32, returned in the type of x; saves the derivative, not x."""
    return _gelu_and_derivative(x)[0]


def _gelu_and_derivative(x: Array) -> tuple[Array, Array]:
    y = x.astype(jnp.float32)
    cdf = 0.5 + 0.5 * lax.erf(y * np.float32(math.sqrt(0.5)))
    density = jnp.exp(-0.5 * y * y) * np.float32(1 / math.sqrt(2 * math.pi))
    return (y * cdf).astype(x.dtype), (cdf + y * density).astype(x.dtype)


gelu.defvjp(
    lambda x: lax.optimization_barrier(_gelu_and_derivative(x)),
    lambda derivative, grad: (grad * derivative,),
)


# By transformers' names: the exact GELU, and its approximation with tanh.
ACTIVATIONS = {"gelu": gelu, "gelu_new": jax.nn.gelu, "relu": jax.nn.relu, "silu": jax.nn.silu}


def dropout(x_BxLxH: Array, rate: float, seed: Array, *rows_and_tokens: Array | None) -> Array:
    """Dropout with `random_bits`, whose seed differs by call and step."""
    bits = random_bits(seed, x_BxLxH.shape, *rows_and_tokens)
    keep = bits >= np.uint32(round(rate * 2**32))
    return jnp.where(keep, x_BxLxH * np.asarray(1 / (1 - rate), x_BxLxH.dtype), 0)


def random_bits(
    seed: Array,
    shape: tuple[int, int, int],
    rows_B: Array | None = None,
    tokens_BxL: Array | None = None,
) -> Array:
    """Returns uint32 bits of a shape [B, L, H]: a function of only the seed and each element's indices.

    A counter goes through an integer hash ("lowbias32" of Wellons' hash-prospector), once for the row and once within
    it: the same on all devices, and much cheaper than threefry. Indices of rows and tokens that are None are 0, 1, ...
    """
    row, token, unit_H = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    if rows_B is not None:
        row = rows_B[:, None, None]
    if tokens_BxL is not None:
        token = tokens_BxL.astype(jnp.uint32)[:, :, None]
    row_key = _hash(row * GOLDEN + seed)
    return _hash((token * np.uint32(shape[2]) + unit_H) * GOLDEN ^ row_key)


def _hash(x: Array) -> Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
