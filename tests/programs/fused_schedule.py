"""Compiles the kernels of mlm/model/fused_attention.py for a TPU and counts the bundles of the compiler's schedule.

    python tests/programs/fused_schedule.py TOPOLOGY LENGTH WINDOW ROTATED FOLDER

Run by tests/model/test_fused_attention.py, in a process of its own: libtpu writes its schedules to FOLDER where it is
asked to when it is loaded. Rows that are not rotated have a dropout mask, up to the length that may have one. Prints a
line of JSON: device_kind, and the cycles of one head of one row in a step of the grid, forward and backward.
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

from mlm.model import fused_attention
from mlm.plan.topology import find

(topology, length, window, rotated), folder = sys.argv[1:5], pathlib.Path(sys.argv[5])
length, window, HEADS, HIDDEN = int(length), int(window), 4, 256
device = find(topology).devices[0]
kind = device.device_kind
sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())
rows = max(2, 2048 // length)  # two steps or more
x = jax.ShapeDtypeStruct((rows, length, HIDDEN), jnp.bfloat16, sharding=sharding)
segments = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
angles = jax.ShapeDtypeStruct((1, length, 32), jnp.float32, sharding=sharding)
dropout_mask = jax.ShapeDtypeStruct((length, length), jnp.bfloat16, sharding=sharding)
has_dropout = length <= fused_attention.LONGEST_WITH_DROPOUT
extras = (None, (angles, angles)) if rotated == "1" else (dropout_mask if has_dropout else None, None)


def both(q, k, v, segments, extras, grad):
    def attend(q, k, v):
        return fused_attention.attend(q, k, v, segments, *extras, HEADS, False, window, kind)

    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(grad)


jax.jit(both).lower(x, x, x, segments, extras, x).compile()
cycles = []
for name in ("forward", "backward"):
    (schedule,) = folder.glob(f"*fused_attention_{name}*schedule-analysis_final_bundles.txt")
    bundles = int(re.search(r"total scheduled bundles:\s+(\d+)", schedule.read_text()).group(1))
    heads = HEADS * fused_attention.width_of(HIDDEN, HEADS) // HIDDEN  # of a step
    cycles.append(bundles / (heads * fused_attention.sizes(kind, length, window, rows).rows))
print(json.dumps([kind, *cycles]))
