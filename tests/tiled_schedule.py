"""Compiles the kernels of mlm/model/tiled_attention.py for a TPU and counts the bundles of the compiler's schedule.

    python tests/tiled_schedule.py TOPOLOGY LENGTH WINDOW ROTATED FOLDER

Run by tests/test_fused_attention.py as fused_schedule.py is. Prints a line of JSON: device_kind, and the bundles of
one step of the grid, forward and backward.
"""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.model import tiled_attention
from mlm.plan.topology import find

(topology, length, window, rotated), folder = sys.argv[1:5], pathlib.Path(sys.argv[5])
length, window, HEADS, HIDDEN = int(length), int(window), 4, 256
device = find(topology).devices[0]
sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())
x = jax.ShapeDtypeStruct((2, length, HIDDEN), jnp.bfloat16, sharding=sharding)
segments = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=sharding)
angles = jax.ShapeDtypeStruct((1, length, 32), jnp.float32, sharding=sharding)


def both(q, k, v, segments, rotation, grad):
    def attend(q, k, v):
        kind = device.device_kind
        return tiled_attention.attend(q, k, v, segments, None, rotation, HEADS, False, window, kind)

    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(grad)


jax.jit(both).lower(x, x, x, segments, (angles, angles) if rotated == "1" else None, x).compile()
bundles = []
for name in ("forward", "backward"):
    (schedule,) = folder.glob(f"*tiled_attention_{name}*schedule-analysis_final_bundles.txt")
    bundles.append(int(re.search(r"total scheduled bundles:\s+(\d+)", schedule.read_text()).group(1)))
print(json.dumps([device.device_kind, *bundles]))
