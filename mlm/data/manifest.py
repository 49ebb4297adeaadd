"""What a folder of shards holds: manifest.json, or what the files of transformers' TF-TPU example show.

Several folders are read as one (data.mixture): shards and record ids count through them, in the order of the mixture.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from ml_collections import ConfigDict

from mlm import logs
from mlm.data import tokenizer
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, check_reachable, distinct_parts, is_remote, sizes
from mlm.text import printable
from mlm.workdir import work_folder

NAME = "manifest.json"
FORMAT = 2
SPLITS = ("train", "validation", "test")  # every folder of shards has the first two
SHARD_NAME = r"dataset-([0-9]{1,18})-([0-9]{1,18})\.tfrecord"  # number, records


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
    text_bytes: int | None = None  # UTF-8 bytes of the documents
    unigram_entropy: float | None = None  # of the ordinary tokens, in nats

    @property
    def records(self) -> int:
        """Rows in all shards."""
        return sum(shard.records for shard in self.shards)


class MixedFolder(NamedTuple):
    """A folder of a mixture."""

    name: str  # what tells its path from the others'; "" for a single folder
    share: float  # of the rows of every batch
    manifest: "Manifest"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that is known of a folder of shards, or of a mixture of some."""

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
    rows: str = ""  # as config.shards.rows; "" if unknown
    # Of a mixture, whose manifest is in no file: its folders, and the validation sets that are scored by name.
    mixture: tuple[MixedFolder, ...] = ()
    sets: Mapping[str, "Manifest"] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> tuple[MixedFolder, ...]:
        """The folders of a mixture, or the only one."""
        return self.mixture or (MixedFolder("", 1.0, self),)

    @property
    def folders(self) -> list[Self]:
        """The manifests of all folders that are read, once each; of a validation set, the held-out splits."""
        training = [part.manifest for part in self.parts]
        read = [*training]
        for scored in self.sets.values():
            if scored not in training:
                held_out = {name: split for name, split in scored.splits.items() if name != "train"}
                read.append(dataclasses.replace(scored, splits=held_out))
        return read

    def paths(self, split: str) -> list[str]:
        """Returns the files of a split, in order."""
        return [
            f"{part.manifest.folder}/{shard.file}"
            for part in self.parts
            for shard in part.manifest.splits[split].shards
        ]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides a run: the contents of all files but the test split's, whatever folder holds them."""
        return self.fingerprint_of("train")

    @property
    def real_share(self) -> float:
        """The share of the tokens of training rows that are not padding; 1 where the shards don't say."""
        if self.mixture:
            return sum(part.share * part.manifest.real_share for part in self.mixture)
        train = self.splits["train"]
        return 1 - (train.padding_tokens or 0) / max(train.records * self.length, 1)

    def fingerprint_of(self, split: str) -> str:
        """Returns the SHA-256 of what decides the scores of a split: the test split's own files, or all others."""
        if len(self.mixture) == 1:
            return self.mixture[0].manifest.fingerprint_of(split)
        # the fingerprints of the folders of a mixture and their shares, in order
        content = [
            (part.manifest.fingerprint_of(split), round(part.share, 6)) for part in self.mixture
        ]
        if not content:
            files = {
                name: list(map(dataclasses.astuple, self.splits[name].shards))
                for name in self.splits
                if (name == "test") == (split == "test")
            }
            header = [self.length, self.vocab_size, self.special_ids, self.all_special_ids]
            content = [header, files]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        content = {"format": FORMAT} | dataclasses.asdict(self)
        for name in ("folder", "mixture", "sets"):
            del content[name]
        return json.dumps(content, indent=1)


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
        folders = tuple(
            {
                "name": name,
                "share": share,
                "records": data.splits["train"].records,
                "fingerprint": data.fingerprint,
            }
            for name, share, data in manifest.mixture
        )
        read = [*(part.manifest for part in manifest.parts), *manifest.sets.values()]
        padding = "end" if all(data.rows for data in read) else "any"
        if all(data.full_rows for data in read):
            padding = "none"
        return cls(
            vocab_size=manifest.vocab_size,
            special_ids=manifest.special_ids,
            all_special_ids=manifest.all_special_ids,
            length=manifest.length,
            records=manifest.splits["train"].records,
            mixture=folders if len(folders) > 1 else (),
            real_share=manifest.real_share,
            padding=padding,
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
    """Reads a folder's manifest.json; None if there is none."""
    check_reachable(folder)
    file = UPath(folder) / NAME
    if not file.is_file():
        return None
    content = logs.read_object(file)
    version = content.get("format")
    if version != FORMAT:
        raise InputError(
            f"{file}: has format {version!r:.9}, this code reads {FORMAT}; write the shards again."
        )
    try:
        splits = {}
        for name in filter(content["splits"].__contains__, SPLITS):
            split = content["splits"][name]
            shards = tuple(_known(Shard, shard) for shard in split["shards"])
            # no file outside the folder is read, whoever wrote this one
            for shard in shards:
                match = re.fullmatch(f"{name}/{SHARD_NAME}", shard.file)
                if match is None or int(match[2]) != shard.records:
                    expected = f"{name}/dataset-NUMBER-{shard.records}.tfrecord"
                    raise ValueError(f"{shard.file!r} is not {expected}")
            splits[name] = _known(Split, split, shards=shards)
        for name in SPLITS[:2]:
            if name not in splits:
                raise ValueError(f"there is no {name} split")
        return _known(
            Manifest,
            content,
            folder=folder,
            splits=splits,
            all_special_ids=tuple(content["all_special_ids"]),
            # which no file has
            mixture=(),
            sets={},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"is not what was written ({printable(str(error)):.200})"
        raise DamageError(
            f"{file}: {reason}; put a good copy in its place, or write the shards again."
        ) from error


def _known(cls: type[Any], content: Mapping[str, Any], **others: Any) -> Any:
    """Returns an object of a dataclass from its fields in JSON, which may have others, of other versions."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: content[name] for name in names & content.keys()} | others)


def join_folders(
    folders: Sequence[tuple[float, Manifest]], sets: Mapping[str, Manifest] | None = None
) -> Manifest:
    """Returns (share, manifest) of folders, which must have one tokenizer and length, as one manifest.

    Its shards are those of one folder after the other, its entropies the mean by share; other counts are unknown. The
    `sets` are scored by name, without any the folders themselves.
    """
    first = folders[0][1]
    if len(folders) == 1 and not sets:
        return first
    names = (
        distinct_parts([manifest.folder for _, manifest in folders]) if len(folders) > 1 else [""]
    )
    parts = tuple(
        MixedFolder(name, share, manifest)
        for name, (share, manifest) in zip(names, folders, strict=True)
    )
    splits = {}
    for name in SPLITS:
        of_parts = [
            (part.share, part.manifest.splits[name])
            for part in parts
            if name in part.manifest.splits
        ]
        if len(of_parts) == len(parts):
            shards = tuple(shard for _, split in of_parts for shard in split.shards)
            entropies = [split.unigram_entropy for _, split in of_parts]
            entropy = None
            if None not in entropies:
                entropy = sum(share * split.unigram_entropy for share, split in of_parts)
            splits[name] = Split(shards, unigram_entropy=entropy)
    return dataclasses.replace(
        first,
        folder=" + ".join(part.manifest.folder for part in parts),
        full_rows=all(part.manifest.full_rows for part in parts),
        rows="" if len(parts) > 1 else first.rows,
        splits=splits,
        mixture=parts,
        sets=sets or {part.name: part.manifest for part in parts},
    )


def holds_foreign_shards(folder: str) -> bool:
    """Returns whether a folder has training shards and no manifest, as transformers' TF-TPU example leaves them."""
    has_shards = any(re.fullmatch(SHARD_NAME, name) for name in sizes(UPath(folder) / "train"))
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
        shards = {}
        for name in files:
            if match := re.fullmatch(SHARD_NAME, name):
                shard = Shard(f"{split}/{name}", int(match[2]), files[name], sha256=None)
                shards.setdefault(int(match[1]), shard)
        if sorted(shards) != list(range(len(shards))):
            missing = min(set(range(len(shards))) - shards.keys())
            raise DamageError(f"{root / split}: there is no dataset-{missing}-*.tfrecord.")
        if shards or split != "test":
            splits[split] = Split(tuple(shards[number] for number in sorted(shards)))
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


def verify(manifest: Manifest) -> None:
    """Raises DamageError unless the folder holds these shards, of these sizes and hashes, and no others."""
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

    def is_good(shard: Shard) -> bool:
        if files.get(shard.file) != shard.bytes:
            return False
        if shard.sha256 is None:
            return True
        with (root / shard.file).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for shard, good in zip(shards.values(), pool.map(is_good, shards.values()), strict=True):
            if not good:
                raise DamageError(
                    f"{root / shard.file}: is missing, or not what was written; put a good copy in its place, or write "
                    "the shards again."
                )
