"""What the attention kernels cost: the compiler has no estimate for a Pallas kernel."""

from __future__ import annotations

import math
import re

from mlm.plan.hlo import Instruction

# Cycles per head of 64 and row, forward and backward, by device_kind and row length: bundles in the static schedules of
# libtpu 0.0.51 (tests/test_fused_attention.py compiles them again).
ATTENTION_CYCLES = {
    "TPU v2": {128: (454, 919), 256: (1228, 2627), 512: (3772, 8195)},
    "TPU v3": {128: (424, 938), 256: (1206, 2217), 512: (3417, 6766)},
    "TPU v4": {128: (206, 369), 256: (689, 900), 512: (2146, 3626)},
    "TPU v5 lite": {128: (193, 327), 256: (529, 692), 512: (1494, 2589)},
    "TPU v5": {128: (194, 327), 256: (534, 690), 512: (1518, 2586)},
    "TPU v6 lite": {128: (188, 349), 256: (434, 622), 512: (967, 1762)},
    "TPU7x": {128: (184, 326), 256: (425, 627), 512: (975, 1668)},
}


def attention_cycles(kernel: Instruction, kind: str) -> float:
    """Returns the cycles of a call of mlm/model/fused_attention.py on a device of `kind`; 0 if it is unknown."""
    name = re.search(r"fused_attention_(forward|backward)", kernel.op_name)
    # The softmax statistics, which forward returns and backward reads: rows x blocks of heads x heads x length.
    statistics = re.search(r"f32\[(\d+,\d+,\d+),(\d+)\]", kernel.shape + kernel.rest)
    if not name or not statistics:
        return 0.0
    cycles = ATTENTION_CYCLES.get(kind, {}).get(int(statistics[2]), (0, 0))
    return math.prod(map(int, statistics[1].split(","))) * cycles[name[1] == "backward"]
