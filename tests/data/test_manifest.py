import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable

import pytest

from mlm.data import manifest as manifests
from mlm.data.manifest import Manifest, load_manifest, verify
from mlm.errors import DamageError, InputError, StopError
from tests.data.rows import damage, shard_path

FAULTS = ("cut between records", "bit flipped", "missing", "extra", "another shard's records")


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_shards_are_named(copied, fault):
    """Sizes alone tell most of it."""
    verify(copied, deep=True)
    path = damage(copied, fault)
    by_size = fault not in ("bit flipped", "another shard's records")
    for deep in [True, False] if by_size else [True]:
        with pytest.raises(DamageError, match=str(path)) as error:
            verify(copied, deep=deep)
        assert "\n" not in str(error.value)


def test_fingerprint_is_of_the_batches_not_of_the_place(manifest, copied):
    assert copied.fingerprint == manifest.fingerprint
    assert dataclasses.replace(copied, source="elsewhere").fingerprint == manifest.fingerprint
    assert dataclasses.replace(copied, vocab_size=601).fingerprint != manifest.fingerprint
    train = copied.splits["train"]
    turned = dataclasses.replace(train, shards=train.shards[::-1])
    assert dataclasses.replace(copied, splits={"train": turned}).fingerprint != manifest.fingerprint


def rewritten(copied: Manifest, change: Callable[[dict], None]) -> pathlib.Path:
    file = pathlib.Path(copied.folder, manifests.NAME)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("special_ids", "mask"), {}, "special_ids.mask is an object, but must be a whole number"),
        (("all_special_ids",), [0, 1, 2, 3], "all_special_ids lacks 4"),
        (("splits", "train", "shards", 3, "records"), "12", r'splits.train.shards\[3\].records is "12"'),
        (("splits", "train", "shards", 3, "file"), "train/../../dataset-3-9.tfrecord", "the file .* must be"),
        (("splits", "train", "unigram_entropy"), float("nan"), "unigram_entropy is NaN"),
        (("\x1b[2J",), 1, r'"\\u001b\[2J" is not a field'),
        (("format",), 1, "has format 1, this code reads 2"),
    ],
)
def test_the_sentence_names_the_field_and_what_it_must_be(copied, place, value, words):
    def change(content: dict) -> None:
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = value

    file = rewritten(copied, change)
    with pytest.raises(StopError, match=words) as error:
        load_manifest(copied.folder)
    assert str(file) in str(error.value) and str(error.value).isprintable()


def test_no_shards(tmp_path):
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(InputError, match=f"{folder}.*holds no shards"):
            load_manifest(str(folder))


@pytest.fixture
def foreign(copied: Manifest, tokenizer_folder: str) -> Manifest:
    pathlib.Path(copied.folder, manifests.NAME).unlink()
    return load_manifest(copied.folder, tokenizer_folder=tokenizer_folder)


def test_without_a_manifest_the_names_tell(manifest, foreign):
    assert not foreign.full_rows, "their attention_mask must be read"
    same = ("length", "vocab_size", "special_ids", "all_special_ids", "tokenizer_fingerprint")
    assert [getattr(foreign, key) for key in same] == [getattr(manifest, key) for key in same]
    for name, split in foreign.splits.items():
        assert split.shards == tuple(dataclasses.replace(s, sha256=None) for s in manifest.splits[name].shards)
        assert split.unigram_entropy is None
    verify(foreign, deep=True)


def test_without_a_manifest_a_tokenizer_is_needed(foreign):
    with pytest.raises(InputError, match=r"tokenizer\.path"):
        load_manifest(foreign.folder)


@pytest.mark.parametrize("name", [None, "dataset-1-7.tfrecord", "dataset-1-0.tfrecord"])
def test_without_a_manifest_what_the_names_tell_is_checked(foreign, tokenizer_folder, name):
    """A number that is missing, one that comes twice, and a shard without records."""
    path = shard_path(foreign)
    if name == "dataset-1-7.tfrecord":
        shutil.copy(path, path.with_name(name))
    elif name:
        path.rename(path.with_name(name))
    else:
        path.unlink()
    with pytest.raises(DamageError, match=r"train.*dataset-1|train.*shard 1"):
        verify(load_manifest(foreign.folder, tokenizer_folder=tokenizer_folder), deep=True)
