"""The checks of `doctor`: each is a function from a case to its findings."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from mlm.config_rules import LINES, lanes_of_shares
from mlm.data import mixture
from mlm.data.corpus import Corpus
from mlm.data.manifest import Manifest, verify
from mlm.data.stretches import STRETCH
from mlm.data.tokenizer import load_fast, load_for_corpus, manifest_fields
from mlm.data.tokenizer_checks import UNKNOWN, UNKNOWN_FIX, vocabulary_size
from mlm.doctor import first_batch, scan
from mlm.doctor.case import Case
from mlm.errors import DamageError, InputError
from mlm.plan import tables, topology
from mlm.training import sharding

# rows of the largest lane over those of the smallest: above it, their epochs drift apart
UNEVEN = 1.1
PADDED = 0.5  # share of the tokens in rows: above it, most of a step is spent on padding
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
class DataCase(Case):
    """A case with shards to check."""

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


def files(case: DataCase) -> list[Finding]:
    """The shards are those of the manifest."""
    for manifest in mixture.folders(case.manifest):
        verify(manifest, deep=True)
    splits = case.manifest.splits.items()
    counts = ", ".join(
        f"{len(split.shards)} {name} shards with {split.records:,} rows" for name, split in splits
    )
    hashed = all(shard.sha256 for _, split in splits for shard in split.shards)
    return [Finding("ok", f"{counts}, {'as they were written' if hashed else 'without hashes'}")]


def length(case: DataCase) -> list[Finding]:
    """The rows have the config's length, which fits the positions."""
    tokens = case.manifest.length
    positions = case.config.model.positions
    if tokens == case.config.shards.length:
        return [Finding("ok", f"rows of {tokens} tokens, {positions} positions")]
    what = f"the rows hold {tokens} tokens, config.shards.length = {case.config.shards.length}, {positions} positions"
    more_positions = f" and model.positions to {tokens} or more" if tokens > positions else ""
    return [
        Finding(
            "error",
            what,
            f"set shards.length to {tokens}{more_positions}, or write the shards again",
        )
    ]


def rows(case: DataCase) -> list[Finding]:
    """How the rows were made, and the tokens that were cut, joined and padded for them."""
    findings = []
    for manifest in mixture.folders(case.manifest):
        what = f"shards.rows = {manifest.rows or 'unknown'}"
        shares = [0.0]
        cut = "left out" if manifest.rows == LINES else "in later rows of their document"
        for name, split in manifest.splits.items():
            if None not in (split.cut_tokens, split.joined_tokens, split.padding_tokens):
                shares.append(split.padding_tokens / max(split.records * manifest.length, 1))
                what += f"; {name}: {split.cut_tokens:,} tokens {cut}, {split.joined_tokens:,} in rows of several "
                what += f"documents, {split.padding_tokens:,} of padding ({shares[-1]:.1%})"
        fix = (
            "write them again with a lower shards.length, or as documents"
            if max(shares) > PADDED
            else ""
        )
        findings.append(Finding("warning" if fix else "ok", what, fix, manifest.folder))
    return findings


