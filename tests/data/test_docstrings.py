"""Docstrings: those that Python's own parser finds, though most files are not parsed whole."""

import ast

import pytest

from mlm.data import docstrings
from tests.support.corpora import corpus_of

LONG = "some words that are long enough to be a document, more than sixty letters"


@pytest.mark.parametrize(
    "source",
    [
        '"""{long}"""\ndef f():\n    """Short."""\n',
        '"In single {long}"\n',
        'def f(): "On the line of its header, {long}"\n',
        'x = (\n    """{long}"""\n)\n\ndef f():\n    """{long}"""\n',
        'def f():\n    r"""\\d {long}"""\n    """{long}"""\n',
        "def f():\n    x = '\"\"\"'\n    def g():\n        '''{long}'''\n",
        "text = \"\"\"\ndef f():\n    '''{long}'''\n\"\"\"\n",
        'try:\n    import a\nexcept ImportError:\n    def f(\n        a=":",\n    ):\n        """{long}"""\n',
        'def f(a, b={1: 2}) -> "A":  # a comment\n    # another\n\n    """{long}"""\n',
        '# License\n\n"""{long}"""\n\n"""No docstring, {long}"""\nasync def f():\n\t"""{long}"""\n',
        "match 1:\n    case 1:\n        class A:\n            '''{long}'''\n",
    ],
)
def test_wherever_they_stand(tmp_path, source):
    file = tmp_path / "a.py"
    file.write_text(source.replace("{long}", LONG))
    tree = ast.parse(file.read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, docstrings.DEFINITIONS))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    expected = [text for text in texts if len(text) >= docstrings.SHORTEST]
    assert docstrings.of_file(file) == expected


def test_a_template_and_a_file_that_is_gone_have_none(tmp_path):
    (tmp_path / "template.py").write_text("def {{ name }}(): pass")
    for name in ("template.py", "gone.py"):
        assert docstrings.of_file(tmp_path / name) == []


def test_parts_are_modules_of_one_package():
    """Of the pinned packages alone, without their tests; each module once, in parts of about as many bytes."""
    parts = corpus_of(("docstrings",)).parts()
    modules = [docstrings.Modules(*part.where) for part in parts]
    files = [file for some in modules for file in some.files]
    assert len(files) == len(set(files)) > 5000
    assert not [file for file in files if "/tests/" in file or file.startswith("_pytest")]
    assert max(part.bytes for part in parts) < 10**6
    part = min(parts, key=lambda part: abs(part.bytes - 60_000))
    package, *_ = part.where
    for group, groups in (("", [package]), ("document", [""]), ("file", files)):
        found = list(corpus_of(("docstrings",), group=group).read(part, texts=""))
        assert found and {document.group for document in found} <= {*groups}
    assert 0.2 < sum(len(text.encode()) for text, _ in found) / part.bytes < 5, "about"
