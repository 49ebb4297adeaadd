import dataclasses
import json
import pathlib
import shutil

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


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("special_ids", "mask"), {}, "is not what was written"),
        (("all_special_ids",), [0, 1, 2, 3], "all_special_ids lacks 4"),
        (("vocab_size",), 4, "vocab_size"),
        (("splits", "train", "shards", 3, "records"), "12", "dataset-NUMBER-12"),
        (
            ("splits", "train", "shards", 3, "file"),
            "train/../../dataset-3-9.tfrecord",
            "must be train/dataset",
        ),
        (("splits", "train", "shards"), 7, "is not what was written"),
        (("\x1b[2J",), 1, "unexpected keyword"),
        (("folder",), "/etc", "not one of format 2"),
        (("format",), 1, "has format 1, this code reads 2"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(copied, place, value, words):
    """Whoever changed it: no file outside of its folder is read, and nothing reaches a terminal raw."""
    file = pathlib.Path(copied.folder, manifests.NAME)
    whole = json.loads(file.read_text())
    content = whole
    for key in place[:-1]:
        content = content[key]
    content[place[-1]] = value
    file.write_text(json.dumps(whole))
    with pytest.raises(StopError, match=words) as error:
        load_manifest(copied.folder)
    assert str(file) in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 90_000, b"NaN", b'{"splits": NaN}'])
def test_a_file_that_is_no_manifest_is_named(copied, content):
    file = pathlib.Path(copied.folder, manifests.NAME)
    file.write_bytes(content)
    with pytest.raises(DamageError, match=str(file)):
        load_manifest(copied.folder)


def test_a_manifest_of_an_earlier_version_is_read(copied):
    """Which counted near duplicates."""
    file = pathlib.Path(copied.folder, manifests.NAME)
    content = json.loads(file.read_text())
    for split in content["splits"].values():
        split["near_duplicates"] = 0
    file.write_text(json.dumps(content))
    assert load_manifest(copied.folder) == copied


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
        assert split.shards == tuple(
            dataclasses.replace(s, sha256=None) for s in manifest.splits[name].shards
        )
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
