"""The text of a compiled program, read back: its computations, instruction by instruction, and where each came from.

The text is what `compiled.as_text()` gives for a TPU: scheduled, so that the instructions of a computation stand in
the order in which they run. Nothing here knows what an instruction costs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_COMPUTATION = re.compile(r"(?:ENTRY )?(%[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", re.DOTALL)
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
OURS = ("mlm/", "transformers/")  # lines of these say more than those of the libraries under them
_ROW = re.compile(r"(\d+) (.*)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: "%fusion.7".
      shape: of its result, as text.
      opcode: "fusion".
      inside: what stands between its parentheses.
      rest: its attributes, metadata and the compiler's notes.
    """

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
    def op_name(self) -> str:
        """The path of modules and functions that made it; "" if unknown."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """Returns the first group of `pattern` in the attributes, or "" if it isn't there."""
        found = re.search(pattern, self.rest)
        return found.group(1) if found else ""

    def called(self, key: str) -> str:
        """Returns the computation named by the attribute `key`, or ""."""
        return self.attribute(rf"\b{key}=(%[\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      entry: name of the computation that runs first.
      computations: by name.
      by_name: every instruction; their names are unique in a program.
      sources: {stack_frame_id: "file:line"} of the innermost line of Python in `OURS`, or else in anything.
    """

    entry: str
    computations: dict[str, list[Instruction]]
    by_name: dict[str, Instruction]
    sources: dict[int, str]

    def source(self, instruction: Instruction) -> str:
        """Returns "file:line", or "" if unknown."""
        return self.sources.get(int(instruction.attribute(r"stack_frame_id=(\d+)") or 0), "")


def parse(text: str) -> Module:
    """Reads a program.

    Raises:
      ValueError: it has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in _whole_lines(text):
        if not line.startswith(" "):
            header = _COMPUTATION.match(line)
            current = computations.setdefault(header.group(1), []) if header else None
            if header and line.startswith("ENTRY"):
                entry = header.group(1)
        elif current is not None and (found := _INSTRUCTION.match(line)):
            name, shape, opcode, tail = found.groups()
            inside, _, rest = tail.partition(")")
            current.append(Instruction(name, shape, opcode, inside, rest))
    if not entry:
        raise ValueError("the compiled text has no ENTRY computation")
    by_name = {one.name: one for body in computations.values() for one in body}
    return Module(entry, computations, by_name, _sources(text))


def _whole_lines(text: str) -> list[str]:
    """Returns the lines, with those that go on from an instruction (a kernel's metadata) joined to it."""
    lines: list[str] = []
    for line in text.splitlines():
        inside = lines and lines[-1].startswith("  ")
        if inside and line != "}" and not line.startswith(("  %", "  ROOT %", "}, execution_thread")):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def _sources(text: str) -> dict[int, str]:
    """Reads the four tables that stand before the computations."""

    def table(title: str) -> dict[int, str]:
        block = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        rows = (_ROW.match(line) for line in block.group(1).splitlines()) if block else ()
        return {int(row.group(1)): row.group(2) for row in rows if row}

    def number(row: str, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", row)
        return int(found.group(1)) if found else 0

    files, places, frames = table("FileNames"), table("FileLocations"), table("StackFrames")
    lines = {}
    for key, place in places.items():
        file = _short(files.get(number(place, "file_name_id"), "").strip('"'))
        lines[key] = f"{file}:{number(place, 'line')}" if file else ""

    def source(frame: int) -> str:
        innermost = lines.get(number(frames[frame], "file_location_id"), "")
        while frame in frames:
            line = lines.get(number(frames[frame], "file_location_id"), "")
            if line.startswith(OURS):
                return line
            frame = number(frames[frame], "parent_frame_id") - 1  # the text counts them from 2
        return innermost

    return {frame: source(frame) for frame in frames}


def _short(path: str) -> str:
    """Returns the path within the packages or the project."""
    if "site-packages/" in path:
        return path.rpartition("site-packages/")[2]
    return re.sub(r"^.*/(?=(?:mlm|tests|configs)/)", "", path)


def elements(shape: str) -> list[str]:
    """Returns the elements of a tuple's shape, as text; of an array's, itself."""
    if not shape.startswith("("):
        return [shape]
    found, depth, start = [], 0, 1
    for index, letter in enumerate(shape):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or depth == 0:
            found.append(shape[start:index].strip())
            start = index + 1
    return [one for one in found if one]


def size(shape: str) -> int:
    """Returns the bytes of a shape, all arrays of a tuple together, without the padding of their tiles."""
    total = 0.0
    for kind, dimensions in _ARRAY.findall(shape):
        count = math.prod(int(d.lstrip("<=")) for d in dimensions.split(",") if d)
        bits = 8 if kind == "pred" else int(re.search(r"\d+", kind).group())
        total += count * bits / 8
    return math.ceil(total)
