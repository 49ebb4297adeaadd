"""The checks of `doctor`: each looks at one thing and returns what it found."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlm.data import tokenizer
from mlm.data.manifest import Manifest, verify
from mlm.doctor import first_batch
from mlm.errors import InputError
from mlm.workdir import Workdir

UNEVEN = 1.1  # records of the largest lane over those of the smallest: from there on epochs drift apart visibly
REPEATED = 0.01  # share of the documents: boilerplate repeats below that in every corpus
OVERLAP = (0.01, 0.5)  # share of the validation rows: doubtful, and wrong: then the score is one of memory
EXAMPLE = 160  # characters of an example


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has to say.

    Attributes:
      level: wrong, doubtful or fine.
      check: its name.
      what, where, mend: for a person; how to mend it is empty where all is fine.
    """

    level: str
    check: str
    what: str
    where: str
    mend: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is looked at.

    Attributes:
      config, workdir, manifest: of the run.
      folder: of the tokenizer in the workdir; None if there is none.
      hosts, devices: that the run will have, devices over all hosts; 0 for this machine's. A topology has its own.
      rows: of the training split to look at.
      topology, slices: of the TPU to compile for; "" for none.
    """

    config: ConfigDict
    workdir: Workdir
    manifest: Manifest
    folder: str | None
    hosts: int
    devices: int
    rows: int
    topology: str
    slices: int = 1


def files(case: Case) -> list[Finding]:
    """The shards are those of the manifest."""
    manifest = case.manifest
    verify(manifest, deep=True)
    splits = manifest.splits.items()
    words = ", ".join(f"{len(split.shards)} {name} shards with {split.records:,} rows" for name, split in splits)
    known = all(shard.sha256 for _, split in splits for shard in split.shards)
    return [
        Finding("fine", "files", f"{words}, {'as they were written' if known else 'without hashes'}", manifest.folder)
    ]


def length(case: Case) -> list[Finding]:
    """Rows, config and positions are of one length."""
    tokens, config, where = case.manifest.length, case.config, case.manifest.folder
    found = []
    if tokens != config.shards.length:
        what = f"the rows hold {tokens} tokens, config.shards.length = {config.shards.length}"
        found.append(
            Finding("wrong", "length", what, where, f"set shards.length to {tokens}, or write the shards again")
        )
    if tokens > config.model.positions:
        what = f"the rows hold {tokens} tokens, config.model.positions = {config.model.positions}"
        found.append(Finding("wrong", "length", what, where, f"set model.positions to {tokens} or more"))
    what = f"rows of {tokens} tokens, {config.model.positions} positions"
    return found or [Finding("fine", "length", what, where)]


def vocabulary(case: Case) -> list[Finding]:
    """The tokenizer in the workdir is the one of the shards."""
    manifest, where, name = case.manifest, str(case.workdir.tokenizer), "tokenizer"
    if case.folder is None:
        what = "there is no tokenizer, so that nothing can be decoded or compared"
        return [Finding("doubtful", name, what, where, "put that of the shards there: python -m mlm tokenizer")]
    size = tokenizer.load_fast(case.folder).get_vocab_size()
    mend = "use shards and tokenizer that belong together, or write the shards again"
    found = []
    if manifest.tokenizer_fingerprint not in (None, tokenizer.fingerprint(case.folder)):
        what = f"the shards in {manifest.folder} were made with another tokenizer (its fingerprint differs)"
        found.append(Finding("wrong", name, what, where, mend))
    named, every = tokenizer.special_ids(case.folder)
    if (named, every) != (manifest.special_ids, manifest.all_special_ids):
        what = f"its special ids are {named} and {every}, in the manifest {manifest.special_ids} and "
        found.append(Finding("wrong", name, what + str(manifest.all_special_ids), where, mend))
    if size != manifest.vocab_size:
        what = f"it has {size} entries, the manifest says {manifest.vocab_size}"
        found.append(Finding("wrong", name, what, where, mend))
    asked = case.config.tokenizer.vocab_size
    if not case.config.tokenizer.path and asked != manifest.vocab_size:
        what = (
            f"config.tokenizer.vocab_size = {asked}, the tokenizer of the shards has {manifest.vocab_size}, which holds"
        )
        found.append(Finding("doubtful", name, what, where, f"set tokenizer.vocab_size to {manifest.vocab_size}"))
    return found or [Finding("fine", name, f"{size:,} entries, the shards' own", where)]


def mesh(case: Case) -> list[Finding]:
    """The batches can be split over the devices, and every host reads whole lanes, or an even share of one."""
    from mlm.plan import tables
    from mlm.tasks import pretraining

    where, name = case.topology or "--hosts, --devices", "mesh"
    try:
        (data, fsdp, tensor), processes_SxT = _devices(case)
    except InputError as error:
        return [Finding("wrong", name, str(error), where, "as it says")]
    found = pretraining.host_input(case.config, processes_SxT)
    if not found["fed"]:
        return [Finding("wrong", name, found["error"], f"{found['count']} hosts", "as it says")]
    rows = case.config.data.global_batch // case.config.train.accumulate // len(processes_SxT)
    what = f"data {data} x fsdp {fsdp} x tensor {tensor}, {rows} rows a device at once; {tables.hosts(found)}"
    return [Finding("fine", name, what, where)]


def _devices(case: Case) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the axes of the mesh and the host of each of its devices, as `sharding.processes_of` does."""
    import jax

    from mlm.training import sharding

    if case.topology and importlib.util.find_spec("libtpu") is not None:
        from mlm.plan import compile as compiling
        from mlm.plan import topology

        there = compiling.make_mesh(case.config, topology.find(case.topology, case.slices))
        return tuple(there.shape.values()), sharding.processes_of(there)
    hosts = case.hosts or jax.process_count()
    devices = case.devices or jax.local_device_count() * hosts
    if devices % hosts:
        raise InputError(f"--devices={devices}: can't be shared by --hosts={hosts}; make it a multiple of them.")
    shape = sharding.mesh_shape(**case.config.mesh.to_dict(), count=devices)
    return shape, (np.arange(devices) // (devices // hosts)).reshape(-1, shape[2])


def lanes(case: Case) -> list[Finding]:
    """The shards feed the lanes."""
    config, where, name = case.config, case.manifest.folder, "lanes"
    lanes, found = config.data.lanes, []
    shards = [shard.records for shard in case.manifest.splits["train"].shards]
    filled = sum(records > 0 for records in shards)
    sizes = [sum(shards[lane::lanes]) for lane in range(lanes)]
    if min(sizes) == 0:
        what = f"config.data.lanes = {lanes}, the training split has {filled} shards with records"
        return [Finding("wrong", name, what, where, f"set data.lanes to {filled} or less, or write more shards")]
    if max(sizes) > UNEVEN * min(sizes):
        what = f"the lanes hold from {min(sizes):,} to {max(sizes):,} rows: their epochs drift apart"
        found.append(Finding("doubtful", name, what, where, f"write a multiple of {lanes} shards (shards.count)"))
    if config.data.global_batch > sum(sizes):
        what = f"config.data.global_batch = {config.data.global_batch}: the split has {sum(sizes):,} rows"
        found.append(Finding("doubtful", name, what, where, "an update reads rows twice: lower it, or give more text"))
    what = f"{lanes} lanes of {min(sizes):,} to {max(sizes):,} rows from {len(shards)} shards"
    return found or [Finding("fine", name, what, where)]


def ids(case: Case) -> list[Finding]:
    """Ids, duplicates, overlap: one look through the rows."""
    from mlm.data import scan

    manifest, where = case.manifest, case.manifest.folder
    if not manifest.splits["validation"].records:
        mend = "raise corpus.validation_fraction, and write the shards again"
        return [Finding("wrong", "overlap", "the validation split has no rows", where, mend)]
    size = manifest.vocab_size if case.folder is None else tokenizer.load_fast(case.folder).get_vocab_size()
    repeats = scan.find_repeats(manifest, max_rows=case.rows)
    found, (largest, split, record) = [], repeats.largest
    level, mend = ("wrong", "use the tokenizer of the shards, or write them again") if largest >= size else ("fine", "")
    what = f"the largest id is {largest} ({split} record {record}), the tokenizer and the model have {size} entries"
    found.append(Finding(level, "ids", f"{what}; {repeats.share:.0%} of the training rows looked at", where, mend))

    share = repeats.repeated / max(repeats.documents, 1)
    what = f"{repeats.repeated:,} of {repeats.documents:,} whole documents ({share:.1%}) had come before"
    what += f", in {repeats.share:.0%} of the training rows"
    level, mend = "fine", ""
    if share > REPEATED:
        level, mend = "doubtful", "see corpus.weights and the source: equal lines are learned by heart"
    if repeats.example is not None and level != "fine":
        one, other, (start, stop) = repeats.example
        text = _decoded(case, scan.row(manifest, "train", one)[start:stop])
        what += f"; the commonest is in the records {one} and {other}: {text}"
    found.append(Finding(level, "duplicates", what, where, mend))

    share = repeats.overlapping / max(repeats.rows, 1)
    what = f"of {repeats.overlapping:,} of {repeats.rows:,} validation rows ({share:.1%}) at least half is in training"
    what += f", by stretches of {scan.STRETCH} tokens in {repeats.share:.0%} of the training rows"
    level = "fine" if share <= OVERLAP[0] else "wrong" if share >= OVERLAP[1] else "doubtful"
    mend = "" if level == "fine" else "drop what comes twice from the corpus, and write the shards again"
    if repeats.pair is not None and level != "fine":
        mine, other = repeats.pair
        text = _decoded(case, scan.row(manifest, "validation", mine))
        what += f"; validation record {mine}, training record {other}: {text}"
    found.append(Finding(level, "overlap", what, where, mend))
    return found


def _decoded(case: Case, ids: Any) -> str:
    if case.folder is None:
        return str(ids.tolist())[:EXAMPLE]
    text = " ".join(tokenizer.load_fast(case.folder).decode(ids.tolist(), skip_special_tokens=False).split())
    return repr(text if len(text) <= EXAMPLE else text[: EXAMPLE - 3] + "...")


def masks(case: Case) -> list:
    """The masks of the first batch are those that the config asks for; the batch follows, for a person."""
    special = case.manifest.all_special_ids if case.folder is None else tokenizer.special_ids(case.folder)[1]
    level, what, mend, batch = first_batch.look(case.config, case.manifest, special, case.folder)
    return [Finding(level, "masks", what, "the first batch", mend), *batch]


def step(case: Case) -> list[Finding]:
    """The step fits into the TPU's memory, as `plan` has it."""
    if not case.topology:
        return []
    if importlib.util.find_spec("libtpu") is None:
        what = "libtpu is not installed, so that memory and time of a step are not known"
        return [Finding("doubtful", "step", what, case.topology, "pip install libtpu (on Linux, x86-64)")]
    from mlm.plan import plan, topology

    job = plan.make_job(case.config, case.manifest, records=None, price=None)
    row = plan.measure(case.config, job, topology.find(case.topology, case.slices))[1]
    size = row["bytes_per_chip"]
    if not row["fits"] or not row.get("short", row)["fits"]:
        what = f"the step does not fit into the {size['capacity'] / 1e9:.2f} GB of a chip"
        return [Finding("wrong", "step", what, case.topology, "python -m mlm plan looks for what would fit")]
    hours = "" if row["hours"] is None else f", {row['hours']:.1f} hours in all"
    what = f"{size['needs'] / 1e9:.2f} of {size['capacity'] / 1e9:.2f} GB a chip, {row['milliseconds']:.1f} ms a step"
    what += hours
    return [Finding("fine", "step", f"{what} (optimistic: see python -m mlm plan)", case.topology)]


ALL = (files, length, vocabulary, mesh, lanes, ids, masks, step)
