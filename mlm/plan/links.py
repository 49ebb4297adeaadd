"""Collectives in a compiled program: their kind, the bytes they move, the time that takes on the links."""

from __future__ import annotations

import math
import re

from mlm.plan import hlo
from mlm.plan.hlo import Instruction, Module
from mlm.plan.topology import Topology

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def kind(this: Instruction) -> str:
    """Returns the kind of a collective, synchronous or not."""
    return this.opcode.removesuffix("-start")


def find_collective(module: Module, this: Instruction) -> Instruction | None:
    """Returns the collective that an instruction is, fuses or wraps, if any."""
    if kind(this) in KINDS:
        return this
    if this.opcode not in ("fusion", "async-start", "custom-call"):
        return None
    name = this.called("calls") or this.attribute(r"called_computations=\{(%[\w.\-]+)")  # the latter on a SparseCore
    inner = (find_collective(module, each) for each in module.computations.get(name, ()))
    return next((found for found in inner if found is not None), None)


def traffic(this: Instruction, topology: Topology) -> tuple[float, float]:
    """Returns (bytes of the whole array that a collective works on, cycles on the links).

    On a ring of n devices each sends 2(n-1)/n of the whole in an all-reduce, (n-1)/n in an all-gather, reduce-scatter
    or all-to-all, and all of its own in a permutation.
    """
    parts = hlo.elements(this.shape)
    begins = this.opcode.endswith("-start") and kind(this) != "all-reduce" and len(parts) > 1  # (operand, result, ...)
    result, devices = hlo.size(parts[1] if begins else this.shape), group_size(this, len(topology.devices))
    whole = result * devices if kind(this) == "reduce-scatter" else result
    once = (devices - 1) / devices
    sent = {"all-reduce": 2 * once, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(kind(this), once)
    return whole, whole * sent / topology.link_bytes_per_cycle


def group_size(this: Instruction, devices: int) -> int:
    """Returns the number of devices in each group of a collective; `devices` if it does not say."""
    if mesh := this.attribute(r"replica_groups=mesh\[([^\]]*)\]"):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        axes = re.findall(r"'(\w+)'", this.attribute(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}"))
        return math.prod(int(sizes[axis]) for axis in axes)
    if tiled := this.attribute(r"replica_groups=\[(?:\d+,)*(\d+)\]"):
        return int(tiled)
    listed = this.attribute(r"replica_groups=\{\{([\d,]+)\}")
    return len(listed.split(",")) if listed else devices
