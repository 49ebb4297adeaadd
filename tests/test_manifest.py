import dataclasses
import json
import pathlib
import shutil

import pytest

from mlm.data import manifest as manifests
from mlm.data.manifest import Manifest, load_manifest, verify
from mlm.errors import DamageError, InputError


@pytest.fixture
def copied(manifest: Manifest, tmp_path: pathlib.Path) -> Manifest:
    """The shards in a folder that may be damaged."""
    shutil.copytree(manifest.folder, tmp_path / "copied")
    return load_manifest(str(tmp_path / "copied"))


def shard_path(copied: Manifest, number: int = 1, split: str = "train") -> pathlib.Path:
    return pathlib.Path(copied.folder, copied.splits[split].shards[number].file)


def record_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little") + 16


def damage(copied: Manifest, fault: str) -> pathlib.Path:
    """Damages a shard; returns the path that must be named."""
    path = shard_path(copied)
    data = path.read_bytes()
    if fault == "cut between records":
        path.write_bytes(data[: last_record(data)])
    elif fault == "cut inside a record":
        path.write_bytes(data[:-50])
    elif fault == "bit flipped":
        path.write_bytes(data[:777] + bytes([data[777] ^ 4]) + data[778:])
    elif fault == "missing":
        path.unlink()
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "extra":
        path = path.with_name("dataset-99-3.tfrecord")
        path.write_bytes(data[: record_size(data)])
    elif fault == "another shard's records":
        path.write_bytes(shard_path(copied, 2).read_bytes())
    return path


def last_record(data: bytes) -> int:
    """Offset of the last record."""
    offset = 0
    while offset + record_size(data[offset:]) < len(data):
        offset += record_size(data[offset:])
    return offset


FAULTS = (
    "cut between records",
    "cut inside a record",
    "bit flipped",
    "missing",
    "empty",
    "extra",
    "another shard's records",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_shards_are_named(copied, fault):
    verify(copied, deep=True)
    path = damage(copied, fault)
    with pytest.raises(DamageError) as error:
        verify(copied, deep=True)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault not in ("bit flipped", "another shard's records")]
)
def test_what_sizes_alone_can_tell_is_found_without_reading(copied, fault):
    verify(copied, deep=False)
    path = damage(copied, fault)
    with pytest.raises(DamageError, match=path.name):
        verify(copied, deep=False)


def test_fingerprint_is_of_the_batches_not_of_the_place(manifest, copied):
    assert copied.fingerprint == manifest.fingerprint
    assert dataclasses.replace(copied, source="elsewhere").fingerprint == manifest.fingerprint
    assert dataclasses.replace(copied, vocab_size=601).fingerprint != manifest.fingerprint
    train = copied.splits["train"]
    turned = dataclasses.replace(train, shards=train.shards[::-1])
    assert dataclasses.replace(copied, splits={"train": turned}).fingerprint != manifest.fingerprint


# Manifests that can't be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "null"])
def test_a_manifest_that_cannot_be_read_is_named(copied, text):
    file = pathlib.Path(copied.folder, manifests.NAME)
    file.write_text(text)
    with pytest.raises(DamageError) as error:
        load_manifest(copied.folder)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_manifest_of_another_format_is_refused(copied):
    file = pathlib.Path(copied.folder, manifests.NAME)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    with pytest.raises(InputError, match="format 2"):
        load_manifest(copied.folder)


@pytest.mark.parametrize("there", [True, False])
def test_no_shards(tmp_path, there):
    folder = tmp_path / "shards"
    if there:
        folder.mkdir()
    with pytest.raises(InputError, match="holds no shards"):
        load_manifest(str(folder))


# Shards of transformers' TF-TPU example: no manifest ------------------------------------------------------------------


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


def test_without_a_manifest_shards_come_in_the_order_of_their_numbers(foreign, tokenizer_folder):
    train = pathlib.Path(foreign.folder, "train")
    for number in range(6, 12):
        shutil.copy(
            shard_path(foreign), train / f"dataset-{number}-{foreign.splits['train'].shards[1].records}.tfrecord"
        )
    found = load_manifest(foreign.folder, tokenizer_folder=tokenizer_folder).splits["train"].shards
    assert [int(shard.file.split("-")[1]) for shard in found] == list(range(12))


def test_without_a_manifest_a_tokenizer_is_needed(foreign):
    with pytest.raises(InputError, match=r"tokenizer\.path"):
        load_manifest(foreign.folder)


@pytest.mark.parametrize("fault", ["missing", "twice", "no records", "empty"])
def test_without_a_manifest_what_the_names_tell_is_checked(foreign, tokenizer_folder, fault):
    path = shard_path(foreign)
    if fault == "missing":
        path.unlink()
    elif fault == "twice":
        shutil.copy(path, path.with_name("dataset-1-7.tfrecord"))
    elif fault == "no records":
        path.rename(path.with_name("dataset-1-0.tfrecord"))
    else:
        path.write_bytes(b"")
    with pytest.raises(DamageError, match=r"train.*dataset-1|train.*shard 1"):
        verify(load_manifest(foreign.folder, tokenizer_folder=tokenizer_folder), deep=True)
