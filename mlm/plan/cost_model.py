"""The cost of a compiled program in cycles: by source, by part of the model, by collective, and by operation.

Instructions run one after another; a conditional costs its costliest branch. The cost of an instruction is the first of
these that applies:

1. the compiler's own estimate;
2. a Pallas kernel: what attention_cycles.py says, or the FLOPs or bytes of its `cost_estimate` at the device's peak and
   memory bandwidth, whichever is longest. A kernel with none of them costs nothing here and is reported;
3. a collective: its bytes at the bandwidth of a ring through the slice (`_traffic`);
4. anything else (random bits, sorts, gathers, copies; on a GPU all): the bytes that it reads and writes at the memory
   bandwidth, of a gathered operand no more than the size of the result; or the FLOPs of its products at the peak, if
   that takes longer (the roofline: Williams et al., 2009).

Asynchronous copies queue for the memory, asynchronous collectives for the links; they cost what is left of them when
their `-done` is reached.
"""

import collections
import copy
import re

from mlm.plan import attention_cycles, hlo
from mlm.plan.hlo import Instruction, Module
from mlm.plan.topology import Topology

FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all")
FREE += ("opt-barrier", "async-update", "add-dependency", "domain")
FREE_TARGETS = re.compile(
    r"ConcatBitcast|AllocateBuffer|X64\w+|Assume\w+|\w*Bitpacked|AsyncCollective\w+|Sharding|SPMD\w+"
)
WRAPPERS = ("", "while", "body", "closed_call", "cond", "checkpoint", "rematted_computation", "shard_map")
NOISE = re.compile(r"<locals>|->|Module$|\.")  # in a path: functions, einsum formulas, whole models, linen's methods

# A part is the first whose pattern is in the operation's phase, path and source; what has no name, masks and waits are
# "other", collectives are themselves.
PARTS = {
    "attention": r"attention|attn",
    "feed-forward": r"/layers?/",
    "embeddings": r"embeddings",
    "head": r"^(forward|backward|recompute) ",
    "other": r"masking|\(unnamed\)",
    "optimizer": "",
}

Group = tuple[str, str, str]  # forward, backward, recompute or update; path of modules; file:line


class Cost:
    """The cost of a program on one device."""

    def __init__(self) -> None:
        # By source; collectives and waits (for copies between memories) only as far as exposed.
        self.cycles = dict.fromkeys(("compiler", "kernels", "bytes", "collectives", "waits"), 0.0)
        self.uncosted = collections.Counter()  # kernels without a cost, unknown calls, loops of unknown length
        self.instructions = {"compiler": 0, "rules": 0}  # estimated by the compiler, and by the rules above alone
        self.groups: dict[Group, list[float]] = {}  # {group: [cycles, count]} of everything but the waits
        self.parts = dict.fromkeys((*PARTS, "collectives"), 0.0)
        # {kind: {"count", "overlapping", "bytes", "cycles", "exposed" cycles, that no computation hides}}.
        self.collectives: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)

    @property
    def total(self) -> float:
        """All cycles."""
        return sum(self.cycles.values())


class _Clock:
    """The current cycle, and the cycles at which each queue and each asynchronous operation ends."""

    def __init__(self) -> None:
        self.now, self.queues = 0.0, {"links": 0.0, "memory": 0.0}
        self.done: dict[str, float] = {}

    def start(self, queue: str, name: str, cycles: float) -> None:
        self.queues[queue] = max(self.queues[queue], self.now) + cycles
        self.done[name] = self.queues[queue]

    def wait(self, name: str) -> float:
        """Advances to the end of an operation; returns the cycles until then."""
        left = max(0.0, self.done.pop(name, 0.0) - self.now)
        self.now += left
        return left


def estimate(module: Module, topology: Topology) -> Cost:
    """Returns the cost of one step of the program on a device of the topology."""
    simulation = _Simulation(module, topology)
    simulation.run(module.entry, 1)
    return simulation.cost


