"""Random keys and dtypes that nothing around a run chooses: no variable of the environment, no setting of a notebook.

jax and flax read their settings from the environment when they are imported, and a notebook may change them at any
time. What can be stated is stated here; `unstated` has the rest, which all hosts of a run and every resume share.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np

IMPLEMENTATION = "threefry2x32"

# How threefry's bits are laid out over devices, and how linen folds the names of modules into a key.
jax.config.update("jax_threefry_partitionable", True)
flax.config.update("flax_fix_rng_separator", False)

# Words in the flags of XLA that choose other roundings; all others of them leave the numbers as they are.
ROUNDING_FLAGS = ("precision", "fast_math")


def make_key(seed: int) -> jax.Array:
    """Returns `jax.random.key(seed)` of a seed from 0 to 2^32 - 1, whatever implementation and offset jax was given."""
    return jax.random.wrap_key_data(np.array([0, seed], np.uint32), impl=IMPLEMENTATION)


def in_32_bits(function: Callable) -> Callable:
    """Returns a function that is traced, or run, without 64-bit types, whether JAX_ENABLE_X64 asks for them or not."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return traced


def unstated() -> dict[str, Any]:
    """Returns {name: value} of what changes numbers and is the user's to choose, or was changed since the import."""
    xla_flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "jax_default_matmul_precision": str(jax.config.jax_default_matmul_precision),
        "jax_threefry_partitionable": bool(jax.config.jax_threefry_partitionable),
        "flax_fix_rng_separator": bool(flax.config.flax_fix_rng_separator),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
        "XLA_FLAGS": sorted(
            flag for flag in xla_flags if any(word in flag for word in ROUNDING_FLAGS)
        ),
    }
