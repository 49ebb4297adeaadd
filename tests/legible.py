"""How legible the code is: counts, circles, the order of the rooms. `python tests/legible.py`; exit code 1 for a fault.

A limit is lowered when the code gets better; it is not raised to what is there.
"""

import ast
import graphlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDERS = {"own", "found", "each", "most", "given"}  # names that don't say what they hold
LIMITS = {"placeholder names": 1, "dictionaries unpacked into a call": 14}
# Of mlm, from top to bottom: a room imports only what stands below it, or beside it between two bars.
ROOMS = (
    "__main__ | testing | commands | doctor report export bench plan sweep glue verify | inference | tasks | training"
    "| monitor | pretrained | model | data | engine | cluster"
    "| entry config config_across platforms config_rules workdir lease logs files paths errors text"
)
LEVELS = {
    f"mlm.{room}": level for level, rooms in enumerate(ROOMS.split("|")) for room in rooms.split()
}


def main() -> int:
    """Prints the counts and the faults; returns the exit code."""
    files = sorted(path for folder in ("mlm", "launch") for path in (ROOT / folder).rglob("*.py"))
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}
    counts = Counter(kind for tree in trees.values() for kind in kinds(tree))
    faults = [
        f"{counts[kind]} {kind}, at most {limit}"
        for kind, limit in LIMITS.items()
        if counts[kind] > limit
    ]
    modules = {
        file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for file, tree in trees.items()
        if file.startswith("mlm/")
    }
    imports = {module: set(imported(tree, modules)) - {module} for module, tree in modules.items()}
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, others in imports.items():
        rooms[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    circles = filter(None, (circle(imports), circle(rooms)))
    faults += [f"circle: {' <- '.join(names)}" for names in circles]
    for room in sorted(rooms.keys() - {"mlm"}):
        if room not in LEVELS:
            faults.append(f"{room}: has no place in ROOMS")
            continue
        above = [other for other in sorted(rooms[room]) if LEVELS.get(other, 0) < LEVELS[room]]
        faults += [f"{room} imports {other}, which stands above it" for other in above]
    print("\n".join([", ".join(f"{counts[kind]} {kind}" for kind in LIMITS), *faults]))
    return 1 if faults else 0


def kinds(tree: ast.Module) -> Iterator[str]:
    """Yields what each node counts as; a function may hand on the keyword arguments of its own caller."""
    handed_on = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.args.kwarg:
            name = function.args.kwarg.arg
            calls = (node for node in ast.walk(function) if isinstance(node, ast.keyword))
            handed_on |= {call for call in calls if getattr(call.value, "id", "") == name}
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")
        if name in PLACEHOLDERS:
            yield "placeholder names"
        if isinstance(node, ast.keyword) and node.arg is None and node not in handed_on:
            yield "dictionaries unpacked into a call"


def imported(tree: ast.Module, modules: dict[str, ast.Module]) -> Iterator[str]:
    """Yields the modules that a file imports, at its top or in a function; those for types alone are left out."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for_types = {node for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                {name if name in modules else node.module for name in names} & modules.keys()
            )
        elif isinstance(node, ast.Import) and node not in for_types:
            yield from ({alias.name for alias in node.names} & modules.keys())


def room_of(module: str) -> str:
    """Returns the room of a module: a folder or a file in mlm/."""
    return ".".join(module.split(".")[:2])


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Returns a circle of modules, none if there is no circle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


if __name__ == "__main__":
    sys.exit(main())
