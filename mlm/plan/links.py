"""Collectives in a compiled program: what kind they are, what they move, how long the links take for it."""

from __future__ import annotations

import math
import re

from mlm.plan import hlo
from mlm.plan.hlo import Instruction, Module
from mlm.plan.topology import Topology

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def kind(this: Instruction) -> str:
    """Returns the kind of a collective, whether it is one instruction or begins beside others."""
    return this.opcode.removesuffix("-start")


def held(module: Module, this: Instruction) -> Instruction | None:
    """Returns the collective that an instruction is, or that is fused into it or wrapped in it, if there is one."""
    if kind(this) in KINDS:
        return this
    if this.opcode not in ("fusion", "async-start", "custom-call"):
        return None
    name = this.called("calls") or this.attribute(r"called_computations=\{(%[\w.\-]+)")  # the latter on a SparseCore
    body = module.computations.get(name, ())
    return next((found for one in body if (found := held(module, one)) is not None), None)


def traffic(this: Instruction, topology: Topology) -> tuple[float, float]:
    """Returns (bytes of the whole that a collective works on, cycles that it takes on the links).

    On a ring of n devices each sends 2(n-1)/n of the whole in an all-reduce, (n-1)/n of it in an all-gather, a
    reduce-scatter or an all-to-all; in a permutation, all of its own.
    """
    parts = hlo.elements(this.shape)
    begins = this.opcode.endswith("-start") and kind(this) != "all-reduce" and len(parts) > 1  # (operand, result, ...)
    result, ways = hlo.size(parts[1] if begins else this.shape), group_size(this, len(topology.devices))
    whole = result * ways if kind(this) == "reduce-scatter" else result
    share = {"all-reduce": 2 * (ways - 1) / ways, "collective-permute": 1.0, "collective-broadcast": 1.0}
    return whole, whole * share.get(kind(this), (ways - 1) / ways) / topology.link_bytes_per_cycle


def group_size(this: Instruction, devices: int) -> int:
    """Returns the devices that a collective runs over together; all `devices` if it does not say."""
    if mesh := this.attribute(r"replica_groups=mesh\[([^\]]*)\]"):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        axes = re.findall(r"'(\w+)'", this.attribute(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}"))
        return math.prod(int(sizes[axis]) for axis in axes)
    if tiled := this.attribute(r"replica_groups=\[(?:\d+,)*(\d+)\]"):
        return int(tiled)
    listed = this.attribute(r"replica_groups=\{\{([\d,]+)\}")
    return len(listed.split(",")) if listed else devices
