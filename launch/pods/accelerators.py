"""What the name of an accelerator type says: chips, hosts, and the runtime that goes with its generation.

The number in a name counts TensorCores, two a chip, on v2, v3, v4 and v5p (v4-32 is 16 chips), and chips on v5e and
v6e. A host is a VM: 4 chips, but up to 8 where a v5e or v6e slice fits on one. Sources: the pages "TPU v2" to "TPU v6e"
of cloud.google.com/tpu/docs (their tables of topologies: v5p 2x2x1 is 8 cores, 4 chips, 1 host; 2x2x2 is 16 cores, 8
chips, 2 hosts) and its page "TPU software versions" for the runtimes.
"""

import re
from typing import NamedTuple


class Accelerator(NamedTuple):
    """An accelerator type taken apart."""

    chips: int
    hosts: int
    runtime: str


GENERATIONS = {  # what the number in a name counts for one chip, the chips of its largest host, the default runtime
    "v2": (2, 4, "tpu-ubuntu2204-base"),
    "v3": (2, 4, "tpu-ubuntu2204-base"),
    "v4": (2, 4, "tpu-ubuntu2204-base"),
    "v5litepod": (1, 8, "v2-alpha-tpuv5-lite"),
    "v5p": (2, 4, "v2-alpha-tpuv5"),
    "v6e": (1, 8, "v2-alpha-tpuv6e"),
}


def parse(name: str) -> Accelerator:
    """Returns the accelerator of a type such as v4-32. Raises ValueError with the types that there are."""
    prefix, _, number = name.partition("-")
    if prefix == "tpu7x":
        raise ValueError(
            f"{name} is not offered as a TPU VM: on GKE, use the JobSet in launch/gke.yaml; on Compute Engine, start "
            "`python -m mlm run` on each host"
        )
    if prefix not in GENERATIONS or not re.fullmatch(r"[1-9][0-9]{0,5}", number):
        known = ", ".join(f"{prefix}-N" for prefix in GENERATIONS)
        raise ValueError(f"{name!r} is no accelerator type; they are {known}, such as v4-32 or v5litepod-16")
    cores, largest_host, runtime = GENERATIONS[prefix]
    chips, rest = divmod(int(number), cores)
    if rest:
        raise ValueError(f"{name!r}: the number counts TensorCores, {cores} a chip")
    if chips > largest_host and chips % 4:
        raise ValueError(f"{name!r}: {chips} chips do not fill hosts of 4")
    return Accelerator(chips, 1 if chips <= largest_host else chips // 4, runtime)
