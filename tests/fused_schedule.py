"""Compiles the kernels of mlm/model/fused_attention.py for a TPU and counts the bundles of the compiler's schedule.

    python tests/fused_schedule.py TOPOLOGY LENGTH FOLDER

Run by tests/test_fused_attention.py, in a process of its own: libtpu writes its schedules to FOLDER where it is asked
to when it is loaded. Prints a line of JSON: device_kind and the cycles of one head of one row, forward, backward.
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

topology, length, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
HEADS, HIDDEN, BLOCKS = 4, 256, 2
device = find(topology).devices[0]
sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())
rows = BLOCKS * fused_attention.block_tokens(device.device_kind) // length
x = jax.ShapeDtypeStruct((rows, length, HIDDEN), jnp.bfloat16, sharding=sharding)
segments = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
dropout_mask = jax.ShapeDtypeStruct((length, length), jnp.bfloat16, sharding=sharding)


def both(q, k, v, segments, dropout_mask, grad):
    out, pull = jax.vjp(
        lambda q, k, v: fused_attention.attend(q, k, v, segments, dropout_mask, HEADS, False, 0, device.device_kind),
        q,
        k,
        v,
    )
    return out, pull(grad)


jax.jit(both).lower(x, x, x, segments, dropout_mask, x).compile()
cycles = []
for name in ("forward", "backward"):
    (schedule,) = folder.glob(f"*fused_attention_{name}*schedule-analysis_final_bundles.txt")
    bundles = int(re.search(r"total scheduled bundles:\s+(\d+)", schedule.read_text()).group(1))
    cycles.append(bundles * BLOCKS * (HIDDEN // fused_attention.LANES) / (rows * HEADS))
print(json.dumps([device.device_kind, *cycles]))
