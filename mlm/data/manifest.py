"""What a folder of shards holds: manifest.json, or what can be told of a folder that transformers' example wrote."""

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
    """One file: its path below the folder, its records and bytes, its SHA-256 (None where nobody noted it)."""

    file: str
    records: int
    bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class Split:
    """The shards of a split, in order, and counts. None stands for what isn't known of shards without a manifest.

    Attributes:
      shards: in order; record ids count through them.
      documents, duplicates: written, and dropped.
      tokens: ordinary ones, without special tokens.
      dropped_tokens: of the last, partial row.
      text_bytes: UTF-8 bytes of the documents.
      unigram_entropy: of the ordinary tokens, in nats.
    """

    shards: tuple[Shard, ...]
    documents: int | None = None
    duplicates: int | None = None
    tokens: int | None = None
    dropped_tokens: int | None = None
    text_bytes: int | None = None
    unigram_entropy: float | None = None

    @property
    def records(self) -> int:
        """Rows in all shards."""
        return sum(shard.records for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that is known of a folder of shards.

    Attributes:
      folder: where it lies, local or gs://.
      length: tokens in a row.
      vocab_size: entries of the tokenizer.
      special_ids: {"cls", "pad", "sep", "unk", "mask"} -> id.
      all_special_ids: every id that is a special token.
      tokenizer_fingerprint: of the tokenizer that made the ids.
      full_rows: every token of every row is real, so that attention_mask need not be read.
      inputs: fingerprint of what the shards were made from; "" if unknown.
      source: the corpus, for a person.
      splits: by name.
    """

    folder: str
    length: int
    vocab_size: int
    special_ids: dict[str, int]
    all_special_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    full_rows: bool
    inputs: str
    source: str
    splits: dict[str, Split]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the batches: the files' contents, in order, wherever they lie."""
        facts = [self.length, self.vocab_size, self.special_ids, self.all_special_ids]
        files = {name: [dataclasses.astuple(s) for s in split.shards] for name, split in self.splits.items()}
        return hashlib.sha256(json.dumps([facts, files], sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        del content["folder"]
        return json.dumps(content, indent=1)


def load_manifest(folder: str, *, tokenizer_folder: str | None = None) -> Manifest:
    """Reads a folder's manifest.json, or, without one, infers it from the files' names as transformers' example does.

    Args:
      folder: of the shards.
      tokenizer_folder: of their tokenizer; only needed where there is no manifest.

    Raises:
      InputError: there are no shards, or no tokenizer where one is needed.
      DamageError: of `read_manifest`; or, without one, a number is missing or there twice, or a file is empty.
    """
    return read_manifest(folder) or _infer(UPath(folder), tokenizer_folder)


def read_manifest(folder: str) -> Manifest | None:
    """Reads a folder's manifest.json; None if there is none. Every command reads it here.

    Raises:
      InputError: it is of another format.
      DamageError: it is no JSON, or a field is not what it must be (see manifest_rules.py).
    """
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
        manifest_rules.check(content, tuple(tokenizer.ROLES))
    except ValueError as error:
        raise DamageError(f"{file}: {error}; put a good copy in its place, or write the shards again.") from None
    splits = {}
    for name, split in content.pop("splits").items():
        shards = tuple(Shard(**shard) for shard in split.pop("shards"))
        splits[name] = Split(shards=shards, **split)
    content["all_special_ids"] = tuple(content["all_special_ids"])
    return Manifest(folder=folder, splits=splits, **content)


def work_folder(folder: str) -> UPath:
    """Returns the folder that is there while the shards of `folder` are being made: beside it, ".tmp" at its end."""
    root = UPath(folder)
    if not root.name:
        raise InputError(f"{folder}: shards need a folder of their own; name one in it.")
    return root.with_name(root.name + ".tmp")


def holds_foreign_shards(folder: str) -> bool:
    """Returns whether a folder has training shards and no manifest, as transformers' TF-TPU example leaves them."""
    found = any(SHARD_NAME.fullmatch(path.name) for path in children(UPath(folder) / "train"))
    return found and not (UPath(folder) / NAME).is_file() and not _is_half_written(folder)


def _is_half_written(folder: str) -> bool:
    """Returns whether our own shards are coming into a bucket's folder: the manifest is put there last."""
    return is_remote(folder) and work_folder(folder).is_dir()


def _infer(root: UPath, tokenizer_folder: str | None) -> Manifest:
    if _is_half_written(str(root)):
        raise InputError(f"{root}: its shards are not complete; start the command `shards` again, on all hosts.")
    splits = {}
    for folder in [root / "train", root / "validation"]:
        found = sorted(
            (int(match[1]), path, int(match[2]))
            for path in children(folder)
            if (match := SHARD_NAME.fullmatch(path.name))
        )
        for place, (number, path, records) in enumerate(found):
            if number != place:
                raise DamageError(f"{folder}: shard {min(number, place)} is missing, or there twice.")
            if not records or not path.stat().st_size:
                raise DamageError(f"{path}: is empty; move it away and number the others anew.")
        shards = (Shard(f"{folder.name}/{p.name}", records, p.stat().st_size, None) for _, p, records in found)
        splits[folder.name] = Split(tuple(shards))
    if not splits["train"].shards:
        raise InputError(f"{root}: holds no shards (train/dataset-*-*.tfrecord); write them first, or set shards.dir.")
    if tokenizer_folder is None:
        raise InputError(f"{root}: has no {NAME}, so its tokenizer is needed: set tokenizer.path.")
    fast = tokenizer.load_fast(tokenizer_folder)
    named, every = tokenizer.special_ids(tokenizer_folder)
    first = root / splits["train"].shards[0].file
    with first.open("rb") as file:
        length = tfrecord.first_length(file.read(1 << 20), str(first))
    return Manifest(
        folder=str(root),
        length=length,
        vocab_size=fast.get_vocab_size(),
        special_ids=named,
        all_special_ids=every,
        tokenizer_fingerprint=tokenizer.fingerprint(tokenizer_folder),
        full_rows=False,
        inputs="",
        source="unknown",
        splits=splits,
    )


def verify(manifest: Manifest, *, deep: bool) -> None:
    """Checks that the folder holds the shards of the manifest and nothing else that looks like one.

    Args:
      manifest: of the folder.
      deep: read every file, and compare its SHA-256; otherwise sizes alone.

    Raises:
      DamageError: a shard is missing, extra, of another size, or not what was written.
    """
    root = UPath(manifest.folder)
    for name, split in manifest.splits.items():
        listed = {shard.file for shard in split.shards}
        folder = root / name
        there = {f"{name}/{path.name}" for path in children(folder)}
        extra = sorted(file for file in there - listed if file.endswith(".tfrecord"))
        if extra:
            raise DamageError(f"{root / extra[0]}: is not in {NAME}; move it away.")
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
