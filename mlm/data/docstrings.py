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
LEFT_OUT = re.compile(r"(^|/)(tests?|testing|_vendor)/|(^|/)(test_|conftest)|\.\.")  # of the files of a package
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Of Python's source: triple quotes that open and close, and what shows whether a docstring is between them.
QUOTES, OTHER_QUOTES = re.compile(r'"""|\'\'\''), re.compile("[\"'#]")
CLOSING = {quotes: re.compile(rf"(?<!\\)(?:\\\\)*{quotes}") for quotes in ('"""', "'''")}
PREFIXES = ("", "r", "R", "u", "U")
HEADER = re.compile(r"^[ \t]*(?:async[ \t]+def|def|class)[ \t]", re.MULTILINE)
COMMENTS, END_OF_LINE = re.compile(r"(?:[ \t\f]*(?:#[^\n]*)?\n)*"), re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
# A docstring in single quotes: below its header or beside it, or the module's.
BELOW = r"""(?:[ \t]*(?:#[^\n]*)?\n)+[ \t]*[rRuU]?(["'])(?!\1\1)"""
BESIDE = r"""[ \t]*[rRuU]?(["'])[^\n]{50,}\2[ \t]*\n"""
ONE_LINE, FIRST_LINE = re.compile(f":(?:{BELOW}|{BESIDE})"), re.compile(r"""(?:#[^\n]*\n|\s)*[rRuU]?(["'])(?!\1\1)""")


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
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # pinned for another platform
            package = importlib.metadata.distribution(name)
            lines = (line.rsplit(",", 2) for line in (package.read_text("RECORD") or "").splitlines())
            modules = sorted((file, int(size or 0)) for file, _, size in lines if file.endswith(".py"))
            modules = [(file, size) for file, size in modules if not LEFT_OUT.search(file)]
            first = total = 0
            for number, (_, size) in enumerate(modules, 1):
                total += size
                if total >= PART_BYTES or number == len(modules):
                    files = tuple(file for file, _ in modules[first:number])
                    yield Modules(name, package.version, first, files, total // SOURCE)
                    first, total = number, 0


def read(modules: Modules) -> Iterator[tuple[str, str]]:
    """Yields (file, docstring) of some modules."""
    package = importlib.metadata.distribution(modules.package)
    gc.disable()  # syntax trees have no cycles: garbage collection would take a fifth of the time and find nothing
    try:
        for file in modules.files:
            yield from ((file, text) for text in of_file(Path(package.locate_file(file))))
    finally:
        gc.enable()


def of_file(file: Path) -> list[str]:
    """Returns the docstrings of the module, classes and functions in a Python file, in order."""
    try:
        source = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in it
            nodes = _headers(source)
            found = [ast.get_docstring(node) or "" for node in (_definitions(source) if nodes is None else nodes)]
    except (SyntaxError, ValueError, OSError):
        return []  # a template, or a file for another version of Python
    return [text for text in found if len(text) >= SHORTEST and is_text(text)]


def _definitions(source: bytes) -> Iterator[ast.AST]:
    """Yields the module and its classes and functions in order; searches blocks of statements, which hold them all."""
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, DEFINITIONS):
            yield node
        for block in ("finalbody", "orelse", "handlers", "cases", "body"):
            stack.extend(reversed(getattr(node, block, ())))


def _headers(source: bytes) -> list[ast.AST] | None:
    """Returns the same nodes, of each no more than its header and its docstring, in less than half of the time.

    Whatever stands in triple quotes is parsed with the header before it. None if the quotes alone don't show that.
    """
    text, stop, found = source.decode("utf-8-sig", "replace").replace("\r\n", "\n"), 0, []
    if FIRST_LINE.match(text):
        return None
    while opening := QUOTES.search(text, stop):
        first, begin = stop, opening.start()
        line = text[max(first, text.rfind("\n", 0, begin) + 1) : begin]
        closing = CLOSING[opening[0]].search(text, opening.end())
        if closing is None or OTHER_QUOTES.search(line) or ONE_LINE.search(text, first, begin):
            return None
        stop = closing.end()
        if line.strip() not in PREFIXES and not HEADER.match(line):
            continue
        headers, left = [*HEADER.finditer(text, first, begin)], begin - len(line)
        if not headers and first and not text[first:begin].rstrip().endswith(":"):
            continue
        if not END_OF_LINE.match(text, stop) or not (headers or COMMENTS.fullmatch(text, 0, left)):
            return None
        piece = text[headers[-1].start() if headers else left : stop]
        indented = piece[0] in " \t"
        try:
            tree = ast.parse(f"if 1:\n{piece}" if indented else piece)
        except SyntaxError:
            continue  # no docstring: there is code between
        block = tree.body[0].body if indented else tree.body
        found.append(block[0] if headers else tree)
    return None if ONE_LINE.search(text, stop) else found
