"""Data sets of the Hub and of TensorFlow Datasets: their splits, what is read of them, and that a bad one is named."""

import pathlib
import shutil

import datasets
import pytest

from mlm.data import data_sets
from mlm.errors import InputError
from tests.support.corpora import (
    corpus_of,
    numbered,
    read_documents,
    split_of,
    texts_of,
    write_jsonl,
)
from tests.support.prepared_set import prepare


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("train", "train training train_extra unlabelled latest challenge contest values"),
        ("validation", "validation validation_matched valid val dev devset dev.clean Validation"),
        (
            "test",
            "test test_mismatched test.other testing testA test2014 TEST held_out dev_test eval evaluation",
        ),
    ],
)
def test_the_name_of_a_split_says_its_role(role, names):
    assert {data_sets.role_of(name) for name in names.split()} == {role}


@pytest.fixture
def local_set(tmp_path) -> pathlib.Path:
    """A folder of a data set, of whose splits each has the numbers of its own hundred; its name holds a #."""
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
    own = f"hf:{local_set}"
    text = f"text:{tmp_path}/own.txt"
    sliced = (f"{own}#train[:50%]+train[15:]", f"{own}#test[-2:]")
    for names, expected in (
        ([own], {"train": train, "validation": validation, "test": test}),
        # and not the other splits
        ([f"{own}#test", text], {"test": test, "": numbered(5, 900)}),
        # without its validation split, that is cut by group
        ([f"{own}#train"], {"": train}),
        ([f"{own}#train", f"{own}#validation"], {"train": train, "validation": validation}),
        (sliced, {"test": test[-2:], "": train[:10] + train[15:]}),
    ):
        assert roles_of(*names) == expected
    assert roles_of(f"{own}#test", f"{own}#train", streaming=True) == {"test": test, "": train}


def test_what_a_data_set_lacks_is_cut_from_its_training_split(local_set):
    (local_set / "test.jsonl").unlink()
    own = corpus_of((f"hf:{local_set}",), test_fraction=0.5)
    assert {(part.split, part.cut) for part in own.parts()} == {("", ("test",)), ("validation", ())}
    assert set(split_of(own).values()) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("names", "streaming", "word"),
    [
        (("#testing",), False, "'test'"),
        (("#train[a:]",), False, "train[a:]"),
        (("#validation", "#test"), False, "train"),
        (("#train[:10]",), True, "streaming"),
    ],
)
def test_a_split_that_can_not_be_read_is_named(local_set, names, streaming, word):
    found = tuple(f"hf:{local_set}{name}" for name in names)
    with pytest.raises(InputError) as error:
        corpus_of(found, streaming=streaming).parts()
    for words in ("config.corpus.sources", *found, word):
        assert words in str(error.value)


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> pathlib.Path:
    """The version folder of a data set of TensorFlow Datasets with a test split, which no installed code knows."""
    import tensorflow_datasets as tfds

    # as TFDS_DATA_DIR does
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "data"))
    data_sets.load_tfds.cache_clear()
    splits = {"train": numbered(20), "dev": numbered(20, 100), "test": numbered(20, 200)}
    return prepare(tmp_path / "data", splits)


def test_tfds_reads_a_prepared_folder_and_a_name_in_the_data_folder(
    prepared, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = 'raise SystemExit("executed")'
    (prepared.parent / "my_rows.py").write_text(code)
    (tmp_path / "my_rows").mkdir()
    (tmp_path / "my_rows" / "my_rows.py").write_text(code)
    unfinished = pathlib.Path(f"{prepared}.incomplete77XY9")  # of a preparation that was killed
    shutil.copytree(prepared, unfinished)
    lack_a_file(unfinished)
    data = tmp_path / "data"
    for name in (prepared, data, f"{data}/my_rows:1.0.0", "data/my_rows", "my_rows"):
        found = roles_of(f"tfds:{name}")
        for n, split in enumerate(("train", "validation", "test")):
            assert sorted(found[split]) == sorted(numbered(20, 100 * n)), name
    sliced = roles_of(f"tfds:{data}/my_rows#test[:25%]", "tfds:my_rows#train")
    assert (len(sliced["test"]), len(sliced[""])) == (5, 20)


def lack_a_file(prepared: pathlib.Path) -> list[str]:
    file = next(prepared.glob("*test*"))
    file.unlink()
    return [file.name]


def cut_a_file(prepared: pathlib.Path) -> list[str]:
    file = next(prepared.glob("*train*"))
    file.write_bytes(file.read_bytes()[:-7])
    return ["train"]


def name_a_class(prepared: pathlib.Path) -> list[str]:
    """Of a module that ends the process when it is imported."""
    file = prepared / "features.json"
    text = file.read_text()
    assert '"tensorflow_datasets.core.features.text_feature.Text"' in text
    file.write_text(text.replace("tensorflow_datasets.core.features.text_feature", "hostile"))
    return ["hostile.Text", "features.json"]


def leave_code_alone(prepared: pathlib.Path) -> list[str]:
    shutil.rmtree(prepared)
    (prepared.parent / "my_rows.py").write_text('raise SystemExit("executed")')
    return ["dataset_info.json"]


@pytest.mark.parametrize("break_", [lack_a_file, cut_a_file, name_a_class, leave_code_alone])
def test_a_folder_that_is_no_prepared_set_is_named(prepared, tmp_path, monkeypatch, break_):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hostile.py").write_text('raise SystemExit("executed")')
    words = break_(prepared)
    for name in [f"tfds:{prepared.parent}"] + ["tfds:my_rows"] * (break_ is name_a_class):
        with pytest.raises(InputError) as error:
            texts_of(name)
        message = str(error.value)
        assert all(word in message for word in [name, *words]) and "\n" not in message


def test_a_row_of_a_data_set_is_named(tmp_path):
    rows = datasets.Dataset.from_dict({"text": [b"a", None, b"\xff"]})
    rows.to_parquet(tmp_path / "set" / "train.parquet")
    for streaming in (False, True):
        with pytest.raises(
            InputError, match=r"train.*row 3: the field 'text' is not a string of valid Unicode"
        ):
            read_documents(corpus_of((f"hf:{tmp_path}/set",), streaming=streaming))
