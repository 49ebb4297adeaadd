import gzip
import itertools
import json
import pathlib
from collections import Counter

import numpy as np
import pytest

from mlm.data import corpus, docstrings
from mlm.errors import InputError
from tests.fixtures_data import documents, numbered


def write_jsonl(path: pathlib.Path, texts: list[str], field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts))
    return f"jsonl:{path}"


def split_of(stream) -> dict[str, str]:
    found = {}
    for document in stream:
        assert found.setdefault(document.text, document.split) == document.split
    return found


# Sources --------------------------------------------------------------------------------------------------------------


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
    found = docstrings.of_files([tmp_path / "template.py", tmp_path / "good.py", tmp_path / "gone.py"])
    assert found == [
        f"A module {long}\n\nWith a second paragraph.",
        f"A class {long}",
        f"A method {long}",
        f"An inner function {long} \\alpha",
    ]


def test_docstrings_of_the_pinned_packages_are_megabytes_in_an_order_of_their_own():
    files = docstrings._files()
    assert len(files) > 5000
    assert len(set(files)) == len(files)
    assert not [file for file in files if "pytest" in file.parts]  # not pinned: in no user's environment
    packages = [file.parts[file.parts.index("site-packages") + 1] for file in files[:300]]
    assert len(set(packages)) > 20, "the packages come mixed"
    texts = docstrings.of_files(files[:600])
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


# Splits, duplicates, weights ------------------------------------------------------------------------------------------


def test_validation_never_changes_as_the_corpus_grows(tmp_path):
    small = split_of(documents((write_jsonl(tmp_path / "a.jsonl", numbered(500)),)))
    large = split_of(documents((write_jsonl(tmp_path / "a.jsonl", numbered(5000)[::-1]),)))
    more = split_of(documents((write_jsonl(tmp_path / "a.jsonl", numbered(500)),), validation_fraction=0.2))
    assert small.items() <= large.items()
    assert {text for text in small if small[text] == "validation"} <= {t for t in more if more[t] == "validation"}
    assert corpus.text_hash(numbered(1)[0]) == 12415440598143898091, (
        "another hash would move the validation split of every corpus"
    )
    share = np.mean([split == "validation" for split in large.values()])
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / 5000) ** 0.5


def test_duplicates_are_dropped_and_counted_across_sources(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", numbered(6000) + numbered(50))
    b = write_jsonl(tmp_path / "b.jsonl", numbered(40, 5990))
    counts = Counter()
    found = split_of(documents((a, b), counts=counts))
    assert set(found) == set(numbered(6030))
    splits = Counter(found.values())
    assert counts["train documents"] == splits["train"]
    assert counts["validation documents"] == splits["validation"]
    repeated = numbered(50) + numbered(10, 5990)
    assert counts["train duplicates"] == sum(found[text] == "train" for text in repeated)
    assert counts["validation duplicates"] == sum(found[text] == "validation" for text in repeated)


def test_seen_is_a_set_in_eight_bytes_a_hash():
    rng = np.random.default_rng(0)
    seen, known = corpus.Seen(), set()
    for _ in range(60):
        hashes = rng.integers(0, 2000, rng.integers(1, 100)).astype(np.uint64)
        new = []
        for number in hashes.tolist():
            new.append(number not in known)
            known.add(number)
        np.testing.assert_array_equal(seen.add(hashes), new)
    assert sum(level.nbytes for level in seen._levels) == 8 * len(known)
    assert len(seen._levels) <= 12, "levels grow with the logarithm of the size"


def test_weights_are_copies_and_validation_comes_once(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", numbered(2000))
    b = write_jsonl(tmp_path / "b.jsonl", numbered(2000, 2000))
    counts = Counter()
    found = Counter(documents((a, b), weights=(2.25, 0.5), counts=counts))
    once = split_of(documents((a, b)))
    for text, split in once.items():
        copies = found[corpus.Document(text, split)]
        if split == "validation":
            assert copies == 1
        else:
            assert copies in ((2, 3) if text in numbered(2000) else (0, 1))
    train_a = [found[corpus.Document(text, "train")] for text in numbered(2000) if once[text] == "train"]
    train_b = [found[corpus.Document(text, "train")] for text in numbered(2000, 2000) if once[text] == "train"]
    assert abs(np.mean(train_a) - 2.25) < 4 * (0.25 * 0.75 / len(train_a)) ** 0.5
    assert abs(np.mean(train_b) - 0.5) < 4 * (0.5 * 0.5 / len(train_b)) ** 0.5
    assert counts["train documents"] == sum(train_a) + sum(train_b)


@pytest.mark.parametrize("spread", [0, 2000, 10**9])
def test_copies_lie_apart(tmp_path, monkeypatch, spread):
    """In one row, each copy would give away what is masked in the other."""
    monkeypatch.setattr(corpus, "SPREAD", spread)
    a = write_jsonl(tmp_path / "a.jsonl", numbered(500))
    found = [document.text for document in documents((a,), weights=(3.0,), validation_fraction=0.0)]
    assert Counter(found) == dict.fromkeys(numbered(500), 3)
    last, gaps = {}, []
    for place, text in enumerate(found):
        gaps += [place - last[text]] if text in last else []
        last[text] = place
    # the texts have about 40 characters; the last ones have less text after them than they should
    assert np.median(gaps) >= min(spread / 45, 500)


def test_max_documents_is_of_each_source_and_split(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", numbered(20))
    b = write_jsonl(tmp_path / "b.jsonl", numbered(20, 20))
    assert set(split_of(documents((a, b), max_documents=7))) == set(numbered(7) + numbered(7, 20))


def test_documents_are_streamed(monkeypatch):
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield f"text {number}"

    monkeypatch.setitem(corpus.READERS, "text", lambda *args, **kwargs: [("", endless())])
    stream = documents(("text:endless",))
    assert len(list(itertools.islice(stream, 10))) == 10
    assert len(read) <= 2 * corpus.CHUNK


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
