import dataclasses
import json
import pathlib
import shutil

import pytest

from mlm.data import manifest as manifests
from mlm.data.manifest import load_manifest, verify
from mlm.errors import DamageError, InputError, StopError
from tests.data.rows import damage, shard_path

FAULTS = ("cut between records", "bit flipped", "missing", "extra", "another shard's records")


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_shards_are_named(copied, fault):
    verify(copied)
    path = damage(copied, fault)
    with pytest.raises(DamageError, match=str(path)):
        verify(copied)


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
        (
            ("splits", "train", "shards", 3, "file"),
            "train/../../dataset-3-9.tfrecord",
            "'train/../..",
        ),
        (("splits", "train", "shards"), 7, "is not what was written"),
        (("splits", "train", "shards", 3, "records"), 9, "-9.tfrecord"),
        (("splits",), {}, "there is no train split"),
        (("parts",), [["", 1.0, {}]], None),
        (("sets",), {"other": {}}, None),
        (("format",), 1, "has format 1, this code reads 2"),
        (("folder",), "/etc", None),
        (("splits", "train", "near_duplicates"), 0, None),
    ],
)
def test_a_manifest_that_was_changed(copied, place, value, words):
    """Whoever changed it: no file outside of its folder is read; what other versions said beside is left out."""
    file = pathlib.Path(copied.folder, manifests.NAME)
    content = whole = json.loads(file.read_text())
    for key in place[:-1]:
        content = content[key]
    content[place[-1]] = value
    file.write_text(json.dumps(whole))
    if words is None:
        assert load_manifest(copied.folder) == copied
        return
    with pytest.raises(StopError, match=words) as error:
        load_manifest(copied.folder)
    assert str(file) in str(error.value) and str(error.value).isprintable()


def test_a_file_that_is_no_manifest_is_named(copied):
    file = pathlib.Path(copied.folder, manifests.NAME)
    file.write_bytes(b"{")
    with pytest.raises(DamageError, match=str(file)):
        load_manifest(copied.folder)


def test_no_shards(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}.*holds no shards"):
        load_manifest(str(tmp_path))


@pytest.fixture
def foreign(copied, tokenizer_folder):
    pathlib.Path(copied.folder, manifests.NAME).unlink()
    return load_manifest(copied.folder, tokenizer_folder=tokenizer_folder)


def test_without_a_manifest_the_names_tell(manifest, foreign):
    assert not foreign.full_rows, "their attention_mask must be read"
    for key in ("length", "vocab_size", "special_ids", "all_special_ids", "tokenizer_fingerprint"):
        assert getattr(foreign, key) == getattr(manifest, key)
    for name, split in foreign.splits.items():
        assert split.shards == tuple(
            dataclasses.replace(s, sha256=None) for s in manifest.splits[name].shards
        )
        assert split.unigram_entropy is None
    verify(foreign)


def test_without_a_manifest_a_tokenizer_is_needed(foreign):
    with pytest.raises(InputError, match=r"tokenizer\.path"):
        load_manifest(foreign.folder)


@pytest.mark.parametrize("name", ["", "dataset-1-7.tfrecord"])
def test_without_a_manifest_what_the_names_tell_is_checked(foreign, tokenizer_folder, name):
    """A number that is missing, and one that comes twice."""
    path = shard_path(foreign)
    if name:
        shutil.copy(path, path.with_name(name))
    else:
        path.unlink()
    with pytest.raises(DamageError, match=r"train.*dataset-1"):
        verify(load_manifest(foreign.folder, tokenizer_folder=tokenizer_folder))
