"""The checks of `doctor` on shards that could be opened: each is a function from a case to its findings."""

import argparse
import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from mlm.config_rules import lanes_of_shares
from mlm.data.corpus import Corpus
from mlm.data.manifest import Manifest
from mlm.data.stretches import STRETCH
from mlm.data.tokenizer import load_fast, load_for_corpus, manifest_fields
from mlm.data.tokenizer_checks import UNKNOWN, UNKNOWN_FIX
from mlm.doctor import first_batch, scan
from mlm.errors import DamageError, InputError
from mlm.plan import tables, topology
from mlm.training import sharding
from mlm.workdir import Workdir

# rows of the largest lane over those of the smallest: above it, their epochs drift apart
UNEVEN = 1.1
REPEATED = 0.01  # of the documents: in every corpus some boilerplate repeats
# Shares of the rows of a held-out split: a warning above the first; from the second on, the score is of memory.
OVERLAP = (0.01, 0.5)
EXAMPLE = 160  # characters of an example


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report of `doctor`; `run` fills in `where` and `check` if they are empty."""

    level: str  # "error" (the run can't be right), "warning" (somebody should look) or "ok"
    what: str
    fix: str = ""  # empty if ok
    where: str = ""  # the shards' folder, unless it is a flag, a topology or another folder
    check: str = ""


@dataclasses.dataclass(frozen=True)
class DataCase:
    """A planned run with its shards."""

    config: ConfigDict
    workdir: Workdir
    flags: argparse.Namespace
    manifest: Manifest
    # rows to show, added by `masks`
    batch: list[list[first_batch.Piece]] = dataclasses.field(default_factory=list)

    @property
    def folder(self) -> str | None:
        """The tokenizer in the workdir."""
        return self.workdir.tokenizer_folder


def run(check: Callable[[DataCase], list[Finding]], case: DataCase) -> list[Finding]:
    """Returns the findings of a check, complete; an InputError or DamageError is a finding, too."""
    try:
        findings = check(case)
    except (InputError, DamageError) as error:
        findings = [Finding("error", str(error), "see the message")]
    name = check.__name__
    folder = case.manifest.folder
    return [
        dataclasses.replace(f, check=f.check or name, where=f.where or folder) for f in findings
    ]


def mesh(case: DataCase) -> list[Finding]:
    """The batches can be split over the devices, and every host reads whole lanes, or an even part of one."""
    axes = case.config.mesh
    where = case.flags.topology or "--hosts, --devices"
    try:
        if case.flags.topology:
            planned = sharding.mesh_of(
                axes, topology.find(case.flags.topology, case.flags.slices).devices
            )
            (data, fsdp, tensor) = planned.shape.values()
            processes_SxT = sharding.processes_of(planned)
        else:
            hosts = case.flags.hosts or jax.process_count()
            devices = case.flags.devices or jax.local_device_count() * hosts
            if devices % hosts:
                raise InputError(f"--devices={devices}: must be a multiple of --hosts={hosts}.")
            data, fsdp, tensor = sharding.mesh_shape(-1, axes.fsdp, axes.tensor, devices)
            processes_SxT = (np.arange(devices) // (devices // hosts)).reshape(-1, tensor)
        host_input = sharding.host_input(processes_SxT, case.config)
        if not host_input["fed"]:
            raise InputError(host_input["error"])
    except InputError as error:
        return [Finding("error", str(error), "see the message", where)]
    rows = case.config.data.global_batch // case.config.train.accumulate // len(processes_SxT)
    what = f"data {data} x fsdp {fsdp} x tensor {tensor}, {rows} rows a device at once; {tables.hosts(host_input)}"
    return [Finding("ok", what, where=where)]


def lanes(case: DataCase) -> list[Finding]:
    """The shards of each folder feed its lanes evenly."""
    findings = []
    parts = case.manifest.parts
    batch = case.config.data.global_batch
    lanes = case.config.data.lanes
    for part, count in zip(
        parts, lanes_of_shares([part.share for part in parts], lanes), strict=True
    ):
        shards = [shard.records for shard in part.manifest.splits["train"].shards]
        sizes = [sum(shards[lane::count]) for lane in range(count)]
        rows = batch * count // lanes
        what = f"{count} lanes of {min(sizes):,} to {max(sizes):,} rows from {len(shards)} shards"
        fix = ""
        if max(sizes) > UNEVEN * min(sizes):
            what += ": their epochs drift apart"
            fix = f"write a multiple of {count} shards (shards.count)"
        if rows > sum(sizes):
            what += f"; config.data.global_batch = {batch} takes {rows} of them, so a step reads rows twice"
            fix = "lower it, or give more text"
        findings.append(Finding("warning" if fix else "ok", what, fix, where=part.manifest.folder))
    return findings


def ids(case: DataCase) -> list[Finding]:
    """Ids, duplicates and overlap, in one scan of the rows."""
    manifest = case.manifest
    # refuses ids that the vocabulary lacks
    repeats = scan.find_repeats(manifest, max_rows=case.flags.rows)
    part = f"{repeats.share:.0%} of the training rows"
    findings = [Finding("ok", f"all are below {manifest.vocab_size}; checked {part}")]
    if repeats.unknown > UNKNOWN:
        what = f"{repeats.unknown:.0%} of the tokens are unknown"
        findings.append(Finding("warning", what, UNKNOWN_FIX, check="unknown"))
    rate = repeats.repeated / max(repeats.documents, 1)
    what = f"{repeats.repeated:,} of {repeats.documents:,} whole documents ({rate:.1%}) are repeated, in {part}"
    fix = ""
    if rate > REPEATED:
        text = _decode(case, scan.row(manifest, "train", repeats.example))
        what += f"; the most frequent is in record {repeats.example}: {text}"
        fix = "see corpus.weights and the source: a model memorizes repeated lines"
    findings.append(Finding("warning" if fix else "ok", what, fix, check="duplicates"))
    return findings + [
        _overlap(case, split, overlap, part) for split, overlap in repeats.overlaps.items()
    ]


def _overlap(case: DataCase, split: str, overlap: scan.Overlap, part: str) -> Finding:
    """Returns how much of a held-out split is in `part` of the training rows."""
    count = len(overlap.overlapping)
    rows = len(overlap.rows)
    if not rows:
        needed = f"{scan.LEAST_STRETCHES + STRETCH - 1} tokens without a special or unknown one among them"
        fix = "look at short documents, and at the share of unknown tokens"
        what = f"no {split} row can be compared with training: none has {needed}"
        return Finding("warning", what, fix, check="overlap")
    rate = count / rows
    what = (
        f"{count:,} of {rows:,} {split} rows ({rate:.1%}) are at least half in training, by stretches of "
        f"{STRETCH} tokens in {part}"
    )
    if rate <= OVERLAP[0]:
        return Finding("ok", what, check="overlap")
    record, other = overlap.pair
    text = _decode(case, scan.row(case.manifest, split, record))
    what += f"; {split} record {record}, training record {other}: {text}"
    fix = (
        "set corpus.group to file, or to a field that documents with the same text share, name groups of their own in "
        f"corpus.{split}_groups, or the {split} split in corpus.keep_out, and write the shards again"
    )
    return Finding("error" if rate >= OVERLAP[1] else "warning", what, fix, check="overlap")


def _decode(case: DataCase, ids: np.ndarray) -> str:
    """Returns the beginning of the text, or the ids if there is no tokenizer."""
    fast = case.folder and load_fast(case.folder)
    text = fast.decode(ids.tolist(), skip_special_tokens=False) if fast else str(ids.tolist())
    return repr(" ".join(text.split())[:EXAMPLE])


def against(case: DataCase) -> list[Finding]:
    """How much of a benchmark's texts the training rows hold."""
    if not case.flags.against:
        return []
    if case.folder is None:
        raise InputError("--against: there is no tokenizer in the workdir; run `tokenizer`.")
    corpus = Corpus.from_config(case.config.corpus).of_texts(tuple(case.flags.against), "--against")
    texts = [document.text for part in corpus.parts() for document in corpus.read(part, texts="")]
    fast = load_for_corpus(case.folder)
    ids = [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]
    held_N, share = scan.find_held(case.manifest, ids, max_rows=case.flags.rows)
    compared = int(np.sum(~np.isnan(held_N)))
    some = int(np.sum(held_N > 0))
    half = int(np.sum(held_N >= 0.5))
    what = (
        f"{some:,} of {compared:,} texts ({some / max(compared, 1):.1%}) share a stretch of {STRETCH} tokens with "
        f"training, {half:,} at least half of their stretches; {share:.0%} of the training rows were read"
    )
    if not some:
        return [Finding("ok", what, where=", ".join(case.flags.against))]
    what += f"; the most: {' '.join(texts[int(np.nanargmax(held_N))].split())[:EXAMPLE]!r}"
    fix = "leave them out by corpus.keep_out, and write the shards again, or report the scores without them"
    return [Finding("warning", what, fix, ", ".join(case.flags.against))]


def masks(case: DataCase) -> list[Finding]:
    """The masks of the first batch are those that the config asks for."""
    batch, read_BxL, kinds_BxL = first_batch.draw(
        case.config, case.manifest, case.workdir, case.flags.entry.pretraining
    )
    special = case.manifest.all_special_ids
    if case.folder is not None:
        special = manifest_fields(case.folder)["all_special_ids"]
        columns = (batch["input_ids"], read_BxL, kinds_BxL)
        rows = list(zip(*columns, strict=True))[: first_batch.SHOWN]
        case.batch.extend(list(first_batch.pieces(load_fast(case.folder), *row)) for row in rows)
    overrides = case.flags.entry.record.get("overrides", ())
    draws_as_set = not {"make_masking", "inputs", "__init__"} & set(overrides)
    judged = first_batch.judge(
        case.config, batch, read_BxL, kinds_BxL, special, draws_as_set=draws_as_set
    )
    return [Finding(*judged, where="the first batch")]


ALL = (mesh, lanes, ids, against, masks)
