"""The time of a compiled program in cycles: by what says so, and by collective.

Instructions run one after another. An instruction costs the first of these that there is:

1. the compiler's own estimate;
2. of a Pallas kernel, the FLOPs or bytes of its `cost_estimate` at the device's peak and memory bandwidth, whichever
   takes longer. A kernel without one costs nothing here and is reported;
3. of a collective, its bytes at the bandwidth of a ring through the slice (`traffic`); of an asynchronous one, what is
   left of that when its `-done` is reached;
4. of anything else (random bits, sorts, gathers), the bytes that it writes and reads at the memory
   bandwidth, of each operand no more than the size of the result. Asynchronous copies between
   memories cost nothing.
"""

import collections
import re

from mlm.plan import hlo
from mlm.plan.hlo import Instruction, Module
from mlm.plan.topology import Topology

FREE = (
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "partition-id",
    "replica-id",
    "after-all",
)
FREE += ("opt-barrier", "async-update", "add-dependency", "domain")
FREE_TARGETS = re.compile(
    r"ConcatBitcast|AllocateBuffer|X64\w+|Assume\w+|\w*Bitpacked|AsyncCollective\w+|Sharding|SPMD\w+"
)
SOURCES = {
    "compiler": "the compiler's own",
    "kernels": "Pallas kernels by their cost_estimate",
    "collectives": "collectives",
    "bytes": "other memory traffic",
}


