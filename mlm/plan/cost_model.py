"""What a compiled program costs: cycles by who says so, collectives, and the operations that caused them.

The instructions of the program run one after another; loops as often as they turn, of a conditional the dearest branch.
Of each instruction the cost is, in this order:

1. the compiler's own estimate, where it has one;
2. of a Pallas kernel the cycles in kernels.py, or the FLOPs of its `cost_estimate` at the peak, or its bytes at the
   memory's bandwidth, whichever is longest. A kernel without any of them costs nothing here, and is named;
3. a collective, which the compiler does not cost: its bytes at the bandwidth of a ring through the slice (all-reduce
   2(n-1)/n of them, all-gather, reduce-scatter and all-to-all (n-1)/n, a permutation all);
4. anything else (random bits, sorts, gathers, copies): the bytes it reads and writes at the memory's bandwidth, a
   gathered operand not more often than the result is long.

What runs beside the computation, copies between memories and collectives with a start and a done, waits in a queue of
its own, one for the memory and one for the links, and costs what is left of it when its done is reached.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import re

from mlm.plan import hlo, kernels, links
from mlm.plan.hlo import Instruction, Module
from mlm.plan.topology import Topology

FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all")
FREE += ("opt-barrier", "async-update", "add-dependency", "domain")
FREE_TARGETS = re.compile(
    r"ConcatBitcast|AllocateBuffer|X64\w+|Assume\w+|\w*Bitpacked|AsyncCollective\w+|Sharding|SPMD\w+"
)
WRAPPERS = ("", "while", "body", "closed_call", "cond", "checkpoint", "rematted_computation", "shard_map")
NOISE = re.compile(r"<locals>|->|^FlaxRoberta")  # in a path: functions, formulas, the name of the whole model
Group = tuple[str, str, str]  # forward, backward, recompute or update; path of modules; file:line


@dataclasses.dataclass
class Collective:
    """All collectives of a kind: how many, their bytes on a device, cycles in all and those that nothing hides."""

    count: int = 0
    bytes: float = 0.0
    cycles: float = 0.0
    exposed: float = 0.0
    overlapping: int = 0


@dataclasses.dataclass
class Account:
    """Cycles of a device.

    Attributes:
      compiler: by the compiler's estimate.
      kernels, rule, links: by a kernel's declared cost; by bytes; in collectives that nothing hides.
      waits: for copies between memories.
      uncosted: {what: count} of kernels without a cost, calls of unknown things and loops of unknown length.
      instructions: [those that the compiler costs, those costed here].
      groups: {group: [cycles, count]}, everything above but the waits.
      collectives: by kind.
    """

    compiler: float = 0.0
    kernels: float = 0.0
    rule: float = 0.0
    links: float = 0.0
    waits: float = 0.0
    uncosted: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    instructions: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    groups: dict[Group, list[float]] = dataclasses.field(default_factory=dict)
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)

    @property
    def cycles(self) -> float:
        """All of them."""
        return self.compiler + self.kernels + self.rule + self.links + self.waits


@dataclasses.dataclass
class _Clock:
    """The cycle that it is, and when each queue, and each thing in one, will be done."""

    now: float = 0.0
    queues: dict[str, float] = dataclasses.field(default_factory=lambda: {"links": 0.0, "memory": 0.0})
    done: dict[str, float] = dataclasses.field(default_factory=dict)

    def start(self, queue: str, name: str, cycles: float) -> None:
        self.queues[queue] = max(self.queues[queue], self.now) + cycles
        self.done[name] = self.queues[queue]

    def wait(self, name: str) -> float:
        """Returns the cycles until the thing is done; it is now that many later."""
        left = max(0.0, self.done.pop(name, 0.0) - self.now)
        self.now += left
        return left

    def repeat(self, before: _Clock, times: int) -> None:
        """Lets all that happened since the copy `before` was made happen `times` times instead of once."""
        more = (self.now - before.now) * (times - 1)
        self.now += more
        self.queues = {name: when + more * (when > before.queues[name]) for name, when in self.queues.items()}
        self.done = {name: when + more * (name not in before.done) for name, when in self.done.items()}


def account(module: Module, topology: Topology) -> Account:
    """Returns what a step of the program costs a device of the topology."""
    walk = _Walk(module, topology)
    walk.run(module.entry, 1)
    return walk.account


class _Walk:
    """Goes through a program in the order in which it runs."""

    def __init__(self, module: Module, topology: Topology):
        self.module, self.topology = module, topology
        self.account, self.clock = Account(), _Clock()
        self.kinds: dict[str, str] = {}  # of the collectives that have begun, by name

    def run(self, computation: str, times: int) -> None:
        """Runs a computation once on the clock, and `times` times in the account."""
        for instruction in self.module.computations.get(computation, ()):
            self.one(instruction, times)

    def one(self, this: Instruction, times: int) -> None:
        opcode = this.opcode
        if opcode in FREE or (opcode == "custom-call" and FREE_TARGETS.fullmatch(this.target)):
            return
        if opcode == "while":
            self.loop(this, times)
        elif opcode == "conditional":
            self.branch(this, times)
        elif opcode == "call":
            self.run(this.called("to_apply"), times)
        elif opcode.endswith("-done"):
            self.finish(this, times)
        elif (inner := links.held(self.module, this)) is not None:
            self.communicate(this, inner, times)
        elif opcode.endswith("-start"):
            self.clock.start("memory", this.name, self.copied(this) / self.topology.hbm_bytes_per_cycle)
        else:
            self.compute(this, times)

    def compute(self, this: Instruction, times: int) -> None:
        """Counts an instruction that computes."""
        if this.cycles:
            self.spend("compiler", this, this.cycles, times)
        elif this.target == "tpu_custom_call":
            declared = {key: float(this.attribute(rf'"{key}":"(\d+)"') or 0) for key in ("flops", "bytes_accessed")}
            cycles = max(
                kernels.attention_cycles(this, self.topology.devices[0].device_kind),
                declared["flops"] / self.topology.family.flops_per_cycle,
                declared["bytes_accessed"] / self.topology.hbm_bytes_per_cycle,
            )
            if cycles:
                self.spend("kernels", this, cycles, times)
            else:
                self.account.uncosted[f"kernel {this.op_name}"] += times
        elif this.opcode == "custom-call":
            self.account.uncosted[f"call of {this.target}"] += times
        else:
            self.spend("rule", this, self.moved(this) / self.topology.hbm_bytes_per_cycle, times)

    def spend(self, field: str, this: Instruction, cycles: float, times: int, *, clock: bool = True) -> None:
        if clock:
            self.clock.now += cycles
        setattr(self.account, field, getattr(self.account, field) + cycles * times)
        self.account.instructions[field != "compiler"] += times
        line = self.account.groups.setdefault(group(this.op_name, self.module.source(this)), [0.0, 0])
        line[0] += cycles * times
        line[1] += times

    def moved(self, this: Instruction) -> float:
        """Returns the bytes that an instruction reads and writes."""
        result = hlo.size(this.shape)
        body = self.module.computations.get(this.called("calls"), [this])
        gathers = any(one.opcode in ("gather", "scatter", "dynamic-slice", "dynamic-update-slice") for one in body)
        read = [hlo.size(self.module.by_name[name].shape) for name in this.operands if name in self.module.by_name]
        return result + sum(min(one, result) if gathers else one for one in read)

    def copied(self, this: Instruction) -> float:
        """Returns the bytes of what a start brings about: a copy, a slice, or what a SparseCore computes."""
        body = self.module.computations.get(this.called("calls"))
        if body:
            return hlo.size(body[-1].shape)
        return hlo.size(hlo.elements(this.shape)[0 if this.opcode == "copy-start" else 1])

    def loop(self, this: Instruction, times: int) -> None:
        trips = self.trips(this)
        if trips is None:
            self.account.uncosted["loop of unknown length, counted once"] += times
            trips = 1
        before = copy.deepcopy(self.clock)
        self.run(this.called("body"), times * trips)
        self.clock.repeat(before, trips)

    def trips(self, this: Instruction) -> int | None:
        """Returns how often a loop turns, as the compiler notes it or its counter and bound say; None if unknown."""
        if noted := this.attribute(r'known_trip_count":\{"n":"(\d+)"'):
            return int(noted)
        body = self.module.computations.get(this.called("condition"), [])
        compare = next((one for one in body if one.opcode == "compare" and "direction=LT" in one.rest), None)
        if compare is None or compare is not body[-1] or len(compare.operands) != 2:
            return None
        counter, bound = (self.module.by_name[name] for name in compare.operands)
        index = counter.attribute(r"index=(\d+)")
        if not index or (limit := self.constant(bound.name)) is None:
            return None
        start = self.module.by_name.get(this.operands[0])
        begin = self.constant(start.operands[int(index)]) if start is not None and start.opcode == "tuple" else 0
        return max(0, limit - (begin or 0))

    def constant(self, name: str) -> int | None:
        """Returns the whole number that an instruction is, through copies of it; None if it is none."""
        this = self.module.by_name.get(name)
        while this is not None and this.opcode in ("copy", "bitcast", "convert") and this.operands:
            this = self.module.by_name.get(this.operands[0])
        is_number = this is not None and this.opcode == "constant" and re.fullmatch(r"-?\d+", this.inside)
        return int(this.inside) if is_number else None

    def branch(self, this: Instruction, times: int) -> None:
        branches = re.findall(r"%[\w.\-]+", this.attribute(r"branch_computations=\{([^}]*)\}")) or [
            this.called("true_computation"),
            this.called("false_computation"),
        ]
        before, ends = (self.account, self.clock), []
        for name in branches:
            self.account, self.clock = copy.deepcopy(before)
            self.run(name, times)
            ends.append((self.account, self.clock))
        self.account, self.clock = max(ends, key=lambda end: end[1].now)

    def communicate(self, this: Instruction, inner: Instruction, times: int) -> None:
        """Counts a collective that stands alone, begins beside the computation, or is fused with some of it."""
        key = inner.attribute(r"channel_id=(\d+)") or inner.name
        targets = {one.target for one in self.module.computations.get(this.called("calls"), ())}
        if "AsyncCollectiveDone" in targets:
            self.finish(this, times, key)
        elif "AsyncCollectiveStart" in targets or this.opcode.endswith("-start"):
            name = this.name if this.opcode.endswith("-start") else key
            self.begin(inner, name, times)
            self.account.collectives[links.kind(inner)].overlapping += times
        else:
            if key not in self.clock.done:  # or this is the computation beside which it runs
                self.begin(inner, this.name, times)
                self.finish(this, times, this.name)
            if this.opcode == "fusion" and this.cycles:
                self.spend("compiler", this, this.cycles, times)

    def begin(self, inner: Instruction, name: str, times: int) -> None:
        bytes_, cycles = links.traffic(inner, self.topology)
        row = self.account.collectives.setdefault(links.kind(inner), Collective())
        row.count += times
        row.bytes += bytes_ * times
        row.cycles += cycles * times
        self.clock.start("links", name, cycles)
        self.kinds[name] = links.kind(inner)

    def finish(self, this: Instruction, times: int, name: str = "") -> None:
        """Waits for what `name`, or else the instruction's operand, has begun."""
        if not name:
            name = this.operands[0]
            while self.module.by_name[name].opcode == "async-update":
                name = self.module.by_name[name].operands[0]
        kind, left = self.kinds.get(name), self.clock.wait(name)
        if kind is None:
            self.account.waits += left * times
        else:
            self.account.collectives[kind].exposed += left * times
            self.spend("links", this, left, times, clock=False)


def group(op_name: str, source: str) -> Group:
    """Returns what an operation is counted under: its part of the step, its module with layers as one, its source.

    "jit(step)/transpose(jvp(roberta))/encoder/layer/3/output/dense/dot_general" is ("backward",
    "roberta/encoder/layer/*/output/dense", source); without a module, the operation itself stands for it.
    """
    phase = "update"
    if "rematted_computation" in op_name:
        phase = "recompute"
    elif "transpose(" in op_name:
        phase = "backward"
    elif "jvp(" in op_name:
        phase = "forward"
    once = re.sub(r"transpose\((jvp\([^()]*\))\)/(?=\1)", "", op_name)  # what is recomputed has its path twice
    bare = re.sub(r"\b(?:transpose|jvp|vmap|checkpoint|remat)\(", "", re.sub(r"\bjit\([^()]*\)", "", once))
    parts = [part.replace(")", "") for part in bare.split("/")]
    kept = ["*" if part.isdigit() else part for part in parts if part not in WRAPPERS and not NOISE.search(part)]
    return phase, "/".join(kept[:-1] or kept) or "(unnamed)", source
