"""What a folder of shards holds: manifest.json, or what the files of transformers' TF-TPU example show."""

import concurrent.futures
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Self

from ml_collections import ConfigDict

from mlm import logs
from mlm.config_rules import CONCATENATED
from mlm.data import tokenizer
from mlm.data.tokenizer_checks import ROLES
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, is_remote, sizes
from mlm.text import printable
from mlm.workdir import work_folder

NAME = "manifest.json"
FORMAT = 2
SPLITS = ("train", "validation", "test")  # every folder of shards has the first two
SHARD_NAME = re.compile(r"dataset-([0-9]{1,18})-([0-9]{1,18})\.tfrecord")
NOT_SAVED = ("folder", "parts", "sets")  # of a manifest


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: its path below the folder, its records and bytes, its SHA-256 (None if unknown)."""

    file: str
    records: int
    bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class Split:
    """The shards of a split and its counts; None for what shards without a manifest don't show."""

    shards: tuple[Shard, ...]  # in order; record ids count through them
    documents: int | None = None
    duplicates: int | None = None  # left out
    kept_out: int | None = None  # left out, see corpus.keep_out
    tokens: int | None = None  # ordinary ones, without special tokens
    unknown_tokens: int | None = None
    dropped_tokens: int | None = None  # of the last, partial row
    cut_tokens: int | None = None  # not in the row where their document starts; left out of "lines"
    padding_tokens: int | None = None  # of the rows
    joined_tokens: int | None = None  # of rows with several documents, or parts of them
    text_bytes: int | None = None  # UTF-8 bytes of the documents
    unigram_entropy: float | None = None  # of the ordinary tokens, in nats
    sources: dict[str, int] | None = None  # tokens of each source, special ones included

    @property
    def records(self) -> int:
        """Rows in all shards."""
        return sum(shard.records for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that is known of a folder of shards."""

    folder: str  # local or gs://
    length: int  # tokens in a row
    vocab_size: int
    # "cls", "pad", "sep", "mask", and "unk" unless every character is known
    special_ids: dict[str, int]
    all_special_ids: tuple[int, ...]  # those, other special tokens, and ids without an entry
    tokenizer_fingerprint: str
    full_rows: bool  # every token is real, so attention_mask need not be read
    inputs: str  # fingerprint of what the shards were made from; "" if unknown
    source: str  # the corpus, for a person
    splits: dict[str, Split]
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # some documents, and why
    rows: str = ""  # as config.shards.rows; "" if unknown
    # Of a mixture, whose manifest is in no file: its folders (mixture.MixedFolder), and manifests scored by name.
    parts: tuple[Any, ...] = ()
    sets: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides a run: the contents of all files but the test split's, whatever folder holds them."""
        return self.fingerprint_of("train")

    @property
    def real_share(self) -> float:
        """The share of the tokens of training rows that are not padding; 1 where the shards don't say."""
        if self.parts:
            return sum(part.share * part.manifest.real_share for part in self.parts)
        train = self.splits["train"]
        return 1 - (train.padding_tokens or 0) / max(train.records * self.length, 1)

    def fingerprint_of(self, split: str) -> str:
        """Returns the SHA-256 of what decides the scores of a split: the test split's own files, or all others."""
        if self.parts:  # the fingerprints of the folders and their shares, in order
            content = [
                (part.manifest.fingerprint_of(split), round(part.share, 6)) for part in self.parts
            ]
            return (
                content[0][0]
                if len(content) == 1
                else hashlib.sha256(json.dumps(content).encode()).hexdigest()
            )
        header = [self.length, self.vocab_size, self.special_ids, self.all_special_ids]
        decisive = {
            name: self.splits[name].shards
            for name in self.splits
            if (name == "test") == (split == "test")
        }
        files = {
            name: [dataclasses.astuple(shard) for shard in shards]
            for name, shards in decisive.items()
        }
        return hashlib.sha256(json.dumps([header, files], sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        content = {"format": FORMAT} | dataclasses.asdict(self)
        return json.dumps({key: content[key] for key in content if key not in NOT_SAVED}, indent=1)


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """What a model and its step need to know about the data, saved with every checkpoint: sizes and ids, no rows."""

    vocab_size: int
    special_ids: dict[str, int]  # as in a manifest
    all_special_ids: tuple[int, ...]
    length: int  # tokens in a row
    records: int  # rows of the training split
    # of several folders: name, share, records and fingerprint of each
    mixture: tuple[dict[str, Any], ...] = ()
    real_share: float = 1.0  # of the tokens of training rows, as in a manifest
    # where any row that is read may have some: none | end | any (in shards of another program)
    padding: str = "any"

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Returns the info of written shards."""
        ids = manifest.special_ids
        all_ids = manifest.all_special_ids
        records = manifest.splits["train"].records
        folders = tuple(
            {
                "name": name,
                "share": share,
                "records": data.splits["train"].records,
                "fingerprint": data.fingerprint,
            }
            for name, share, data in manifest.parts
        )
        mixture = folders if len(folders) > 1 else ()
        read = [part.manifest for part in manifest.parts] or [manifest]
        read += manifest.sets.values()
        padding = "end" if all(data.rows for data in read) else "any"
        if all(data.full_rows for data in read):
            padding = "none"
        return cls(
            manifest.vocab_size,
            ids,
            all_ids,
            manifest.length,
            records,
            mixture,
            manifest.real_share,
            padding,
        )

    @classmethod
    def synthetic(cls, *, vocab_size: int, length: int, records: int) -> Self:
        """Returns the info of data that doesn't exist yet, for a step's speed and memory."""
        special = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
        return cls(vocab_size, special, tuple(special.values()), length, records, padding="none")


def load_manifest(folder: str, *, tokenizer_folder: str | None = None) -> Manifest:
    """Reads a folder's manifest.json; without one, infers it from its shards' names and their tokenizer."""
    return read_manifest(folder) or _infer(UPath(folder), tokenizer_folder)


def read_manifest(folder: str) -> Manifest | None:
    """Reads and checks a folder's manifest.json; None if there is none."""
    file = UPath(folder) / NAME
    content = logs.read_object(file)
    if not content and not file.is_file():
        return None
    version = content.pop("format", None)
    if type(version) is int and version != FORMAT:
        raise InputError(
            f"{file}: has format {str(version)[:9]}, this code reads {FORMAT}; write the shards again."
        )
    content.setdefault("rows", CONCATENATED)  # as all were that don't say it
    try:
        if version != FORMAT or not content.keys().isdisjoint(NOT_SAVED):
            raise ValueError(f"it is not one of format {FORMAT}")
        splits = {}
        for name, split in content.pop("splits").items():
            split.pop("near_duplicates", None)  # of earlier versions
            shards = [
                Shard(file["file"], file["records"], file["bytes"], file["sha256"])
                for file in split.pop("shards")
            ]
            splits[name] = Split(tuple(shards), **split)
        content["all_special_ids"] = tuple(content["all_special_ids"])
        manifest = Manifest(folder=folder, splits=splits, **content)
        _check_values(manifest)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"is not what was written ({printable(str(error)):.200})"
        raise DamageError(
            f"{file}: {reason}; put a good copy in its place, or write the shards again."
        ) from error
    return manifest


def _check_values(manifest: Manifest) -> None:
    """Raises ValueError for a file that is not of its split's folder, and for ids that the vocabulary lacks."""
    for split, values in manifest.splits.items():
        for shard in values.shards:
            match = (
                re.fullmatch(f"{split}/{SHARD_NAME.pattern}", shard.file)
                if split in SPLITS
                else None
            )
            if match is None or int(match[2]) != shard.records:
                raise ValueError(
                    f"{shard.file!r} must be {split}/dataset-NUMBER-{shard.records}.tfrecord"
                )
    ids = set(manifest.special_ids.values())
    if (
        not 0 < manifest.length < 2**31
        or not max(manifest.all_special_ids) < manifest.vocab_size < 2**31
    ):
        raise ValueError(
            "length or vocab_size is not of int32, or vocab_size no larger than the special ids"
        )
    if missing := ids - set(manifest.all_special_ids):
        raise ValueError(f"all_special_ids lacks {min(missing)}, which special_ids has")
    for held, needed in (
        (manifest.special_ids, ROLES.keys() - {"unk"}),
        (manifest.splits, SPLITS[:2]),
    ):
        if missing := set(needed) - held.keys():
            raise ValueError(f"there is no {min(missing)}")


def holds_foreign_shards(folder: str) -> bool:
    """Returns whether a folder has training shards and no manifest, as transformers' TF-TPU example leaves them."""
    has_shards = any(map(SHARD_NAME.fullmatch, sizes(UPath(folder) / "train")))
    return has_shards and not (UPath(folder) / NAME).is_file() and not _is_incomplete(folder)


def _is_incomplete(folder: str) -> bool:
    """Returns whether our own shards are being written to a bucket: its manifest comes last."""
    return is_remote(folder) and work_folder(folder).is_dir()


def _infer(root: UPath, tokenizer_folder: str | None) -> Manifest:
    if _is_incomplete(str(root)):
        raise InputError(
            f"{root}: its shards are not complete; start the command `shards` again, on all hosts."
        )
    splits = {}
    for split in SPLITS:
        files = sizes(root / split)
        matches = sorted(
            filter(None, map(SHARD_NAME.fullmatch, files)), key=lambda match: int(match[1])
        )
        shards = []
        for index, match in enumerate(matches):
            number = int(match[1])
            records = int(match[2])
            size = files[match[0]]
            if number != index:
                raise DamageError(
                    f"{root / split}: shard {min(number, index)} is missing or duplicate."
                )
            if not records or not size:
                raise DamageError(
                    f"{root / split / match[0]}: is empty; move it away and renumber the others."
                )
            shards.append(Shard(f"{split}/{match[0]}", records, size, None))
        if shards or split != "test":
            splits[split] = Split(tuple(shards))
    if not splits["train"].shards:
        raise InputError(
            f"{root}: holds no shards (train/dataset-*-*.tfrecord); write them first, or set shards.dir."
        )
    if tokenizer_folder is None:
        raise InputError(f"{root}: has no {NAME}, so its tokenizer is needed: set tokenizer.path.")
    from mlm.data import tfrecord  # imports numpy

    first = root / splits["train"].shards[0].file
    with first.open("rb") as file:
        length = tfrecord.first_length(file.read(1 << 20), str(first))
    vocabulary = tokenizer.manifest_fields(tokenizer_folder)
    return Manifest(
        folder=str(root),
        length=length,
        full_rows=False,
        inputs="",
        source="unknown",
        splits=splits,
        **vocabulary,
    )


def check_rows(data: Manifest, rows: str) -> None:
    """Raises InputError if shards were written with another config.shards.rows, where they say it."""
    if data.rows not in ("", rows):
        fix = f"the shards in {data.folder} were written with {data.rows}; set it to that, or use another folder"
        raise InputError(f"config.shards.rows = {rows}: {fix} (--workdir or shards.dir).")


def check_config(manifest: Manifest, config: ConfigDict) -> None:
    """Raises InputError if a config reads rows of another kind or length than the shards hold."""
    folder = manifest.folder
    length = config.shards.length
    short = config.data.short_length
    if manifest.length != length:
        raise InputError(
            f"config.shards.length = {length}: the shards in {folder} hold {manifest.length}."
        )
    check_rows(manifest, config.shards.rows)
    if short and manifest.real_share < 1:
        raise InputError(
            f"config.data.short_length = {short}: the rows in {folder} are padded; set it to 0."
        )


def verify(manifest: Manifest, *, deep: bool) -> None:
    """Raises DamageError unless the folder holds these shards, of these sizes (`deep`: and hashes), and no others."""
    root = UPath(manifest.folder)
    files = {
        f"{split}/{name}": size
        for split in manifest.splits
        for name, size in sizes(root / split).items()
    }
    shards = {shard.file: shard for split in manifest.splits.values() for shard in split.shards}
    for file in sorted(files.keys() - shards.keys()):
        if file.endswith(".tfrecord"):
            raise DamageError(f"{root / file}: is not in {NAME}; move it away.")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        damage = pool.map(
            lambda shard: _damage(root, shard, files.get(shard.file), deep), shards.values()
        )
        if first := next(filter(None, damage), None):
            raise DamageError(f"{first}; put a good copy in its place, or write the shards again.")


def _damage(root: UPath, shard: Shard, size: int | None, deep: bool) -> str | None:
    """Returns what is wrong with a shard whose file has `size` bytes; None if nothing is."""
    path = root / shard.file
    if size is None:
        return f"{path}: is missing"
    if size != shard.bytes:
        return f"{path}: has {size} bytes where {shard.bytes} were written"
    if deep and shard.sha256 is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                return f"{path}: is not what was written (its SHA-256 differs)"
    return None
