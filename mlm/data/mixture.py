"""Several folders of shards, read as one (data.mixture), and the validation sets beside them (evaluate.sets).

Shards and record ids count through the folders, in the order of the mixture. It is a manifest to all who read one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlm.config_rules import lanes_of_shares
from mlm.data.manifest import SPLITS, Manifest, Split
from mlm.data.order import Lane
from mlm.paths import distinct_parts


class MixedFolder(NamedTuple):
    """A folder of a mixture."""

    name: str  # what tells its path from the others'; "" for a single folder
    share: float  # of the rows of every batch
    manifest: Manifest


def join(
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
        parts=parts,
        sets=sets or {part.name: part.manifest for part in parts},
    )


def parts(manifest: Manifest) -> tuple[MixedFolder, ...]:
    """Returns the folders of a mixture, or the only one."""
    return manifest.parts or (MixedFolder("", 1.0, manifest),)


def folders(manifest: Manifest) -> list[Manifest]:
    """Returns the manifests of all folders that are read, once each; of a validation set, the held-out splits."""
    read = [part.manifest for part in parts(manifest)]
    for scored in manifest.sets.values():
        if scored not in read[: len(parts(manifest))]:
            held_out = {name: split for name, split in scored.splits.items() if name != "train"}
            read.append(dataclasses.replace(scored, splits=held_out))
    return read


def paths(manifest: Manifest, split: str) -> list[str]:
    """Returns the files of a split, in order."""
    folders = [part.manifest for part in parts(manifest)]
    return [
        f"{folder.folder}/{shard.file}"
        for folder in folders
        for shard in folder.splits[split].shards
    ]


def lanes(manifest: Manifest, split: str, *, seed: int, lanes: int) -> list[Lane]:
    """Returns the lanes of a split; a folder's are spread over the batch, so that all hosts have some of them."""
    records = tuple(shard.records for shard in manifest.splits[split].shards)
    stop = 0
    placed = []
    counts = lanes_of_shares([part.share for part in parts(manifest)], lanes)
    for part, count in zip(parts(manifest), counts, strict=True):
        start = stop
        stop = stop + len(part.manifest.splits[split].shards)
        folder_lanes = [Lane(seed, records, lane, count, (start, stop)) for lane in range(count)]
        placed += [((2 * lane.lane + 1) / count, lane) for lane in folder_lanes]
    return [lane for _, lane in sorted(placed, key=lambda place_and_lane: place_and_lane[0])]
