"""Docstrings of modules, classes and functions, wherever they stand."""

import pytest

from mlm.data import docstrings
from tests.support.corpora import corpus_of

LONG = "some words that are long enough to be a document, more than sixty letters"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""{long}"""\ndef f():\n    """Short."""\n', 1),
        ('def f(): "On the line of its header, {long}"\n', 1),
        ('x = (\n    """{long}"""\n)\n\ndef f():\n    """{long}"""\n', 1),
        ('try:\n    import a\nexcept ImportError:\n    def f(\n        a=":",\n    ):\n        """{long}"""\n', 1),
        ('"""{long}"""\n\n"""No docstring, {long}"""\nasync def f():\n\tdef g():\n\t\t"""{long}"""\n', 2),
        ("match 1:\n    case 1:\n        class A:\n            '''{long}'''\n", 1),
    ],
)
def test_wherever_they_stand(tmp_path, source, count):
    file = tmp_path / "a.py"
    file.write_text(source.replace("{long}", LONG))
    texts = docstrings.of_file(file)
    assert len(texts) == count and all(text.endswith(LONG) for text in texts)


def test_a_template_and_a_file_that_is_gone_have_none(tmp_path):
    (tmp_path / "template.py").write_text("def {{ name }}(): pass")
    assert docstrings.of_file(tmp_path / "template.py") == docstrings.of_file(tmp_path / "gone.py") == []


def test_parts_are_modules_of_one_package(monkeypatch):
    """Of the pinned packages alone, without their tests; each module once, in parts of about as many bytes."""
    parts = corpus_of(("docstrings",)).parts()
    modules = [docstrings.Modules(*part.where) for part in parts]
    files = [file for each in modules for file in each.files]
    assert len(files) == len(set(files)) > 5000
    assert not [file for file in files if "/tests/" in file or file.startswith(("pytest", "_pytest"))]
    assert len({each.package for each in modules}) > 20 and max(part.bytes for part in parts) < 10**6
    assert 20e6 < sum(part.bytes for part in parts) < 100e6
    small = min(modules, key=lambda each: abs(each.bytes - 60_000))
    (part,) = (part for part, each in zip(parts, modules, strict=True) if each == small)
    for group, groups in (("", {small.package}), ("document", {""}), ("file", set(files))):
        found = list(corpus_of(("docstrings",), group=group).read(part, texts=""))
        assert found and {document.group for document in found} <= groups
    assert 0.2 < sum(len(text.encode()) for text, _ in found) / small.bytes < 5, "about, of docstrings"