class Cost:
    """The cost of one step of a program on a device of the topology.

    Goes through the program in execution order; what runs `times` times takes so many times as
    long.
    """

    def __init__(self, module: Module, topology: Topology):
        self.module = module
        self.topology = topology
        # By source, of the list above; of collectives, what no computation hides.
        self.cycles = dict.fromkeys(SOURCES, 0.0)
        self.uncosted = collections.Counter()  # what costs nothing here
        if topology.slices > 1:
            self.uncosted["traffic between the slices (DCN)"] += 1
        # {kind: {"count", "overlapping", "bytes", "cycles", "exposed" cycles, that no computation
        # hides}}.
        self.collectives: dict[str, collections.Counter] = collections.defaultdict(
            collections.Counter
        )
        self.links_free = 0.0  # the cycle at which the last collective has left the links
        self.running: dict[str, tuple[str, float]] = {}  # {name: (kind, cycle of its end)}
        self.run(module.entry, 1)

    @property
    def total(self) -> float:
        """All cycles."""
        return sum(self.cycles.values())

    def run(self, computation: str, times: int) -> None:
        """Adds the cost of a computation."""
        for this in self.module.computations.get(computation, ()):
            opcode = this.opcode
            if opcode in FREE or (opcode == "custom-call" and FREE_TARGETS.fullmatch(this.target)):
                continue
            if opcode == "while":
                self.loop(this, times)
            elif opcode == "conditional":  # none of our steps has one
                self.uncosted["conditional"] += times
            elif opcode == "call":
                self.run(this.called("to_apply"), times)
            elif opcode.endswith("-done"):
                self.finish(self.start_of(this).name)
            elif (inner := hlo.find_collective(self.module, this)) is not None:
                self.communicate(this, inner, times)
            elif not opcode.endswith("-start"):
                self.compute(this, times)

    def compute(self, this: Instruction, times: int) -> None:
        """Adds the cost of an instruction that calls no other computation and no other device."""
        if this.cycles:
            self.cycles["compiler"] += this.cycles * times
        elif this.target == "tpu_custom_call":
            flops = float(this.attribute(r'"flops":"(\d+)"') or 0)
            size = float(this.attribute(r'"bytes_accessed":"(\d+)"') or 0)
            cycles = max(
                flops / self.topology.family.flops_per_cycle,
                size / self.topology.hbm_bytes_per_cycle,
            )
            if cycles:
                self.cycles["kernels"] += cycles * times
            else:
                self.uncosted[f"kernel {this.op_name}"] += times
        elif this.opcode == "custom-call":
            self.uncosted[f"call of {this.target}"] += times
        else:
            result = hlo.size(this.shape)
            operands = [
                self.module.by_name[name] for name in this.operands if name in self.module.by_name
            ]
            moved = result + sum(min(hlo.size(operand.shape), result) for operand in operands)
            self.cycles["bytes"] += moved / self.topology.hbm_bytes_per_cycle * times

    def loop(self, this: Instruction, times: int) -> None:
        """Adds the cost of all rounds of a loop."""
        trips = self.trip_count(this)
        if trips is None:
            self.uncosted["loop of unknown length, counted once"] += times
            trips = 1
        self.run(this.called("body"), times * trips)

    def trip_count(self, this: Instruction) -> int | None:
        """Returns how often a loop runs, by the bounds of its counter; None if it has no constant ones."""
        *_, compare = self.module.computations[this.called("condition")]
        if compare.opcode != "compare" or "direction=LT" not in compare.rest:
            return None
        counter, bound = (self.module.by_name[name] for name in compare.operands)
        start = self.module.by_name[this.operands[0]]
        if counter.opcode != "get-tuple-element" or start.opcode != "tuple":
            return None
        first = self.constant(start.operands[int(counter.attribute(r"index=(\d+)"))])
        limit = self.constant(bound.name)
        return None if first is None or limit is None else max(0, limit - first)

    def constant(self, name: str) -> int | None:
        """Returns the integer constant that an instruction is, or is a copy of; else None."""
        this = self.module.by_name[name]
        while this.opcode in ("copy", "bitcast", "convert"):
            this = self.module.by_name[this.operands[0]]
        return (
            int(this.inside)
            if this.opcode == "constant" and re.fullmatch(r"-?\d+", this.inside)
            else None
        )

    def communicate(self, this: Instruction, inner: Instruction, times: int) -> None:
        """Counts a collective: synchronous, asynchronous, or fused with the computation that hides it."""
        key = inner.attribute(r"channel_id=(\d+)") or inner.name
        targets = {one.target for one in self.module.computations.get(this.called("calls"), ())}
        if "AsyncCollectiveDone" in targets:
            self.finish(key)
        elif "AsyncCollectiveStart" in targets or this.opcode.endswith("-start"):
            self.begin(inner, this.name if this.opcode.endswith("-start") else key, times)
            self.collectives[inner.kind]["overlapping"] += times
        else:
            if key not in self.running:  # else this is the computation that hides it
                self.begin(inner, this.name, times)
                self.finish(this.name)
            if this.opcode == "fusion" and this.cycles:
                self.cycles["compiler"] += this.cycles * times

    def begin(self, inner: Instruction, name: str, times: int) -> None:
        """Puts a collective on the links, behind those that are there."""
        size, cycles = self.traffic(inner)
        self.collectives[inner.kind].update(count=times, bytes=size * times, cycles=cycles * times)
        self.links_free = max(self.links_free, self.total) + cycles * times
        self.running[name] = inner.kind, self.links_free

    def start_of(self, this: Instruction) -> Instruction:
        """Returns the `-start` of a `-done`."""
        while this.opcode.endswith(("-done", "-update")):
            this = self.module.by_name[this.operands[0]]
        return this

    def finish(self, name: str) -> None:
        """Waits for the collective that is running under a name, if one is."""
        kind, end = self.running.pop(name, ("", 0.0))
        if kind:
            left = max(0.0, end - self.total)
            self.collectives[kind]["exposed"] += left
            self.cycles["collectives"] += left

    def traffic(self, this: Instruction) -> tuple[float, float]:
        """Returns (bytes of the whole array that a collective works on, cycles on the links).

        On a ring of n devices each sends 2(n-1)/n of the whole in an all-reduce, (n-1)/n in an
        all-gather, reduce-scatter or all-to-all, and all of its own in a permutation.
        """
        whole = hlo.size(this.shape)
        # Its shape is (operands, results)
        if this.opcode.endswith("-start") and this.kind != "all-reduce":
            whole -= sum(hlo.size(self.module.by_name[name].shape) for name in this.operands)
        devices = hlo.group_size(this, len(self.topology.devices))
        if this.kind == "reduce-scatter":
            whole *= devices
        once = (devices - 1) / devices
        sent = {"all-reduce": 2 * once, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(
            this.kind, once
        )
        return whole, whole * sent / self.topology.link_bytes_per_cycle
