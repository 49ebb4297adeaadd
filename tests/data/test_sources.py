"""Sources of documents: their parts, what each kind reads, with which splits, and that a bad one is named."""

import errno
import gzip
import json
import os
import pathlib
import random

import datasets
import fsspec
import pytest

from mlm.data import data_sets, sources
from mlm.errors import InputError
from tests.support.corpora import corpus_of, numbered, read_documents, split_of, write_jsonl
from tests.support.prepared_set import prepare


def texts_of(*found: str, **settings) -> list[str]:
    return [text for _, (text, _) in read_documents(corpus_of(found, **settings))]


# Files of lines -------------------------------------------------------------------------------------------------------


def test_text_is_a_document_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n  two  \n\t\n= three =")
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write("vier, fünf\nsechs\n".encode())
    (tmp_path / "c.txt").mkdir()
    assert texts_of(f"text:{tmp_path}/*.txt*") == ["one", "two", "= three =", "vier, fünf", "sechs"]


def test_jsonl_field_is_the_one_named_in_the_source_else_in_the_config(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["line one\nline two", "b"], field="body")
    assert texts_of(f"jsonl:{tmp_path}/*.jsonl#body") == ["line one\nline two", "b"]
    assert texts_of(f"jsonl:{tmp_path}/*.jsonl", field="body") == ["line one\nline two", "b"]


@pytest.mark.parametrize("seed", range(30))
def test_each_line_is_in_one_part(tmp_path, monkeypatch, seed):
    """Cut at any byte: lines longer than a part, no end of line at the end, CRLF, empty lines and files, compressed."""
    draw = random.Random(seed)
    most, lines = draw.randint(1, 60), []
    for name in range(draw.randint(1, 6)):
        own = ["é" * draw.choice([0, 0, 1, 5, 40, 200]) + str(draw.random())[: draw.choice([0, 6])] for _ in range(20)]
        own = own[: draw.choice([0, 1, 20])]
        end = draw.choice(["\n", "\r\n", "\r"])
        content = (draw.choice(["", "\ufeff"]) + end.join(own) + draw.choice(["", end]) * bool(own)).encode()
        packed = draw.random() < 0.2
        (tmp_path / f"{name}.txt{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)
        lines += [line for line in own if line]
    monkeypatch.setattr(sources, "PART_BYTES", (most, 10**9))
    own = corpus_of((f"text:{tmp_path}/*",))
    assert [text for _, (text, _) in read_documents(own)] == lines
    parts, total = own.parts(), sum(file.stat().st_size for file in tmp_path.iterdir())
    for part in parts:
        if not any(name.endswith(".gz") for name, *_ in part.where):
            assert part.bytes <= 1.5 * sources.part_bytes(total) + 1
    assert sum(part.bytes for part in parts) == total, "no byte twice, and none left out"


def test_parts_do_not_depend_on_the_order_of_a_listing(tmp_path, monkeypatch):
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(name * 50 + "\n")
    monkeypatch.setattr(sources, "PART_BYTES", (10, 10**9))
    own = corpus_of((f"text:{tmp_path}/*.txt",))
    system = fsspec.filesystem("file")
    listed = system.glob(f"{tmp_path}/*.txt", detail=True)
    before = own.parts()
    monkeypatch.setattr(type(system), "glob", lambda *_, **__: dict(reversed(listed.items())))
    assert own.parts() == before and [part.where[0][0][-5] for part in before] == ["a"] * 5 + ["b"] * 5 + ["c"] * 5


def test_parts_are_listed_and_not_read(tmp_path):
    """A terabyte, of which the disk holds nothing."""
    for name in range(4):
        with (tmp_path / f"{name}.txt").open("wb") as file:
            os.truncate(file.fileno(), 250 * 10**9)
    parts = corpus_of((f"text:{tmp_path}/*.txt",)).parts()
    assert sum(part.bytes for part in parts) == 10**12
    assert all(128e6 < part.bytes < 384e6 for part in parts[:-1]) and 3900 < len(parts) < 4000


def test_many_small_files_are_read_together(tmp_path):
    for name in range(2000):
        (tmp_path / f"{name:04}.txt").write_text(f"{name}\n")
    own = corpus_of((f"text:{tmp_path}/*.txt",), group="file")
    (part,) = own.parts()
    assert part.name == f"{tmp_path}/0000.txt and 1999 more files"
    assert [(text, group) for _, (text, group) in read_documents(own)] == [(str(n), f"{n:04}.txt") for n in range(2000)]


@pytest.mark.parametrize(
    ("group", "groups"), [("", [""]), ("document", [""]), ("file", ["a/x.jsonl", "b.jsonl"]), ("title", ["t0", "t1"])]
)
def test_groups_of_lines(tmp_path, group, groups):
    (tmp_path / "a").mkdir()
    for name in ("a/x.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name, numbered(4), title=["t0", "t0", "t1", "t1"])
    found = read_documents(corpus_of((f"jsonl:{tmp_path}/**/*.jsonl",), group=group))
    assert len(found) == 8 and sorted({document.group for _, document in found}) == groups


# Data sets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "json", "parquet"])
def test_hf_reads_a_local_folder_with_its_own_splits(tmp_path, kind, monkeypatch):
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
        own = corpus_of((f"hf:{folder}",), streaming=streaming, group="text", validation_groups=tuple(train))
        found = read_documents(own)
        assert [text for part, (text, _) in found if part.split == "validation"] == validation
        assert [text for part, (text, _) in found if part.split == "train"] == train
        assert {own.split_of(part, group, 0) for part, (_, group) in found if part.split == "train"} == {"train"}


def test_hf_without_a_validation_split_is_split_by_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.txt").write_text("\n".join(numbered(300)))
    (tmp_path / "same.txt").write_text("\n".join(numbered(300)))
    found = split_of(corpus_of((f"hf:{tmp_path / 'set'}",), streaming=True))
    assert found == split_of(corpus_of((f"text:{tmp_path / 'same.txt'}",)))
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
    data_sets.load_tfds.cache_clear()
    own = corpus_of(("tfds:tiny_texts",))
    found = read_documents(own)
    per_split = [
        {part.split for part, (text, _) in found if text in numbered(100, 100 * n)} for n in range(len(splits))
    ]
    assert per_split == ([{"train"}, {"validation"}, {"test"}] if "test" in splits else [{""}, {""}])
    assert len(found) == len({text for _, (text, _) in found}) == 100 * len(splits)
    data_sets.load_tfds.cache_clear()


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("train", "train training train_extra unsupervised unlabelled latest challenge contest values"),
        ("validation", "validation validation_matched valid val dev devset dev.clean Validation"),
        (
            "test",
            "test test_mismatched test.other testing testset testA test2014 TEST eval evaluation held_out dev_test",
        ),
    ],
)
def test_the_name_of_a_split_says_its_role(role, names):
    assert {name: data_sets.role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)


