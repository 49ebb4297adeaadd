"""Several folders of shards, read as one (data.mixture), and the validation sets beside them (evaluate.sets).

Shards and record ids count through the folders, in the order of the mixture. It is a manifest to all who read one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlm.config_rules import lanes_of_shares
from mlm.data.manifest import SPLITS, Manifest, Shard, Split
from mlm.data.order import Lane
from mlm.errors import InputError
from mlm.paths import distinct_parts


class Part(NamedTuple):
    """A folder of a mixture."""

    name: str  # what tells its path from the others'; "" for a single folder
    share: float  # of the rows of every batch
    manifest: Manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Manifest):
    """Folders as one: shards one folder after the other, counts summed, entropies averaged by share."""

    parts: tuple[Part, ...]
    sets: Mapping[str, Manifest]  # scored by name: those of evaluate.sets, without any the parts

    def fingerprint_of(self, split: str) -> str:
        """Returns the SHA-256 of what decides the scores: the folders' own fingerprints and their shares, in order."""
        own = [(part.manifest.fingerprint_of(split), round(part.share, 6)) for part in self.parts]
        return own[0][0] if len(own) == 1 else hashlib.sha256(json.dumps(own).encode()).hexdigest()


def join(folders: Sequence[tuple[float, Manifest]], sets: Mapping[str, Manifest] | None = None) -> Manifest:
    """Returns (share, manifest) of folders, which must have one tokenizer and length, as one manifest."""
    if len(folders) == 1 and not sets:
        return folders[0][1]
    names = distinct_parts([each.folder for _, each in folders]) if folders[1:] else [""]
    parts = tuple(Part(name, *each) for name, each in zip(names, folders, strict=True))
    fields = vars(folders[0][1]) | {
        "folder": " + ".join(each.folder for _, each in folders),
        "full_rows": all(each.full_rows for _, each in folders),
        "splits": {
            name: _join_splits([(share, each.splits[name]) for share, each in folders])
            for name in SPLITS
            if all(name in each.splits for _, each in folders)
        },
    }
    return Mixture(**fields, parts=parts, sets=sets or {part.name: part.manifest for part in parts})


def _join_splits(splits: Sequence[tuple[float, Split]]) -> Split:
    every = {name: [getattr(split, name) for _, split in splits] for name in vars(splits[0][1]) if name != "sources"}
    joined = {name: sum(values, type(values[0])()) for name, values in every.items() if None not in values}
    if "unigram_entropy" in joined:
        joined["unigram_entropy"] = sum(share * split.unigram_entropy for share, split in splits)
    return Split(**joined)


def parts(manifest: Manifest) -> tuple[Part, ...]:
    """Returns the folders of a mixture, or the only one."""
    return manifest.parts if isinstance(manifest, Mixture) else (Part("", 1.0, manifest),)


def sets(manifest: Manifest) -> Mapping[str, Manifest]:
    """Returns the folders whose held-out splits are scored by name."""
    return manifest.sets if isinstance(manifest, Mixture) else {}


def folders(manifest: Manifest) -> list[Manifest]:
    """Returns the manifests of all folders that are read, once each; of a validation set, the held-out splits."""
    own = [part.manifest for part in parts(manifest)]
    others = [each for each in sets(manifest).values() if each not in own]
    held_out = [{name: split for name, split in each.splits.items() if name != "train"} for each in others]
    return own + [dataclasses.replace(each, splits=splits) for each, splits in zip(others, held_out, strict=True)]


def paths(manifest: Manifest, split: str) -> list[str]:
    """Returns the files of a split, in order."""
    own = (part.manifest for part in parts(manifest))
    return [f"{each.folder}/{shard.file}" for each in own for shard in each.splits[split].shards]


def locate(manifest: Manifest, split: str, record: int) -> tuple[Manifest, Shard, int]:
    """Returns the folder and the shard that hold a record, and its row there."""
    for _, _, folder in parts(manifest):
        for shard in folder.splits[split].shards:
            if record < shard.records:
                return folder, shard, record
            record -= shard.records
    raise IndexError(record)


def lanes(manifest: Manifest, split: str, *, seed: int, lanes: int) -> list[Lane]:
    """Returns the lanes of a split; a folder's are spread over the batch, so that all hosts have some of them."""
    records, stop, made = tuple(shard.records for shard in manifest.splits[split].shards), 0, []
    held = lanes_of_shares([part.share for part in parts(manifest)], lanes)
    for part, count in zip(parts(manifest), held, strict=True):
        start, stop = stop, stop + len(part.manifest.splits[split].shards)
        if stop - start < count:
            fault = f"{part.manifest.folder} has only {stop - start} {split} shards for its {count} lanes"
            raise InputError(f"config.data.lanes = {lanes}: {fault}.")
        made += [((2 * lane + 1) / count, Lane(seed, records, lane, count, (start, stop))) for lane in range(count)]
    return [lane for _, lane in sorted(made, key=lambda each: each[0])]
