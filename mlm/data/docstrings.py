"""The embedded corpus: the docstrings of the packages that requirements.txt pins, which are parsed, never imported."""

import ast
import contextlib
import gc
import importlib.metadata
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlm.text import is_text

SHORTEST = 60  # characters; below that a docstring is a phrase
PART_BYTES = 2 * 10**6  # of source code
SOURCE = 4  # bytes of source code for each byte of docstrings, about
# of the files of a package
LEFT_OUT = re.compile(r"(^|/)(tests?|testing|_vendor)/|(^|/)(test_|conftest)|\.\.")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# of a statement: the statements in it
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


class Modules(NamedTuple):
    """Some modules of a package, as a part of the corpus."""

    package: str
    version: str
    first: int  # of the package's modules in order
    files: tuple[str, ...]  # as the package's RECORD names them
    bytes: int  # about, of docstrings


def parts() -> Iterator[Modules]:
    """Yields the modules of the pinned packages in order, tests left out."""
    requirements = Path(__file__).parents[2] / "requirements.txt"
    pins = requirements.read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"^([A-Za-z0-9._-]+)==", pins, re.MULTILINE))):
        # pinned for another platform
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = importlib.metadata.distribution(name)
            lines = (
                line.rsplit(",", 2) for line in (package.read_text("RECORD") or "").splitlines()
            )
            modules = sorted(
                (file, int(size or 0)) for file, _, size in lines if file.endswith(".py")
            )
            modules = [(file, size) for file, size in modules if not LEFT_OUT.search(file)]
            first = total = 0
            for number, (_, size) in enumerate(modules, 1):
                total += size
                if total >= PART_BYTES or number == len(modules):
                    files = tuple(file for file, _ in modules[first:number])
                    yield Modules(name, package.version, first, files, total // SOURCE)
                    first = number
                    total = 0


def read_docstrings(modules: Modules) -> Iterator[tuple[str, str]]:
    """Yields (file, docstring) of some modules."""
    package = importlib.metadata.distribution(modules.package)
    # syntax trees have no cycles: garbage collection would take a fifth of the time and find nothing
    gc.disable()
    try:
        for file in modules.files:
            yield from ((file, text) for text in of_file(Path(package.locate_file(file))))
    finally:
        gc.enable()


def of_file(file: Path) -> list[str]:
    """Returns the docstrings of the module, classes and functions in a Python file, in order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in it
            module = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []  # a template, or a file for another version of Python
    definitions = sorted(_definitions(module), key=lambda node: getattr(node, "lineno", 0))
    texts = [ast.get_docstring(node) or "" for node in definitions]
    return [text for text in texts if len(text) >= SHORTEST and is_text(text)]


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the module, its classes and functions. Statements alone are looked at, which is faster than ast.walk."""
    if isinstance(node, DEFINITIONS):
        yield node
    for block in BLOCKS:
        for statement in getattr(node, block, ()):
            yield from _definitions(statement)
