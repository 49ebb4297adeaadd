"""Sources of documents: what each kind reads, with which splits, and that a bad one is named."""

import gzip
import pathlib

import pytest

from mlm.data import docstrings
from mlm.errors import InputError
from tests.fixtures_data import documents, numbered
from tests.test_corpus import split_of, write_jsonl


def test_text_is_a_document_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n  two  \n\t\n= three =")
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write("vier, fünf\nsechs\n".encode())
    (tmp_path / "c.txt").mkdir()
    found = [document.text for document in documents((f"text:{tmp_path}/*.txt*",))]
    assert sorted(found) == ["= three =", "one", "sechs", "two", "vier, fünf"]


def test_jsonl_field_is_the_one_named_in_the_source_else_in_the_config(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["line one\nline two", "b"], field="body")
    found = list(documents((f"jsonl:{tmp_path}/*.jsonl#body",)))
    assert [document.text for document in found] == ["line one\nline two", "b"]
    assert list(documents((f"jsonl:{tmp_path}/*.jsonl",), field="body")) == found


def test_docstrings_of_modules_classes_and_functions_and_nothing_else(tmp_path):
    long = "is long enough to be a document of its own, which short phrases are not."
    code = f'''"""A module {long}

    With a second paragraph.
    """
"""A string {long}"""

class A:
    "A class {long}"
    """Not a docstring; it {long}"""

    async def method(self):
        """A method {long}"""
        if self:
            def inner():
                r"""An inner function {long} \\alpha"""
            return """No docstring; it {long}"""

def short():
    """Short."""
'''
    (tmp_path / "good.py").write_text(code)
    (tmp_path / "template.py").write_text("def {{ name }}(): pass")
    found = [docstrings.of_file(tmp_path / name) for name in ("template.py", "good.py", "gone.py")]
    assert found[0] == found[2] == []
    assert found[1] == [
        f"A module {long}\n\nWith a second paragraph.",
        f"A class {long}",
        f"A method {long}",
        f"An inner function {long} \\alpha",
    ]


@pytest.mark.slow
def test_docstrings_of_the_pinned_packages_are_megabytes_in_an_order_of_their_own():
    files = docstrings._files()
    assert len(files) > 5000
    assert len(set(files)) == len(files)
    assert not [file for file in files if "pytest" in file.parts]  # not pinned: in no user's environment
    packages = [file.parts[file.parts.index("site-packages") + 1] for file in files[:300]]
    assert len(set(packages)) > 20, "the packages come mixed"
    texts = [text for file in files[:600] for text in docstrings.of_file(file)]
    assert 1000 < len(texts) < 10_000
    assert 0.5e6 < sum(map(len, texts)) < 10e6


