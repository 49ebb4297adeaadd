"""What a folder of shards holds: manifest.json, or what the files of transformers' TF-TPU example show."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json

from mlm import logs
from mlm.data import manifest_rules, tfrecord, tokenizer
from mlm.data.manifest_rules import SHARD_NAME
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children, inside, is_remote

FORMAT = 1
NAME = "manifest.json"


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
    duplicates: int | None = None  # dropped
    tokens: int | None = None  # ordinary ones, without special tokens
    dropped_tokens: int | None = None  # of the last, partial row
    text_bytes: int | None = None  # UTF-8 bytes of the documents
    unigram_entropy: float | None = None  # of the ordinary tokens, in nats

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
    special_ids: dict[str, int]  # "cls", "pad", "sep", "unk" and "mask"
    all_special_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    full_rows: bool  # every token is real, so attention_mask need not be read
    inputs: str  # fingerprint of what the shards were made from; "" if unknown
    source: str  # the corpus, for a person
    splits: dict[str, Split]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the batches: the files' contents in order, whatever folder holds them."""
        header = [self.length, self.vocab_size, self.special_ids, self.all_special_ids]
        files = {name: [dataclasses.astuple(s) for s in split.shards] for name, split in self.splits.items()}
        return hashlib.sha256(json.dumps([header, files], sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        del content["folder"]
        return json.dumps(content, indent=1)


def load_manifest(folder: str, *, tokenizer_folder: str | None = None) -> Manifest:
    """Reads a folder's manifest.json; without one, infers it from its shards' names and their tokenizer.

    Raises:
      InputError: there are no shards, or no tokenizer where one is needed.
      DamageError: the manifest is not valid; or, without one, a shard is missing, duplicate or empty.
    """
    return read_manifest(folder) or _infer(UPath(folder), tokenizer_folder)


def read_manifest(folder: str) -> Manifest | None:
    """Reads and checks a folder's manifest.json; None if there is none."""
    file = UPath(folder) / NAME
    content = logs.read_object(file)
    if not content and not file.is_file():
        return None
    version = content.pop("format", None)
    if type(version) is int and version != FORMAT:
        raise InputError(f"{file}: has format {str(version)[:9]}, this code reads {FORMAT}; write the shards again.")
    try:
        if type(version) is not int:
            raise ValueError(f"format is missing, or is not the number {FORMAT}")
        manifest_rules.check(content)
    except ValueError as error:
        raise DamageError(f"{file}: {error}; put a good copy in its place, or write the shards again.") from None
    splits = {}
    for name, split in content.pop("splits").items():
        splits[name] = Split(tuple(Shard(**shard) for shard in split.pop("shards")), **split)
    content["all_special_ids"] = tuple(content["all_special_ids"])
    return Manifest(folder=folder, splits=splits, **content)


def work_folder(folder: str) -> UPath:
    """Returns the folder, named {folder}.tmp, that exists while the shards are being made."""
    root = UPath(folder)
    if not root.name:
        raise InputError(f"{folder}: shards need a folder of their own; name one inside it.")
    return root.with_name(root.name + ".tmp")


def holds_foreign_shards(folder: str) -> bool:
    """Returns whether a folder has training shards and no manifest, as transformers' TF-TPU example leaves them."""
    found = any(SHARD_NAME.fullmatch(path.name) for path in children(UPath(folder) / "train"))
    return found and not (UPath(folder) / NAME).is_file() and not _is_incomplete(folder)


def _is_incomplete(folder: str) -> bool:
    """Returns whether our own shards are being written to a bucket: its manifest comes last."""
    return is_remote(folder) and work_folder(folder).is_dir()


def _infer(root: UPath, tokenizer_folder: str | None) -> Manifest:
    if _is_incomplete(str(root)):
        raise InputError(f"{root}: its shards are not complete; start the command `shards` again, on all hosts.")
    splits = {}
    for split in manifest_rules.SPLITS:
        names = ((SHARD_NAME.fullmatch(path.name), path) for path in children(root / split))
        found = sorted((int(match[1]), path, int(match[2])) for match, path in names if match)
        shards = []
        for index, (number, path, records) in enumerate(found):
            if number != index:
                raise DamageError(f"{root / split}: shard {min(number, index)} is missing or duplicate.")
            size = path.stat().st_size
            if not records or not size:
                raise DamageError(f"{path}: is empty; move it away and renumber the others.")
            shards.append(Shard(f"{split}/{path.name}", records, size, None))
        splits[split] = Split(tuple(shards))
    if not splits["train"].shards:
        raise InputError(f"{root}: holds no shards (train/dataset-*-*.tfrecord); write them first, or set shards.dir.")
    if tokenizer_folder is None:
        raise InputError(f"{root}: has no {NAME}, so its tokenizer is needed: set tokenizer.path.")
    first = root / splits["train"].shards[0].file
    with first.open("rb") as file:
        length = tfrecord.first_length(file.read(1 << 20), str(first))
    return Manifest(
        folder=str(root),
        length=length,
        **tokenizer.manifest_fields(tokenizer_folder),
        full_rows=False,
        inputs="",
        source="unknown",
        splits=splits,
    )


def verify(manifest: Manifest, *, deep: bool) -> None:
    """Raises DamageError unless the folder holds the shards of the manifest and no others.

    Sizes are compared, and with `deep` the SHA-256 of every file.
    """
    root = UPath(manifest.folder)
    for name, split in manifest.splits.items():
        listed = {shard.file for shard in split.shards}
        for path in children(root / name):
            if path.name.endswith(".tfrecord") and f"{name}/{path.name}" not in listed:
                raise DamageError(f"{path}: is not in {NAME}; move it away.")
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for damage in pool.map(lambda shard: _damage(root, shard, deep), shards):
            if damage:
                raise DamageError(f"{damage}; put a good copy in its place, or write the shards again.")


def _damage(root: UPath, shard: Shard, deep: bool) -> str | None:
    try:
        path = inside(root, shard.file)
    except ValueError as error:
        return f"{root / NAME}: {error}"
    if not path.is_file():
        return f"{path}: is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"{path}: has {size} bytes where {shard.bytes} were written"
    if deep and shard.sha256 is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                return f"{path}: is not what was written (its SHA-256 differs)"
    return None