@pytest.fixture
def local_set(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder of a data set, of whose splits each has the numbers of its own hundred; its name holds a #."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set #1"
    folder.mkdir()
    for n, split in enumerate(("train", "validation", "test")):
        write_jsonl(folder / f"{split}.jsonl", numbered(20, 100 * n))
    return folder


def roles_of(*found: str, **settings) -> dict[str, list[str]]:
    """The texts of each split, "" where it is cut by group; test comes first."""
    roles = {}
    for part, (text, _) in read_documents(corpus_of(found, **settings)):
        roles.setdefault(part.split, []).append(text)
    assert "test" not in roles or next(iter(roles)) == "test"
    return roles


def test_a_source_names_a_split_or_a_slice_of_it(local_set, tmp_path):
    (tmp_path / "own.txt").write_text("\n".join(numbered(5, 900)))
    train, validation, test = (numbered(20, 100 * n) for n in range(3))
    own, text = f"hf:{local_set}", f"text:{tmp_path}/own.txt"
    assert roles_of(own) == {"train": train, "validation": validation, "test": test}
    assert roles_of(f"{own}#test", text) == {"test": test, "": numbered(5, 900)}, "and not the other splits"
    assert roles_of(text, f"{own}#test") == {"test": test, "": numbered(5, 900)}
    assert roles_of(f"{own}#train") == {"": train}, "without its validation split, that is cut by group"
    assert roles_of(f"{own}#train", f"{own}#validation") == {"train": train, "validation": validation}
    assert roles_of(f"{own}#train[:50%]+train[15:]", f"{own}#test[-2:]") == {
        "test": test[-2:],
        "": train[:10] + train[15:],
    }
    assert roles_of(f"{own}#test", f"{own}#train", streaming=True) == {"test": test, "": train}


def test_what_a_data_set_lacks_is_cut_from_its_training_split(local_set, tmp_path):
    own = corpus_of((f"hf:{local_set}",), test_fraction=0.5)
    assert {part.cut for part in own.parts()} == {()}, "it has all three"
    (local_set / "test.jsonl").unlink()
    sources._loaded_hf.cache_clear()
    own = corpus_of((f"hf:{local_set}",), test_fraction=0.5)
    assert {(part.split, part.cut) for part in own.parts()} == {("", ("test",)), ("validation", ())}
    assert set(split_of(own).values()) == {"train", "validation", "test"}
    assert set(split_of(corpus_of((f"hf:{local_set}",))).values()) == {"train", "validation"}


@pytest.mark.parametrize(
    ("names", "settings", "words"),
    [
        (("#testing",), {}, ["testing", "'test'"]),
        (("#train+test",), {}, ["train+test", "test and train"]),
        (("#train[a:]",), {}, ["train[a:]"]),
        (("#",), {}, ["after the #"]),
        (("#test",), {}, ["#test", "train"]),
        (("#validation", "#test"), {}, ["#validation", "#test", "train"]),
        (("#train[:10]",), {"streaming": True}, ["train[:10]", "streaming"]),
    ],
)
def test_a_split_that_can_not_be_read_is_named(local_set, names, settings, words):
    with pytest.raises(InputError) as error:
        corpus_of(tuple(f"hf:{local_set}{name}" for name in names), **settings).parts()
    assert all(word in str(error.value) for word in ["config.corpus.sources", str(local_set), *words])


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> pathlib.Path:
    """The version folder of a data set of TensorFlow Datasets with a test split, which no installed code knows."""
    import tensorflow_datasets as tfds

    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "data"))  # as TFDS_DATA_DIR does
    data_sets.load_tfds.cache_clear()
    splits = {
        split: [{"text": text} for text in numbered(20, 100 * n)] for n, split in enumerate(("train", "dev", "test"))
    }
    return prepare(tmp_path / "data", splits)


