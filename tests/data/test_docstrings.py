"""Docstrings of modules, classes and functions, and the parts that they are read in."""

from mlm.data import docstrings
from tests.support.corpora import corpus_of

LONG = "some words that are long enough to be a document, more than sixty letters"


SOURCE = """# License

'{0} of the module'

x = '{1} that is no docstring'
class A:
    r'''{2} of a class'''
    @property
    def f(self): "{3} of a method"
try:
    import a
except ImportError:
    if x:
        async def g():
            'Short.'
            def h(a='{4} of an argument'):
                '{5} of an inner function'
else:
    match x:
        case 1:
            def i(): '{6} of a case'
finally:
    with x:
        for n in x:
            def j(): '{7} of a loop'
"""


def test_those_of_modules_classes_and_functions_in_order(tmp_path):
    (tmp_path / "a.py").write_text("\ufeff" + SOURCE.format(*(f"{n} {LONG}" for n in range(8))))
    found = [text.partition(f" {LONG} of ") for text in docstrings.of_file(tmp_path / "a.py")]
    places = ["the module", "a class", "a method", "an inner function", "a case", "a loop"]
    assert [(n, place) for n, _, place in found] == list(zip("023567", places, strict=True))


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
