"""The cycles of our attention kernels, which the compiler does not cost."""

import math
import re

from mlm.model import fused_attention
from mlm.plan.hlo import Instruction

# Bundles in the static schedules of libtpu 0.0.51 (tests/model/test_fused_attention.py compiles them again): (forward,
# backward) per head of 64 and step of the grid, a column for each of KINDS, by (rotated: 0 or 1, window, tokens in a
# chunk, several chunks in a row: 0 or 1). Kernels that do not rotate have a dropout mask up to 512 tokens; all others
# have none.
KINDS = ("TPU v2", "TPU v3", "TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
_BUNDLES = {
    (0, 0, 128, 0): ((435, 903), (416, 874), (173, 266), (123, 204), (120, 206), (99, 191), (104, 192)),
    (0, 0, 256, 0): ((1180, 2652), (1093, 2448), (532, 976), (360, 578), (359, 579), (230, 424), (240, 428)),
    (0, 0, 512, 0): ((3522, 7370), (3488, 6352), (2044, 3588), (1350, 2008), (1319, 2003), (758, 1386), (768, 1477)),
    (0, 0, 512, 1): (None, None, (1922, 3150), None, None, None, None),
    (0, 0, 1024, 0): (None, None, None, (4768, 6856), (4342, 6924), (2724, 4690), (2628, 4690)),
    (0, 0, 1024, 1): (None, None, None, (4734, 7690), (4790, 7732), (2772, 5058), (2672, 5086)),
    (1, 0, 128, 0): ((680, 1117), (653, 1076), (228, 365), (174, 287), (177, 295), (157, 290), (153, 277)),
    (1, 0, 256, 0): ((1622, 2922), (1508, 2697), (616, 908), (401, 610), (404, 618), (312, 557), (333, 537)),
    (1, 0, 512, 0): ((4428, 7876), (4068, 6831), (2023, 3297), (1300, 2064), (1243, 2067), (889, 1511), (848, 1496)),
    (1, 0, 512, 1): (None, None, (2221, 3484), None, None, None, None),
    (1, 0, 1024, 0): (None, None, None, (4858, 7641), (4515, 7659), (2974, 5040), (2935, 5105)),
    (1, 0, 1024, 1): (None, None, None, (5008, 8128), (5127, 8111), (3053, 5545), (2995, 5486)),
    (1, 64, 128, 0): ((682, 1127), (664, 1090), (238, 353), (159, 282), (160, 286), (155, 302), (162, 290)),
    (1, 64, 256, 0): ((1603, 3001), (1492, 2846), (575, 1028), (392, 767), (398, 778), (279, 568), (283, 549)),
    (1, 64, 512, 0): ((3408, 6391), (3204, 5970), (1270, 2187), (815, 1598), (841, 1609), (603, 1414), (639, 1408)),
    (1, 64, 512, 1): ((4306, 9276), (4102, 8777), (1592, 3245), None, None, None, None),
    (1, 64, 1024, 0): (None, None, None, (1748, 3284), (1779, 3330), (1245, 2796), (1331, 2794)),
    (1, 64, 1024, 1): (None, None, None, (2020, 4080), (2172, 4320), (1400, 3667), (1497, 3579)),
}
CYCLES = {kind: {key: row[n] for key, row in _BUNDLES.items() if row[n]} for n, kind in enumerate(KINDS)}


def cycles_of(kernel: Instruction, kind: str) -> float:
    """Returns the cycles of a call of one of our attention kernels on a device of `kind`; 0 if they are unknown."""
    name = re.search(r"fused_attention_(forward|backward)_(\d+)(_rotated)?", kernel.op_name)
    # The softmax statistics, which forward returns and backward reads: rows x blocks of heads x heads x length.
    statistics = re.search(r"f32\[(\d+,\d+,\d+),(\d+)\]", kernel.shape + kernel.rest)
    if not name or not statistics:
        return 0.0
    heads, length, window = math.prod(map(int, statistics[1].split(","))), int(statistics[2]), int(name[2])
    size = fused_attention.sizes(kind, length, window)
    key = bool(name[3]), window, size.queries, size.query_steps > 1
    forward, backward = CYCLES.get(kind, {}).get(key, (0, 0))
    return heads * size.query_steps * size.key_steps * (forward if name[1] == "forward" else backward)