@pytest.mark.standard
def test_tfds_reads_a_prepared_folder_and_a_name_in_the_data_folder(prepared, tmp_path, monkeypatch):
    train, dev, test = (set(numbered(20, 100 * n)) for n in range(3))
    monkeypatch.chdir(tmp_path)
    code = 'raise SystemExit("executed")'
    (prepared.parent / "my_rows.py").write_text(code)
    (tmp_path / "my_rows").mkdir()
    (tmp_path / "my_rows" / "my_rows.py").write_text(code)
    data = tmp_path / "data"
    names = [prepared, prepared.parent, data, f"{data}/my_rows:1.0.0", "data/my_rows", "my_rows", "my_rows:1.0.0"]
    for name in names:
        found = roles_of(f"tfds:{name}")
        assert {split: set(texts) for split, texts in found.items()} == {
            "train": train,
            "validation": dev,
            "test": test,
        }, name
        assert [len(texts) for texts in found.values()] == [20, 20, 20]
    assert {
        split: len(texts) for split, texts in roles_of(f"tfds:{data}/my_rows#test[:25%]", "tfds:my_rows#train").items()
    } == {
        "test": 5,
        "": 20,
    }


def test_tfds_reads_the_newest_version_of_the_one_configuration(prepared, tmp_path):
    rows = {"train": [{"text": text} for text in numbered(9, 500)]}
    newer = prepare(tmp_path / "data", rows, version="1.10.0")
    prepare(tmp_path / "data", rows, version="1.9.0")
    assert set(texts_of(f"tfds:{newer.parent}")) == set(numbered(9, 500))
    assert len(texts_of(f"tfds:{newer.parent}:1.0.0")) == 60
    plain, other = (prepare(tmp_path / "two", rows, config=name) for name in ("plain", "other"))
    assert set(texts_of(f"tfds:{plain.parent}")) == set(numbered(9, 500))
    with pytest.raises(InputError, match=rf"{other.parent}.*{plain.parent}"):
        texts_of(f"tfds:{plain.parents[1]}")


@pytest.mark.parametrize(
    "fault", ["interrupted", "lacks", "cut", "class", "nothing", "nowhere", "name", "namespace", "code"]
)
def test_a_folder_that_is_no_prepared_set_is_named(prepared, tmp_path, monkeypatch, fault):
    name, words = str(prepared.parent), []
    match fault:
        case "interrupted":
            prepared.rename(prepared.parent / "incomplete.AB12_1.0.0")
            words = ["incomplete.AB12_1.0.0", "prepare"]
        case "lacks":
            file = next(prepared.glob("*test*"))
            file.unlink()
            words = [file.name, str(prepared)]
        case "cut":
            file = next(prepared.glob("*train*"))
            file.write_bytes(file.read_bytes()[:-7])
            words = [str(prepared), "train"]
        case "class":
            monkeypatch.syspath_prepend(tmp_path)
            (tmp_path / "hostile.py").write_text('raise SystemExit("executed")')
            text = (prepared / "features.json").read_text()
            assert "tensorflow_datasets.core.features.text_feature.Text" in text
            (prepared / "features.json").write_text(
                text.replace("tensorflow_datasets.core.features.text_feature.Text", "hostile.Text")
            )
            words = ["hostile.Text", "features.json"]
        case "nothing":
            name = str(tmp_path / "empty")
            (tmp_path / "empty").mkdir()
            words = [name, "dataset_info.json"]
        case "nowhere":
            name = f"{tmp_path}/nowhere"
            words = [name]
        case "name":
            name, words = "my_row", ["my_row", "TFDS_DATA_DIR", str(tmp_path / "data")]
        case "namespace":
            name, words = "kaggle:my_rows", ["kaggle:my_rows", "folder"]
        case "code":
            name = str(tmp_path / "source")
            (tmp_path / "source").mkdir()
            (tmp_path / "source" / "my_rows.py").write_text('raise SystemExit("executed")')
            words = [name, "my_rows.py", "dataset_info.json"]
    with pytest.raises(InputError) as error:
        texts_of(f"tfds:{name}")
    assert all(word in str(error.value) for word in [f"tfds:{name}", *words]), error.value
    assert "\n" not in str(error.value)


