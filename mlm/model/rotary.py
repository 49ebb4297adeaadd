"""Rotary positions (Su et al., 2021, RoFormer).

Dimensions: B rows, L tokens, H hidden size = heads x D head size.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from transformers import ModernBertConfig

Rotation = tuple[Array, Array]  # cosine and sine of the angles, [B or 1, L, D / 2]


def rotate(x_BxLxH: Array, cos: Array, sin: Array) -> Array:
    """Returns x rotated by the angles: a head's first and second half are the planes' two coordinates."""
    rows, length, _ = x_BxLxH.shape
    halves = x_BxLxH.astype(jnp.float32).reshape(rows, length, -1, 2, cos.shape[-1])
    first = halves[..., 0, :]
    second = halves[..., 1, :]
    cos = cos[:, :, None]
    sin = sin[:, :, None]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated.reshape(x_BxLxH.shape).astype(x_BxLxH.dtype)


def rotations(config: ModernBertConfig, positions_BxL: Array) -> dict[str, Rotation]:
    """Returns the rotations of "global" and "local" layers, [B or 1, L, D / 2]."""
    size = config.hidden_size // config.num_attention_heads
    exponents = (np.arange(0, size, 2, np.float32) / size).astype(np.float64)

    def rotation(theta: float) -> Rotation:
        # Rounded as in PyTorch: at position 8,000, the last bit of a frequency is worth 5e-4 rad.
        frequencies = np.float32(1) / (theta**exponents).astype(np.float32)
        angles = positions_BxL[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)

    return {
        "global": rotation(config.global_rope_theta),
        "local": rotation(config.local_rope_theta),
    }
