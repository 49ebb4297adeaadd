"""Docstrings: those that Python's own parser finds, though most files are not parsed whole."""

import ast
import importlib.metadata
import pathlib

import pytest

from mlm.data import docstrings
from mlm.text import is_text
from tests.fixtures import slow

LONG = "some words that are long enough to be a document, more than sixty letters"


@pytest.mark.parametrize("packages", [("absl-py", "optax", "rich"), slow(())])
def test_those_of_the_syntax_tree(packages):
    """Of all files of some packages, or of every one."""
    read = whole = 0
    for modules in docstrings.parts():
        for name in modules.files if modules.package in packages or not packages else ():
            file = pathlib.Path(importlib.metadata.distribution(modules.package).locate_file(name))
            try:
                found = [ast.get_docstring(node) or "" for node in docstrings._definitions(file.read_bytes())]
            except SyntaxError:
                continue
            assert docstrings.of_file(file) == [t for t in found if len(t) >= docstrings.SHORTEST and is_text(t)], file
            read += 1
            whole += docstrings._headers(file.read_bytes()) is None
    assert read > 100 and whole < read / 10


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    'In single quotes {long}'\n",
        "'''In single {long}'''\n",
        '"In single {long}"\n',
        'def f(): "On the line of its header, {long}"\n',
        'def f(): """On the line of its header, {long}"""\n',
        'class A:\n    x = 1\n    """Of x, {long}"""\n',
        'def f():\n    return """{long}"""\n',
        'x = (\n    """{long}"""\n)\n\ndef f():\n    """{long}"""\n',
        'def f():\n    """{long}""" % 3\n',
        'def f():\n    """{long}""" "and more"\n',
        'def f():\n    r"""\\d {long}"""\n    """{long}"""\n',
        'def f():\n    """{long} \\""" and more"""\n',
        "def f():\n    x = '\"\"\"'\n    def g():\n        '''{long}'''\n",
        "def f():\n    # \"\"\" {long}\n    def g():\n        '''{long}'''\n",
        "text = \"\"\"\ndef f():\n    '''{long}'''\n\"\"\"\n",
        'try:\n    import a\nexcept ImportError:\n    def f(\n        a=":",\n    ):\n        """{long}"""\n',
        'def f(a, b={1: 2}) -> "A":  # a comment\n    # another\n\n    """{long}"""\n',
        '# License\n\n"""{long}"""\n\n"""No docstring, {long}"""\nasync def f():\n\t"""{long}"""\n',
        'def f():\n    if True:\n        """No docstring, {long}"""\n',
        "def f(a='''of triple quotes''', b=1):\n    '''{long}'''\n",
        "match 1:\n    case 1:\n        class A:\n            '''{long}'''\n",
    ],
)
def test_wherever_they_stand(tmp_path, source):
    file = tmp_path / "a.py"
    file.write_text(source.replace("{long}", LONG))
    tree = ast.parse(file.read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, docstrings.DEFINITIONS))
    assert docstrings.of_file(file) == [text for node in nodes if (text := ast.get_docstring(node))]
