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
TRIPLE_QUOTED = re.compile(r'("""|\'\'\')(?:[^"\'\\]++|\\.|(?!\1)["\'])*+\1', re.DOTALL)
PREFIXES = ("", "r", "R", "u", "U")
HEADER = re.compile(r"^[ \t]*(?:async[ \t]+def|def|class)[ \t]", re.MULTILINE)
SINGLE_QUOTED = re.compile(  # a string that could be a docstring
    r"""
    :(?:
        (?: [ \t\f]* (?:\#[^\n]*)? \n )+ [ \t]* [rRuU]? (["']) (?!\1\1)  # below a header and comments
        | [ \t]* [rRuU]? (["']) [^\n]{50,} \2 [ \t]* \n  # on the line of a header
    )""",
    re.VERBOSE,
)


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
            nodes = _documented(source)
            texts = [ast.get_docstring(node) or "" for node in (_definitions(source) if nodes is None else nodes)]
    except (SyntaxError, ValueError, OSError):
        return []  # a template, or a file for another version of Python
    return [text for text in texts if len(text) >= SHORTEST and is_text(text)]


def _definitions(source: bytes) -> list[ast.AST]:
    """Returns the module and its classes and functions, in order."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DEFINITIONS)]
    return sorted(nodes, key=lambda node: getattr(node, "lineno", 0))


def _documented(source: bytes) -> list[ast.AST] | None:
    """Returns those of `_definitions` that have a docstring in triple quotes, in less than half of the time.

    Each such string is parsed with the header before it alone, without the code between. Returns None for a source in
    which strings and comments can't be told apart that simply, or which has docstrings in single quotes.
    """
    text = source.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    text = f":\n{text}\n"  # so that the module's docstring stands below a colon too
    nodes, stop = [], 0
    for string in TRIPLE_QUOTED.finditer(text):
        start, quotes, stop = stop, *string.span()
        line_start = max(start, text.rfind("\n", 0, quotes) + 1)
        before_quotes = text[line_start:quotes]
        if set(before_quotes) & set("\"'#") or SINGLE_QUOTED.search(text, start, quotes):
            return None
        if before_quotes.strip() not in PREFIXES and not HEADER.match(before_quotes):
            continue
        headers = [match.start() for match in HEADER.finditer(text, start, quotes)]
        if not headers and start and not text[start:quotes].rstrip().endswith(":"):
            continue  # a string, such as one below an assignment
        if not _is_comment(text[stop : text.index("\n", stop)]):
            return None
        if not headers and not all(map(_is_comment, text[2:line_start].split("\n"))):
            return None
        piece = text[headers[-1] if headers else line_start : stop]
        is_indented = piece[0] in " \t"
        try:
            tree = ast.parse(f"if 1:\n{piece}" if is_indented else piece)
        except SyntaxError:
            continue  # no docstring: there is code between the header and the string
        block = tree.body[0].body if is_indented else tree.body
        nodes.append(block[0] if headers else tree)
    rest = text[stop:]
    return None if '"""' in rest or "'''" in rest or SINGLE_QUOTED.search(rest) else nodes


def _is_comment(line: str) -> bool:
    """Returns whether the rest of a line is empty, or a comment."""
    return line.lstrip()[:1] in ("", "#")