def tokenizer(case: DataCase) -> list[Finding]:
    """The tokenizer in the workdir is the one of the shards."""
    where = str(case.workdir.tokenizer)
    findings = []
    if case.folder is None:
        what = "there is no tokenizer, so nothing can be decoded or compared"
        return [
            Finding(
                "warning", what, "put the shards' tokenizer there: python -m mlm tokenizer", where
            )
        ]
    for key, value in manifest_fields(case.folder).items():
        other = getattr(case.manifest, key)
        if value != other:
            what = f"its {key} is {value}, in the manifest of the shards {other}"
            findings.append(
                Finding(
                    "error", what, "use the shards' own tokenizer, or write the shards again", where
                )
            )
    size = case.manifest.vocab_size
    config = case.config.tokenizer
    if not config.path and config.vocab_size != size:
        what = f"config.tokenizer.vocab_size = {config.vocab_size} has no effect: the shards' tokenizer has {size}"
        findings.append(Finding("warning", what, f"set tokenizer.vocab_size to {size}", where))
    return findings or [Finding("ok", f"{size:,} ids, the shards' own", where=where)]


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
    """The shards of each folder feed its lanes."""
    findings = []
    parts = mixture.parts(case.manifest)
    batch = case.config.data.global_batch
    lanes = case.config.data.lanes
    for part, count in zip(
        parts, lanes_of_shares([part.share for part in parts], lanes), strict=True
    ):
        shards = [shard.records for shard in part.manifest.splits["train"].shards]
        where = part.manifest.folder
        sizes = [sum(shards[lane::count]) for lane in range(count)]
        rows = batch * count // lanes
        total = sum(sizes)
        if min(sizes) == 0:
            filled = sum(records > 0 for records in shards)
            what = f"config.data.lanes = {lanes} gives it {count}, the training split has {filled} shards with records"
            fix = f"set data.lanes to {lanes * filled // count} or less, or write more shards"
            findings.append(Finding("error", what, fix, where))
            continue
        uneven = max(sizes) > UNEVEN * min(sizes)
        if uneven:
            what = f"the lanes hold from {min(sizes):,} to {max(sizes):,} rows: their epochs drift apart"
            findings.append(
                Finding(
                    "warning", what, f"write a multiple of {count} shards (shards.count)", where
                )
            )
        if rows > total:
            what = f"config.data.global_batch = {batch} takes {rows} of the {total:,} rows of the training split"
            findings.append(
                Finding(
                    "warning", what, "a step reads rows twice: lower it, or give more text", where
                )
            )
        elif not uneven:
            what = (
                f"{count} lanes of {min(sizes):,} to {max(sizes):,} rows from {len(shards)} shards"
            )
            findings.append(Finding("ok", what, where=where))
    return findings


def ids(case: DataCase) -> list[Finding]:
    """Ids, duplicates and overlap, in one scan of the rows."""
    manifest = case.manifest
    if not manifest.splits["validation"].records:
        fix = "raise corpus.validation_fraction, and write the shards again"
        return [Finding("error", "the validation split has no rows", fix, check="overlap")]
    size = manifest.vocab_size if case.folder is None else vocabulary_size(load_fast(case.folder))
    repeats = scan.find_repeats(manifest, max_rows=case.flags.rows)
    part = f"{repeats.share:.0%} of the training rows"
    (largest, split, record) = repeats.largest
    what = f"the largest id is {largest} ({split} record {record}), the tokenizer and the model have {size} entries"
    fix = "use the tokenizer of the shards, or write them again" if largest >= size else ""
    findings = [Finding("error" if fix else "ok", f"{what}; checked {part}", fix)]
    if repeats.unknown > UNKNOWN:
        what = f"{repeats.unknown:.0%} of the tokens are unknown"
        findings.append(Finding("warning", what, UNKNOWN_FIX, check="unknown"))

    rate = repeats.repeated / max(repeats.documents, 1)
    level = "warning" if rate > REPEATED else "ok"
    what = f"{repeats.repeated:,} of {repeats.documents:,} whole documents ({rate:.1%}) are repeated, in {part}"
    if repeats.example is not None and level != "ok":
        one, other, (start, stop) = repeats.example
        text = _decode(case, scan.row(manifest, "train", one)[start:stop])
        what += f"; the most frequent is in the records {one} and {other}: {text}"
    fix = (
        "see corpus.weights and the source: a model memorizes repeated lines"
        if level != "ok"
        else ""
    )
    findings.append(Finding(level, what, fix, check="duplicates"))
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
        what = "--against: there is no tokenizer in the workdir to read its texts with"
        return [Finding("error", what, "run `tokenizer`")]
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


ALL = (files, length, rows, tokenizer, mesh, lanes, ids, against, masks)