@pytest.mark.parametrize("kind", ["text", "json", "parquet"])
def test_hf_reads_a_local_folder_with_its_own_splits(tmp_path, kind, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    train, validation = numbered(30), numbered(5, 28)  # two texts are in both
    for split, texts in (("train", train), ("validation", validation), ("test", numbered(9, 100))):
        rows = datasets.Dataset.from_dict({"text": texts})
        if kind == "text":
            (folder / f"{split}.txt").write_text("\n".join(texts))
        elif kind == "json":
            rows.to_json(folder / f"{split}.jsonl")
        else:
            rows.to_parquet(folder / f"{split}.parquet")
    for streaming in (False, True):
        found = split_of(documents((f"hf:{folder}",), streaming=streaming))
        assert {text for text in found if found[text] == "validation"} == set(validation)
        assert {text for text in found if found[text] == "train"} == set(train) - set(validation)


def test_hf_without_a_validation_split_is_split_by_hash(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.txt").write_text("\n".join(numbered(300)))
    (tmp_path / "same.txt").write_text("\n".join(numbered(300)))
    found = split_of(documents((f"hf:{tmp_path / 'set'}",), streaming=True))
    assert found == split_of(documents((f"text:{tmp_path / 'same.txt'}",)))
    assert set(found.values()) == {"train", "validation"}


@pytest.mark.parametrize("splits", [("train", "validation", "test"), ("train", "unlabelled")])
def test_tfds_reads_a_prepared_set(tmp_path, monkeypatch, splits):
    import tensorflow_datasets as tfds

    class TinyTexts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Some texts."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(100 * n) for n, split in enumerate(splits)}

        def _generate_examples(self, first):
            for n, text in enumerate(numbered(100, first)):
                yield n, {"text": text}

    monkeypatch.setattr(tfds, "builder", lambda name: TinyTexts(data_dir=tmp_path))
    found = split_of(documents(("tfds:tiny_texts",), max_documents=90))
    per_split = [[t for t in found if t in numbered(100, 100 * n)] for n in range(len(splits))]
    if "validation" in splits:
        assert [len(texts) for texts in per_split] == [90, 90, 0]
        assert {found[text] for text in per_split[0]} == {"train"}
        assert {found[text] for text in per_split[1]} == {"validation"}
    else:
        assert [len(texts) for texts in per_split] == [90, 90]
        assert set(found.values()) == {"train", "validation"}, "by hash"


# Bad input ------------------------------------------------------------------------------------------------------------


def bad_sources(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Source -> what the sentence must name, of each fault."""
    files = {
        "empty.txt": b"",
        "blank.txt": b"\n  \n",
        "latin.txt": b"good\ncaf\xe9\n",
        "bad.jsonl": b'{"text": "good"}\n{"text": \n',
        "other.jsonl": b'{"body": "good"}\n',
        "number.jsonl": b'{"text": 3}\n',
        "list.jsonl": b"[1, 2]\n",
        "cut.txt.gz": gzip.compress(b"text\n" * 10_000)[:-20],
        "plain.txt.gz": b"not compressed",
    }
    flipped = bytearray(gzip.compress(b"text\n" * 100))
    flipped[10] ^= 0xFF  # the head of the first block
    files["flipped.txt.gz"] = bytes(flipped)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, content in {"set": '{"body": "good"}\n', "numbers": '{"text": 3}\n', "broken": '{"text": \n'}.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text(content)
    return {
        "missing": (f"text:{folder}/missing*", "no such file"),
        "empty": (f"text:{folder}/empty.txt", "no text"),
        "blank": (f"text:{folder}/blank.txt", "no text"),
        "latin": (f"text:{folder}/latin.txt", "latin.txt, line 2"),
        "bad json": (f"jsonl:{folder}/bad.jsonl", "bad.jsonl, line 2"),
        "no field": (f"jsonl:{folder}/other.jsonl", "'text'"),
        "not a string": (f"jsonl:{folder}/number.jsonl", "number.jsonl, line 1"),
        "not an object": (f"jsonl:{folder}/list.jsonl", "list.jsonl, line 1"),
        "surrogate": (f"jsonl:{folder}/surrogate.jsonl", "surrogate.jsonl, line 1"),
        "cut gz": (f"text:{folder}/cut.txt.gz", "cut.txt.gz"),
        "flipped gz": (f"text:{folder}/flipped.txt.gz", "flipped.txt.gz"),
        "no gz": (f"text:{folder}/plain.txt.gz", "plain.txt.gz"),
        "no folder": (f"hf:{folder}/nowhere", "nowhere"),
        "no column": (f"hf:{folder}/set", "text"),
        "column of numbers": (f"hf:{folder}/numbers", "'text' is not a string"),
        "broken set": (f"hf:{folder}/broken", "JSON"),
        "no tfds": ("tfds:no_such_set_anywhere", "no_such_set_anywhere"),
    }


@pytest.mark.parametrize(
    "fault",
    [
        "missing",
        "empty",
        "blank",
        "latin",
        "bad json",
        "no field",
        "not a string",
        "not an object",
        "surrogate",
        "cut gz",
        "flipped gz",
        "no gz",
        "no folder",
        "no column",
        "column of numbers",
        "broken set",
        "no tfds",
    ],
)
def test_bad_sources_are_named(tmp_path, fault):
    (tmp_path / "surrogate.jsonl").write_text('{"text": "\\ud800"}\n')
    source, words = bad_sources(tmp_path)[fault]
    with pytest.raises(InputError) as error:
        list(documents((source,)))
    message = str(error.value)
    assert source in message
    assert words in message
    assert "\n" not in message