class _Simulation:
    """Goes through a program in execution order; what runs `times` times takes so many times as long."""

    def __init__(self, module: Module, topology: Topology):
        self.module, self.topology = module, topology
        self.cost, self.clock = Cost(), _Clock()
        self.started: dict[str, str] = {}  # {name: kind} of asynchronous collectives

    def run(self, computation: str, times: int) -> None:
        for this in self.module.computations.get(computation, ()):
            opcode = this.opcode
            if opcode in FREE or (opcode == "custom-call" and FREE_TARGETS.fullmatch(this.target)):
                continue
            if opcode == "while":
                self.loop(this, times)
            elif opcode == "conditional":
                self.branch(this, times)
            elif opcode == "call":
                self.run(this.called("to_apply"), times)
            elif opcode.endswith("-done"):
                self.finish(this, times)
            elif (inner := hlo.find_collective(self.module, this)) is not None:
                self.communicate(this, inner, times)
            elif opcode.endswith("-start"):
                self.clock.start("memory", this.name, times * self.copied(this) / self.topology.hbm_bytes_per_cycle)
            else:
                self.compute(this, times)

    def compute(self, this: Instruction, times: int) -> None:
        if this.cycles:
            self.spend("compiler", this, this.cycles * times, times)
        elif this.target == "tpu_custom_call":
            flops, size = (float(this.attribute(rf'"{key}":"(\d+)"') or 0) for key in ("flops", "bytes_accessed"))
            cycles = max(flops / self.topology.family.flops_per_cycle, size / self.topology.hbm_bytes_per_cycle)
            cycles = max(cycles, attention_cycles.cycles_of(this, self.topology.devices[0].device_kind))
            if cycles:
                self.spend("kernels", this, cycles * times, times)
            else:
                self.cost.uncosted[f"kernel {this.op_name}"] += times
        elif this.opcode == "custom-call":
            self.cost.uncosted[f"call of {this.target}"] += times
        else:
            products = hlo.flops(self.module, this) / self.topology.family.flops_per_cycle
            cycles = max(products, self.moved(this) / self.topology.hbm_bytes_per_cycle)
            self.spend("bytes", this, cycles * times, times)

    def spend(self, source: str, this: Instruction, cycles: float, times: int) -> None:
        """Counts the cycles that an instruction takes in all the `times` that it runs."""
        if source != "collectives":  # whose wait has advanced the clock already
            self.clock.now += cycles
        self.cost.cycles[source] += cycles
        self.cost.instructions["compiler" if source == "compiler" else "rules"] += times
        self.cost.parts["collectives" if source == "collectives" else part(self.module, this)] += cycles
        total = self.cost.groups.setdefault(group(self.module, this), [0.0, 0])
        total[0] += cycles
        total[1] += times

    def moved(self, this: Instruction) -> float:
        """Returns the bytes that an instruction reads and writes."""
        result = hlo.size(this.shape)
        body = self.module.computations.get(this.called("calls"), [this])
        gathers = any(one.opcode in ("gather", "scatter", "dynamic-slice", "dynamic-update-slice") for one in body)
        read = [hlo.size(self.module.by_name[name].shape) for name in this.operands if name in self.module.by_name]
        return result + sum(min(size, result) if gathers else size for size in read)

    def copied(self, this: Instruction) -> float:
        """Returns the bytes that an asynchronous copy, slice or SparseCore computation writes."""
        body = self.module.computations.get(this.called("calls"))
        return hlo.size(body[-1].shape if body else hlo.elements(this.shape)[this.opcode != "copy-start"])

    def loop(self, this: Instruction, times: int) -> None:
        trips = self.trip_count(this)
        if trips is None:
            self.cost.uncosted["loop of unknown length, counted once"] += times
            trips = 1
        self.run(this.called("body"), times * trips)

    def trip_count(self, this: Instruction) -> int | None:
        """Returns a loop's trip count as the compiler notes it, or as counter and bound imply; None if unknown."""
        if noted := this.attribute(r'known_trip_count":\{"n":"(\d+)"'):
            return int(noted)
        condition = self.module.computations.get(this.called("condition"))
        if not condition or condition[-1].opcode != "compare" or "direction=LT" not in condition[-1].rest:
            return None
        counter, bound = (self.module.by_name[name] for name in condition[-1].operands)
        index, limit = counter.attribute(r"index=(\d+)"), self.constant(bound.name)
        if not index or limit is None:
            return None
        start = self.module.by_name.get(this.operands[0])
        begin = self.constant(start.operands[int(index)]) if start is not None and start.opcode == "tuple" else 0
        return max(0, limit - (begin or 0))

    def constant(self, name: str) -> int | None:
        """Returns the integer constant that an instruction is, or is a copy of; else None."""
        this = self.module.by_name.get(name)
        while this is not None and this.opcode in ("copy", "bitcast", "convert") and this.operands:
            this = self.module.by_name.get(this.operands[0])
        is_number = this is not None and this.opcode == "constant" and re.fullmatch(r"-?\d+", this.inside)
        return int(this.inside) if is_number else None

    def branch(self, this: Instruction, times: int) -> None:
        names = re.findall(r"%[\w.\-]+", this.attribute(r"branch_computations=\{([^}]*)\}"))
        before, ends = (self.cost, self.clock), []
        for name in names or [this.called("true_computation"), this.called("false_computation")]:
            self.cost, self.clock = copy.deepcopy(before)
            self.run(name, times)
            ends.append((self.cost, self.clock))
        self.cost, self.clock = max(ends, key=lambda end: end[1].now)

    def communicate(self, this: Instruction, inner: Instruction, times: int) -> None:
        """Counts a collective: synchronous, asynchronous, or fused with the computation that hides it."""
        key = inner.attribute(r"channel_id=(\d+)") or inner.name
        targets = {one.target for one in self.module.computations.get(this.called("calls"), ())}
        if "AsyncCollectiveDone" in targets:
            self.finish(this, times, key)
        elif "AsyncCollectiveStart" in targets or this.opcode.endswith("-start"):
            self.begin(inner, this.name if this.opcode.endswith("-start") else key, times)
            self.cost.collectives[inner.kind]["overlapping"] += times
        else:
            if key not in self.clock.done:  # else this is the computation that hides it
                self.begin(inner, this.name, times)
                self.finish(this, times, this.name)
            if this.opcode == "fusion" and this.cycles:
                self.spend("compiler", this, this.cycles * times, times)

    def begin(self, inner: Instruction, name: str, times: int) -> None:
        size, cycles = _traffic(inner, self.topology)
        self.cost.collectives[inner.kind].update(count=times, bytes=size * times, cycles=cycles * times)
        self.clock.start("links", name, cycles * times)
        self.started[name] = inner.kind

    def finish(self, this: Instruction, times: int, name: str = "") -> None:
        """Waits for the operation `name`, by default the instruction's operand."""
        if not name:
            name = this.operands[0]
            while self.module.by_name[name].opcode == "async-update":
                name = self.module.by_name[name].operands[0]
        kind, left = self.started.get(name), self.clock.wait(name)
        if kind is None:
            self.cost.cycles["waits"] += left
            self.cost.parts["other"] += left
        else:
            self.cost.collectives[kind]["exposed"] += left
            self.spend("collectives", this, left, times)


