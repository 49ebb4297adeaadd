"""The embedded corpus: the docstrings of the packages that requirements.txt pins. Real text, on every machine.

The files are parsed, never imported. Installed packages that requirements.txt doesn't pin are left out, so the corpus
is the same wherever the same requirements are installed.
"""

import ast
import concurrent.futures
import contextlib
import gc
import hashlib
import importlib.metadata
import multiprocessing
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from mlm.data.hosts import available_cores
from mlm.text import is_text

SHORTEST = 60  # characters; below that a docstring is a phrase
FILES_PER_TASK = 64
LEFT_OUT = re.compile(r"(^|/)(tests?|testing|_vendor)/|(^|/)(test_|conftest)|\.\.")  # of the files of a package


def read() -> Iterator[str]:
    """Yields the docstrings, file by file, in an order that mixes the packages but is always the same."""
    context = multiprocessing.get_context("spawn")
    # Syntax trees have no cycles: garbage collection would take a fifth of the time and find nothing.
    with concurrent.futures.ProcessPoolExecutor(available_cores(), context, gc.disable) as pool:
        try:
            for texts in pool.map(of_file, _files(), chunksize=FILES_PER_TASK):
                yield from texts
        finally:
            pool.shutdown(cancel_futures=True)


def _files() -> list[Path]:
    """Returns the modules of the pinned packages, tests left out, ordered by a hash of their names."""
    requirements = Path(__file__).parents[2] / "requirements.txt"
    found = {}
    for name in re.findall(r"^([A-Za-z0-9._-]+)==", requirements.read_text(), re.MULTILINE):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # pinned for another platform
            package = importlib.metadata.distribution(name)
            files = (line.rsplit(",", 2)[0] for line in (package.read_text("RECORD") or "").splitlines())
            modules = [file for file in files if file.endswith(".py") and not LEFT_OUT.search(file)]
            found |= {file: Path(package.locate_file(file)) for file in modules}
    return [found[file] for file in sorted(found, key=lambda f: hashlib.sha256(f.encode()).digest())]


def of_file(file: Path) -> list[str]:
    """Returns the docstrings of the module, classes and functions in a Python file, in order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in it
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []  # a template, or a file for another version of Python
    found = (ast.get_docstring(node) or "" for node in _definitions(tree))
    return [text for text in found if len(text) >= SHORTEST and is_text(text)]


def _definitions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the module and its classes and functions in order; searches statements only, which hold them all."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        stack.extend(reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]))
