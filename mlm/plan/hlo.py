"""Parses the text of a compiled program, whose computations list their instructions in execution order."""

import dataclasses
import functools
import math
import re

_COMPUTATION = re.compile(r"(ENTRY )?(%[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)?(.*)", re.DOTALL
)
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `name = shape opcode(inside), rest`, where the rest is attributes, metadata and notes."""

    name: str
    shape: str
    opcode: str
    inside: str
    rest: str

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it reads."""
        return re.findall(r"%[\w.\-]+", self.inside)

    @functools.cached_property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it has none."""
        return int(self.attribute(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def kind(self) -> str:
        """The opcode of a collective, asynchronous or not."""
        return self.opcode.removesuffix("-start")

    @property
    def op_name(self) -> str:
        """The path of modules and functions that it was traced in, or ""."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """Returns the first group of `pattern` in the attributes, or ""."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    def called(self, key: str) -> str:
        """Returns the computation named by the attribute `key`, or ""."""
        return self.attribute(rf"\b{key}=(%[\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    entry: str  # the computation that runs first
    computations: dict[str, list[Instruction]]
    by_name: dict[str, Instruction]


def parse(text: str) -> Module:
    """Reads a program; raises ValueError if it has no entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    current = None
    for line in _join_lines(text):
        if not line.startswith(" "):
            header = _COMPUTATION.match(line)
            current = computations.setdefault(header[2], []) if header else None
            entry = header[2] if header and header[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(*match.groups()))
    if not entry:
        raise ValueError("the compiled text has no ENTRY computation")
    by_name = {
        instruction.name: instruction for body in computations.values() for instruction in body
    }
    return Module(entry, computations, by_name)


def _join_lines(text: str) -> list[str]:
    """Returns the lines; an instruction over several of them (a kernel's metadata) as one."""
    lines: list[str] = []
    for line in text.splitlines():
        inside = lines and lines[-1].startswith("  ")
        if (
            inside
            and line != "}"
            and not line.startswith(("  %", "  ROOT %", "}, execution_thread"))
        ):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def size(shape: str) -> int:
    """Returns the bytes of an array or of all of a tuple, without the padding of tiles."""
    total = 0.0
    for dtype, dimensions in _ARRAY.findall(shape):
        count = math.prod(int(d.lstrip("<=")) for d in dimensions.split(",") if d)
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
        total += count * bits / 8
    return math.ceil(total)


def find_collective(module: Module, this: Instruction) -> Instruction | None:
    """Returns the collective that an instruction is, fuses or wraps, if any."""
    if this.kind in COLLECTIVES:
        return this
    if this.opcode not in ("fusion", "async-start", "custom-call"):
        return None
    # The latter on a SparseCore
    name = this.called("calls") or this.attribute(r"called_computations=\{(%[\w.\-]+)")
    inner = (
        find_collective(module, instruction) for instruction in module.computations.get(name, ())
    )
    return next(filter(None, inner), None)


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