def _traffic(this: Instruction, topology: Topology) -> tuple[float, float]:
    """Returns (bytes of the whole array that a collective works on, cycles on the links).

    On a ring of n devices each sends 2(n-1)/n of the whole in an all-reduce, (n-1)/n in an all-gather, reduce-scatter
    or all-to-all, and all of its own in a permutation.
    """
    parts = hlo.elements(this.shape)
    begins = this.opcode.endswith("-start") and this.kind != "all-reduce" and len(parts) > 1  # (operand, result, ...)
    result, devices = hlo.size(parts[1] if begins else this.shape), hlo.group_size(this, len(topology.devices))
    whole = result * devices if this.kind == "reduce-scatter" else result
    once = (devices - 1) / devices
    sent = {"all-reduce": 2 * once, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(this.kind, once)
    return whole, whole * sent / topology.link_bytes_per_cycle


def part(module: Module, this: Instruction) -> str:
    """Returns the part of the model that an instruction belongs to: one of `PARTS`, or "collectives"."""
    while this.opcode.endswith(("-done", "-update")):
        this = module.by_name[this.operands[0]]
    collective = hlo.find_collective(module, this)
    if collective is this or (collective and not this.cycles):  # else it is the computation that hides the collective
        return "collectives"
    name = " ".join(group(module, this))
    return next(part for part, pattern in PARTS.items() if re.search(pattern, name))


def group(module: Module, this: Instruction) -> Group:
    """Returns the group of an instruction: its phase, its module (all layers as one), its source.

    "jit(step)/transpose(jvp(roberta))/encoder/layer/3/output/dense/dot_general" is ("backward",
    "roberta/encoder/layer/*/output/dense", source); outside a module the operation is named instead.
    """
    marks = {"rematted_computation": "recompute", "transpose(": "backward", "jvp(": "forward", "": "update"}
    phase = next(phase for mark, phase in marks.items() if mark in this.op_name)
    # Rematerialized operations repeat their path.
    once = re.sub(r"transpose\((jvp\([^()]*\))\)/(?=\1)", "", this.op_name)
    bare = re.sub(r"\b(?:transpose|jvp|vmap|checkpoint|remat)\(", "", re.sub(r"\bjit\([^()]*\)", "", once))
    parts = [part.replace(")", "") for part in bare.split("/")]
    kept = ["*" if part.isdigit() else part for part in parts if part not in WRAPPERS and not NOISE.search(part)]
    kept = kept[len(kept) - 1 - kept[::-1].index(kept[0]) :] if kept else kept  # a repeated path
    source = module.sources.get(this.attribute(r"stack_frame_id=(\d+)"), "")
    return phase, "/".join(kept[:-1] or kept) or "(unnamed)", source