# Bad input ------------------------------------------------------------------------------------------------------------


def bad_sources(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Source -> what the sentence must name, of each fault."""
    files = {
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
        read_documents(corpus_of((source,)))
    message = str(error.value)
    assert source in message
    assert words in message
    assert "\n" not in message


def test_a_bad_line_in_a_later_part_has_its_number(tmp_path, monkeypatch):
    lines = [json.dumps({"text": text}) for text in numbered(300)]
    lines[200] = '{"text": '
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(sources, "PART_BYTES", (3000, 10**9))
    own = corpus_of((f"jsonl:{tmp_path}/a.jsonl",))
    parts = own.parts()
    good = [len(list(own.read(part, texts=""))) for part in parts[:2]]
    assert 0 < sum(good) < 200 and len(parts) > 4
    with pytest.raises(InputError, match=r"a\.jsonl, line 201: is not a JSON object"):
        read_documents(own)


@pytest.mark.parametrize("how", ["gone", "longer", "same size", "cut while it is read"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_changes_after_the_listing(tmp_path, monkeypatch, how, compressed):
    path = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    content = "\n".join(numbered(30_000)).encode()
    content = gzip.compress(content, 1) if compressed else content
    path.write_bytes(content)
    own = corpus_of((f"text:{path}",))
    part = own.parts()[-1]
    reading = own.read(part, texts="")
    if how == "gone":
        path.unlink()
    elif how == "cut while it is read":
        next(reading)
        os.truncate(path, len(content) // 2)
    else:
        path.write_bytes(content + b"x" if how == "longer" else content[:-1] + b"x")
        os.utime(path, (0, 0))
    words = {"gone": "No such file", "cut while it is read": "after line|ends after .* bytes, .* were listed"}
    with pytest.raises(InputError, match=words.get(how, "has changed since it was listed; start the same")) as error:
        list(reading)
    assert f"text:{path}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "streaming"),
    [("parquet", False), ("parquet", True), ("jsonl", False), ("jsonl", True), ("csv", False)],
)
def test_files_of_a_data_set_with_other_columns_are_named(tmp_path, monkeypatch, kind, streaming):
    import pandas

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for number, column in enumerate(("label", "label", "klass")):
        frame, path = pandas.DataFrame({"text": ["a", "b"], column: [0, 1]}), tmp_path / f"set/train-{number}.{kind}"
        if kind == "jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            getattr(frame, f"to_{kind}")(path, index=False)
    with pytest.raises(InputError) as caught:
        read_documents(corpus_of((f"hf:{tmp_path}/set",), streaming=streaming))
    for name in (f"{tmp_path}/set/train-2.{kind}", "klass", "label"):
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_that_is_null_is_empty(tmp_path, monkeypatch):
    """By every reader of the same file."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": null}\n{"text": "a"}\n')
    for source in (f"jsonl:{tmp_path}/set/train.jsonl", f"hf:{tmp_path}/set"):
        assert texts_of(source) == ["a"]


def test_a_row_of_a_data_set_is_named(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    table = pyarrow.table({"text": pyarrow.array([b"a", None, b"\xff"], pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "set" / "train.parquet")
    for streaming in (False, True):
        with pytest.raises(InputError, match=r"train.*row 3: the field 'text' is not a string of valid Unicode"):
            read_documents(corpus_of((f"hf:{tmp_path}/set",), streaming=streaming))


def test_a_data_set_that_changed_has_other_parts(tmp_path, monkeypatch):
    """So that nothing is taken for done that was made of the old one."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    found = []
    for text in ("one", "two", "two"):
        if not found or text != "two" or len(found) < 2:
            (tmp_path / "set" / "train.txt").write_text(text)
        sources._loaded_hf.cache_clear()
        found.append(corpus_of((f"hf:{tmp_path / 'set'}",)).parts())
    assert found[0] != found[1] == found[2]


def test_a_cache_of_the_hub_without_locks_is_named(monkeypatch):
    def load_dataset(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=rf"{datasets.config.HF_CACHE_HOME} .*No locks available.*HF_HOME"):
        data_sets.load_hf("me/texts")
