"""The embedded corpus: the docstrings of the packages that requirements.txt pins. Real text, on every machine.

The files are parsed, never imported. Packages that lie in the environment but not in requirements.txt are left out, so
the corpus is the same wherever the same requirements are installed.
"""

from __future__ import annotations

import ast
import concurrent.futures
import gc
import hashlib
import importlib.metadata
import inspect
import multiprocessing
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from mlm.data import cores

SHORTEST = 60  # characters; below that a docstring is a phrase
FILES_A_TASK = 64


def read() -> Iterator[str]:
    """Yields the docstrings, file by file, in an order that mixes the packages but is always the same."""
    files = _files()
    tasks = [files[start : start + FILES_A_TASK] for start in range(0, len(files), FILES_A_TASK)]
    context = multiprocessing.get_context("spawn")
    # Syntax trees have no cycles: the collector would find nothing in them, in a fifth of the time.
    with concurrent.futures.ProcessPoolExecutor(cores.available(), context, gc.disable) as pool:
        try:
            for texts in pool.map(of_files, tasks):
                yield from texts
        finally:
            pool.shutdown(cancel_futures=True)


def _files() -> list[Path]:
    """Returns the modules of the pinned packages, tests left out, ordered by a hash of their names."""
    requirements = Path(__file__).parents[2] / "requirements.txt"
    names = re.findall(r"^([A-Za-z0-9._-]+)==", requirements.read_text(), re.MULTILINE)
    found = {}
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # pinned for another platform
        for line in (distribution.read_text("RECORD") or "").splitlines():
            file = line.rpartition(",")[0].rpartition(",")[0]
            if file.endswith(".py") and not re.search(
                r"(^|/)(tests?|testing|_vendor)/|(^|/)(test_|conftest)|\.\.", file
            ):
                found[file] = Path(distribution.locate_file(file))
    return [found[file] for file in sorted(found, key=lambda f: hashlib.sha256(f.encode()).digest())]


def of_files(files: list[Path]) -> list[str]:
    """Returns the docstrings of the modules, classes and functions in some Python files, in their order."""
    texts = []
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other people's invalid escapes
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # a template, or a file for another version of Python
        texts += [text for text in map(_docstring, _definitions(tree)) if len(text) >= SHORTEST]
    return texts


def _definitions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the module and the classes and functions in it; docstrings lie in no other statement."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        stack.extend(reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]))


def _docstring(node: ast.AST) -> str:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        text = inspect.cleandoc(first.value.value)
        return text if re.search("[\ud800-\udfff]", text) is None else ""  # half a surrogate pair is no UTF-8
    return ""
