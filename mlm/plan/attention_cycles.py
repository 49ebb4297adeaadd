"""The cycles of our attention kernels, which the compiler does not cost."""

import math
import re

from mlm.model import fused_attention
from mlm.plan.hlo import Instruction

# Bundles in the static schedules of libtpu 0.0.51 (tests/test_fused_attention.py compiles them again), forward and
# backward, per head of 64 and step of the grid: device_kind -> (rotated, window, tokens in a chunk, whether a row has
# several chunks). Kernels that do not rotate have a dropout mask up to 512 tokens; all others have none.
CYCLES = {
    "TPU v2": {
        (False, 0, 128, False): (435, 903),
        (False, 0, 256, False): (1180, 2652),
        (False, 0, 512, False): (3522, 7370),
        (True, 0, 128, False): (680, 1117),
        (True, 0, 256, False): (1622, 2922),
        (True, 0, 512, False): (4428, 7876),
        (True, 64, 128, False): (682, 1127),
        (True, 64, 256, False): (1603, 3001),
        (True, 64, 512, False): (3408, 6391),
        (True, 64, 512, True): (4306, 9276),
    },
    "TPU v3": {
        (False, 0, 128, False): (416, 874),
        (False, 0, 256, False): (1093, 2448),
        (False, 0, 512, False): (3488, 6352),
        (True, 0, 128, False): (653, 1076),
        (True, 0, 256, False): (1508, 2697),
        (True, 0, 512, False): (4068, 6831),
        (True, 64, 128, False): (664, 1090),
        (True, 64, 256, False): (1492, 2846),
        (True, 64, 512, False): (3204, 5970),
        (True, 64, 512, True): (4102, 8777),
    },
    "TPU v4": {
        (False, 0, 128, False): (173, 266),
        (False, 0, 256, False): (532, 976),
        (False, 0, 512, False): (2044, 3588),
        (False, 0, 512, True): (1922, 3150),
        (True, 0, 128, False): (228, 365),
        (True, 0, 256, False): (616, 908),
        (True, 0, 512, False): (2023, 3297),
        (True, 0, 512, True): (2221, 3484),
        (True, 64, 128, False): (238, 353),
        (True, 64, 256, False): (575, 1028),
        (True, 64, 512, False): (1270, 2187),
        (True, 64, 512, True): (1592, 3245),
    },
    "TPU v5 lite": {
        (False, 0, 128, False): (123, 204),
        (False, 0, 256, False): (360, 578),
        (False, 0, 512, False): (1350, 2008),
        (False, 0, 1024, False): (4768, 6856),
        (False, 0, 1024, True): (4734, 7690),
        (True, 0, 128, False): (174, 287),
        (True, 0, 256, False): (401, 610),
        (True, 0, 512, False): (1300, 2064),
        (True, 0, 1024, False): (4858, 7641),
        (True, 0, 1024, True): (5008, 8128),
        (True, 64, 128, False): (159, 282),
        (True, 64, 256, False): (392, 767),
        (True, 64, 512, False): (815, 1598),
        (True, 64, 1024, False): (1748, 3284),
        (True, 64, 1024, True): (2020, 4080),
    },
    "TPU v5": {
        (False, 0, 128, False): (120, 206),
        (False, 0, 256, False): (359, 579),
        (False, 0, 512, False): (1319, 2003),
        (False, 0, 1024, False): (4342, 6924),
        (False, 0, 1024, True): (4790, 7732),
        (True, 0, 128, False): (177, 295),
        (True, 0, 256, False): (404, 618),
        (True, 0, 512, False): (1243, 2067),
        (True, 0, 1024, False): (4515, 7659),
        (True, 0, 1024, True): (5127, 8111),
        (True, 64, 128, False): (160, 286),
        (True, 64, 256, False): (398, 778),
        (True, 64, 512, False): (841, 1609),
        (True, 64, 1024, False): (1779, 3330),
        (True, 64, 1024, True): (2172, 4320),
    },
    "TPU v6 lite": {
        (False, 0, 128, False): (99, 191),
        (False, 0, 256, False): (230, 424),
        (False, 0, 512, False): (758, 1386),
        (False, 0, 1024, False): (2724, 4690),
        (False, 0, 1024, True): (2772, 5058),
        (True, 0, 128, False): (157, 290),
        (True, 0, 256, False): (312, 557),
        (True, 0, 512, False): (889, 1511),
        (True, 0, 1024, False): (2974, 5040),
        (True, 0, 1024, True): (3053, 5545),
        (True, 64, 128, False): (155, 302),
        (True, 64, 256, False): (279, 568),
        (True, 64, 512, False): (603, 1414),
        (True, 64, 1024, False): (1245, 2796),
        (True, 64, 1024, True): (1400, 3667),
    },
    "TPU7x": {
        (False, 0, 128, False): (104, 192),
        (False, 0, 256, False): (240, 428),
        (False, 0, 512, False): (768, 1477),
        (False, 0, 1024, False): (2628, 4690),
        (False, 0, 1024, True): (2672, 5086),
        (True, 0, 128, False): (153, 277),
        (True, 0, 256, False): (333, 537),
        (True, 0, 512, False): (848, 1496),
        (True, 0, 1024, False): (2935, 5105),
        (True, 0, 1024, True): (2995, 5486),
        (True, 64, 128, False): (162, 290),
        (True, 64, 256, False): (283, 549),
        (True, 64, 512, False): (639, 1408),
        (True, 64, 1024, False): (1331, 2794),
        (True, 64, 1024, True): (1497, 3579),
    },
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
    known = CYCLES.get(kind, {}).get((bool(name[3]), window, size.queries, size.query_steps > 1), (0, 0))
    return heads * size.query_steps * size.key_steps * known[name[1] == "backward"]
