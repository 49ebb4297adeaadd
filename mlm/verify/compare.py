"""Compares what the devices of every host hold with what they should, and says how far they are apart."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

# Of the largest value of all arrays: one whose values are smaller (a gradient that is 0) is noise
NEGLIGIBLE = 1e-3
STATUSES = {False: "FAIL", True: "ok", None: "-"}


class Result(NamedTuple):
    """A line of the screen."""

    what: str
    measured: str
    is_right: bool | None = None  # None if nothing says what it should be

    def __str__(self) -> str:
        return f"verify: {STATUSES[self.is_right]:4} {self.what}: {self.measured}"


def compare(what: str, arrays: Any, expected: Any, limit: float = 0.0) -> Result:
    """Compares the largest error of each array with its largest value; `expected` is the same on every host.

    Without a limit they must be equal. A host's devices hold a part of `arrays`, or all.
    """
    rights = [np.asarray(right, np.float64) for right in jax.tree.leaves(expected)]
    scales = [float(np.max(abs(right), initial=0.0)) for right in rights]
    floor = NEGLIGIBLE * max(scales)
    named = jax.tree_util.tree_leaves_with_path(arrays)
    errors = {}
    for (path, leaf), right, scale in zip(named, rights, scales, strict=True):
        differences = [
            np.max(abs(np.asarray(shard.data, np.float64) - right[shard.index]), initial=0.0)
            for shard in leaf.addressable_shards
        ]
        error = max(differences) / max(scale, floor, 1e-30)
        errors[jax.tree_util.keystr(path, simple=True, separator="/")] = float(
            np.nan_to_num(error, nan=np.inf)
        )
    worst = max(errors, key=errors.get)
    error_P = np.atleast_1d(multihost_utils.process_allgather(np.float32(errors[worst])))
    wrong = np.flatnonzero(~(error_P <= limit))
    measured = f"error {error_P.max():.2g}, at most {limit:.2g}"
    if len(wrong):
        hosts = ", ".join(f"host {host}" for host in wrong[:8])
        measured += f", on {hosts}, here most of all in {worst or what}"
    return Result(what, measured, not len(wrong))


def roundoff(dtype: str, device: jax.Device) -> float:
    """Returns the error of a rounding in products: of float32 it is bfloat16's on a TPU, and TF32's on a GPU."""
    bits = {"cpu": 24, "gpu": 11}.get(device.platform, 8)
    return 2.0 ** -(8 if dtype == "bfloat16" else bits)
