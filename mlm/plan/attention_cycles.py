"""The cycles of our attention kernels, which the compiler does not cost."""

import math
import re

from mlm.model import tiled_attention
from mlm.plan.hlo import Instruction

# Cycles per head of 64 and row, forward and backward, by device_kind and row length: bundles in the static schedules of
# libtpu 0.0.51 (tests/test_fused_attention.py compiles them again).
FUSED_CYCLES = {
    "TPU v2": {128: (454, 919), 256: (1228, 2627), 512: (3772, 8195)},
    "TPU v3": {128: (424, 938), 256: (1206, 2217), 512: (3417, 6766)},
    "TPU v4": {128: (206, 369), 256: (689, 900), 512: (2146, 3626)},
    "TPU v5 lite": {128: (193, 327), 256: (529, 692), 512: (1494, 2589)},
    "TPU v5": {128: (194, 327), 256: (534, 690), 512: (1518, 2586)},
    "TPU v6 lite": {128: (188, 349), 256: (434, 622), 512: (967, 1762)},
    "TPU7x": {128: (184, 326), 256: (425, 627), 512: (975, 1668)},
}

# Cycles per head of 64 and step of the grid of mlm/model/tiled_attention.py, forward and backward, with rotation, by
# device_kind, and by window and whether a row has several chunks (all of `tiled_attention.chunk_tokens`).
TILED_CYCLES = {
    "TPU v3": {(0, False): (4067, 6786), (64, False): (3203, 5970), (64, True): (4101, 8777)},
    "TPU v4": {(0, False): (2023, 3297), (0, True): (2221, 3484), (64, False): (1270, 2187), (64, True): (1592, 3245)},
    "TPU v5 lite": {
        (0, False): (4858, 7625),
        (0, True): (5008, 8088),
        (64, False): (1747, 3290),
        (64, True): (2020, 4078),
    },
    "TPU v5": {(0, False): (4515, 7659), (0, True): (5127, 8111), (64, False): (1779, 3330), (64, True): (2172, 4320)},
    "TPU v6 lite": {
        (0, False): (2974, 5039),
        (0, True): (3053, 5545),
        (64, False): (1245, 2796),
        (64, True): (1400, 3667),
    },
    "TPU7x": {(0, False): (2935, 5105), (0, True): (2995, 5486), (64, False): (1331, 2794), (64, True): (1497, 3579)},
}


def cycles_of(kernel: Instruction, kind: str) -> float:
    """Returns the cycles of a call of one of our attention kernels on a device of `kind`; 0 if they are unknown."""
    name = re.search(r"(fused|tiled)_attention_(forward|backward)_?(\d*)", kernel.op_name)
    # The softmax statistics, which forward returns and backward reads: rows x blocks of heads x heads x length.
    statistics = re.search(r"f32\[(\d+,\d+,\d+),(\d+)\]", kernel.shape + kernel.rest)
    if not name or not statistics:
        return 0.0
    heads, length = math.prod(map(int, statistics[1].split(","))), int(statistics[2])
    table, key, steps = FUSED_CYCLES, length, 1
    if name[1] == "tiled":
        size = tiled_attention.sizes(kind, length, int(name[3]))
        is_known = size.queries == tiled_attention.chunk_tokens(kind)
        table, key = TILED_CYCLES, (int(name[3]), size.query_steps > 1) if is_known else None
        steps = size.query_steps * size.key_steps
    return heads * steps * table.get(kind, {}).get(key, (0, 0))[name[2] == "backward"]
