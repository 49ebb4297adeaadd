"""The cycles of our attention kernels, which the compiler does not cost."""

import math
import re

from mlm.model import fused_attention
from mlm.plan.hlo import Instruction

# Bundles in the static schedules of libtpu 0.0.51 (tests/test_fused_attention.py compiles them again), per head of 64
# and row, forward and backward, by device_kind and length: short rows with dropout, without rotation and window.
SHORT_CYCLES = {
    "TPU v2": {128: (435, 903), 256: (1180, 2652), 512: (3522, 7370)},
    "TPU v3": {128: (416, 874), 256: (1093, 2448), 512: (3488, 6352)},
    "TPU v4": {128: (173, 266), 256: (532, 976), 512: (2044, 3588)},
    "TPU v5 lite": {128: (123, 204), 256: (360, 578), 512: (1350, 2008)},
    "TPU v5": {128: (120, 206), 256: (359, 579), 512: (1319, 2003)},
    "TPU v6 lite": {128: (99, 191), 256: (230, 424), 512: (758, 1386)},
    "TPU7x": {128: (104, 192), 256: (240, 428), 512: (768, 1477)},
}

# The same with rotation, without dropout, per head and step of the grid, by device_kind, and by window and whether a
# row has several chunks (all of `fused_attention.chunk_tokens`).
LONG_CYCLES = {
    "TPU v3": {(0, False): (4068, 6831), (64, False): (3204, 5970), (64, True): (4102, 8777)},
    "TPU v4": {(0, False): (2023, 3297), (0, True): (2221, 3484), (64, False): (1270, 2187), (64, True): (1592, 3245)},
    "TPU v5 lite": {
        (0, False): (4858, 7641),
        (0, True): (5008, 8128),
        (64, False): (1748, 3284),
        (64, True): (2020, 4080),
    },
    "TPU v5": {(0, False): (4515, 7659), (0, True): (5127, 8111), (64, False): (1779, 3330), (64, True): (2172, 4320)},
    "TPU v6 lite": {
        (0, False): (2974, 5040),
        (0, True): (3053, 5545),
        (64, False): (1245, 2796),
        (64, True): (1400, 3667),
    },
    "TPU7x": {(0, False): (2935, 5105), (0, True): (2995, 5486), (64, False): (1331, 2794), (64, True): (1497, 3579)},
}


def cycles_of(kernel: Instruction, kind: str) -> float:
    """Returns the cycles of a call of one of our attention kernels on a device of `kind`; 0 if they are unknown."""
    name = re.search(r"fused_attention_(forward|backward)_(\d+)(_rotated)?", kernel.op_name)
    # The softmax statistics, which forward returns and backward reads: rows x blocks of heads x heads x length.
    statistics = re.search(r"f32\[(\d+,\d+,\d+),(\d+)\]", kernel.shape + kernel.rest)
    if not name or not statistics:
        return 0.0
    heads, length, window = math.prod(map(int, statistics[1].split(","))), int(statistics[2]), int(name[2])
    size = fused_attention.sizes(kind, length, window)
    table, key, steps = LONG_CYCLES, (window, size.query_steps > 1), size.query_steps * size.key_steps
    if not window and not name[3] and length in SHORT_CYCLES.get(kind, {}):
        table, key = SHORT_CYCLES, length
    elif size.queries != fused_attention.chunk_tokens(kind):
        return 0.0
    return heads * steps * table.get(kind, {}).get(key, (0, 0))[name[1] == "backward"]
