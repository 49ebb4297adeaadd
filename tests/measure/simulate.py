"""What the shards of a big corpus cost, without the corpus: the real driver, the real tasks, and made-up results.

    python -m tests.measure.simulate                   1 TB in 4,000 parts on 64 hosts of 112 cores
    python -m tests.measure.simulate --terabytes=0.1 --parts=0 --hosts=8
    python -m tests.measure.simulate --driver-memory   the driver's memory at 1 GB, 100 GB and 1 TB

What tasks cost is measured first, on 40 MB of docstrings (tests/measure/task_costs.py). Then shards.write runs with an
engine whose tasks write only the small files that the driver reads, and return what they would have used. The clock is
simulated: the tasks of a phase go to the first free worker, in the order of submission; between the phases come the
driver's own processor time and requests. Not simulated: slow hosts, lost workers, what a scheduler takes for each task,
the processor time of a bucket's client.
"""

import argparse
import functools
import heapq
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlm.cluster.engine import process_pool
from mlm.data import deduplicate, results, shards, sources
from mlm.data.deduplicate import DROPPED
from mlm.data.map_part import BLOCK, ENTRY, RANGES, WIDTH
from mlm.data.write_shard import table_name
from mlm.paths import UPath
from tests.measure import task_costs
from tests.measure.task_costs import LENGTH, READ, SECONDS, SERIAL, THREADED, VALIDATION, WRITTEN, Record
from tests.support.corpora import corpus_of

CHUNK = 5 * 2**20  # bytes of a text that gcsfs reads at once


class Model(NamedTuple):
    """What is measured, and what results are made up from."""

    costs: dict[str, list[float]]  # SECONDS, READ and WRITTEN for each of a task's units, see task_costs.units
    text: float  # bytes of text, documents and tokens for each byte of a source
    documents: float
    tokens: float
    duplicates: float  # share of the documents


def fit(folder: Path) -> Model:
    """Measures what the tasks of big parts and big blocks cost."""
    file = folder / "model.json"
    if not file.exists():
        text = task_costs.make_text(folder, 40)
        sources.PART_BYTES, shards.BLOCK_BYTES = (20 * 10**6, 10**9), (2**22, 2**22)
        made, phases = task_costs.write_shards(folder, text, {"train": 2, "validation": 1}, 1)
        records = {phase.name: phase.records for phase in phases if phase.records}
        records["deduplicate"] = [task_costs.fresh(measured_deduplicate, folder)]
        costs = {}
        for name, own in records.items():
            costs[name] = (sum(each.used for each in own) / sum(each.units for each in own))[:SERIAL].tolist()
        sums = {
            name: sum(getattr(split, name) for split in made.splits.values()) for name in ("documents", "duplicates")
        }
        documents, size = sum(sums.values()), text.stat().st_size
        scale = documents / sums["documents"] / size  # text and tokens are counted without duplicates
        text_bytes = sum(split.text_bytes for split in made.splits.values()) * scale
        tokens = sum(sum(split.sources.values()) for split in made.splits.values()) * scale
        model = Model(costs, text_bytes, documents / size, tokens, sums["duplicates"] / documents)
        file.write_text(json.dumps(model._asdict(), indent=1))
    return Model(**json.loads(file.read_text()))


def measured_deduplicate(folder: Path, documents: int = deduplicate.DOCUMENTS // 2, parts: int = 50) -> Record:
    """Of a task with as many documents as those of a big corpus; a fifth of them are duplicates."""
    rng, maps = np.random.default_rng(0), tuple(f"part{part}" for part in range(parts))
    hashes, lost = rng.integers(2**64, size=documents, dtype=np.uint64), documents // 5
    hashes[-lost:] = hashes[:lost]
    for name, own in zip(maps, np.split(rng.permutation(hashes), parts), strict=True):
        entries, blocks = np.zeros(len(own), ENTRY), np.zeros(1, BLOCK)
        entries["hash"], entries["row"], blocks["documents"] = np.sort(own), np.arange(len(own)), len(own)
        results.save_cut(UPath(f"{folder}/made_up/{name}.hashes"), entries, entries["hash"] // WIDTH, RANGES)
        results.save(UPath(f"{folder}/made_up/{name}.blocks"), blocks)
    task = deduplicate.Ranges(maps, 0, RANGES, f"{folder}/made_up", "made_up")
    record = task_costs.measured(deduplicate.deduplicate, task)
    shutil.rmtree(f"{folder}/made_up")
    return record


class MadeUp(sources.Kind):
    """BYTES/PARTS: a source that can be listed and not read."""

    def parts(self) -> Iterator[tuple[str, str, int, tuple]]:
        size, count = map(int, self.rest.split("/"))
        return (("", f"part {part}", size // count, (part,)) for part in range(count))


def make_up(model: Model, function: Callable, task: Any) -> Record:
    """Writes what the driver reads of a task's results; returns what the task would have used."""
    name = function.__name__
    if name == "deduplicate":
        _save(task, duplicates=b"")
    else:
        {"map_part": _map, "leave_out": _leave_out, "write_shard": _write}[name](model, task)
    count, (serial, threaded) = task_costs.units(name, task), task_costs.requests(name, task)
    if name == "map_part":
        serial += 2 + task.part.bytes // CHUNK
    return Record(count, np.array([*(count * cost for cost in model.costs[name]), serial, threaded]), 0.0)


def _save(task: Any, **contents: bytes) -> None:
    Path(task.folder).mkdir(parents=True, exist_ok=True)
    for kind, content in contents.items():
        Path(f"{task.folder}/{task.key}.{kind}").write_bytes(content)


def _map(model: Model, task: Any) -> None:
    rng, text = np.random.default_rng(task.part.where[0]), task.part.bytes * model.text
    count = math.ceil(text * (1 - VALIDATION) / task.block_bytes)
    sizes = np.append(np.full(count, text * (1 - VALIDATION) / count), text * VALIDATION)
    blocks = np.zeros(count + 1, BLOCK)
    blocks["hash"], blocks["split"][-1] = rng.integers(2**64, size=count + 1, dtype=np.uint64), 1
    blocks["documents"] = np.maximum(1, sizes * model.documents / model.text)
    blocks["tokens"] = sizes * model.tokens / model.text * rng.uniform(0.9, 1.1, count + 1)
    blocks["bytes"] = sizes
    for sums, each in (("row", "documents"), ("offset", "tokens")):
        blocks[sums] = np.cumsum(blocks[each]) - blocks[each]
    empty = dict.fromkeys(("tokens", "documents", "hashes", "kept_out"), b"")
    _save(task, **empty, groups=b"{}", blocks=blocks.tobytes())


def _leave_out(model: Model, task: Any) -> None:
    found = []
    for part, blocks in enumerate(task_costs.blocks_of(task.folder, task.maps), task.first):
        lost = np.zeros(len(blocks), DROPPED)
        lost["part"], lost["block"] = part, np.arange(len(blocks))
        lost["documents"], lost["tokens"] = (blocks[name] * model.duplicates for name in ("documents", "tokens"))
        found.append(lost[lost["documents"] > 0])
        if len(found[-1]):
            Path(task.folder, task.rows(part)).touch()
    _save(task, near=b"", dropped=np.concatenate(found).tobytes())


def _write(model: Model, task: Any) -> None:
    for name in (task.name, table_name(task.name)):
        Path(task.shards, name).parent.mkdir(parents=True, exist_ok=True)
        Path(task.shards, name).touch()
    records = int(task.name.removesuffix(".tfrecord").rpartition("-")[2])
    size = int(task_costs.units("write_shard", task))
    shard = [task.name, records, 3 * size, "0" * 64]
    note = {"shard": shard, "sources": {"made up": size}, "dropped_tokens": 0, "documents": 1, "text_bytes": size}
    _save(task, counts=np.ones(task.vocab_size, np.int64).tobytes(), json=json.dumps(note).encode())


class Row(NamedTuple):
    """A line of the table: a phase, or the driver between two."""

    name: str
    tasks: int
    longest: dict[str, float]  # seconds of the longest task by what they go to
    hours: float
    wall: float


def simulate(args: argparse.Namespace, size: float) -> tuple[list[Row], int, float, float]:
    """Returns the table for a corpus of so many bytes, its blocks, and the driver's peak memory and seconds."""
    model, folder = fit(args.folder), args.folder / f"{size:.0f}"
    shutil.rmtree(folder, ignore_errors=True)
    sources.KINDS["made up"] = MadeUp
    parts = args.parts or -(-int(size) // sources.part_bytes(int(size)))
    corpus = corpus_of((f"made up:{size:.0f}/{parts}",), validation_fraction=VALIDATION)
    settings = shards.Settings(LENGTH, {"train": args.shards, "validation": 8})
    with process_pool(1) as pool:
        engine = task_costs.Recorder(pool, args.hosts * args.cores, functools.partial(make_up, model))
        names = {"tokenizer_folder": str(args.folder / "tokenizer"), "folder": f"{folder}/shards", "source": "made up"}
        shards.write(corpus, settings, engine=engine, **names)
        engine.add("", "", [], task_costs.usage())
    peak, phases, rows = task_costs.peak(), engine.phases, []
    shutil.rmtree(folder)
    for phase in phases:
        path = _seconds(args, phase.before, 1)
        rows.append(Row("(driver)", 0, path, path["processor"] / 3600, sum(path.values())))
        if phase.records:
            at_once = min(args.cores, -(-len(phase.records) // args.hosts))
            paths = [_seconds(args, record.used, at_once) for record in phase.records]
            free = [0.0] * engine.workers
            for path in paths:
                heapq.heapreplace(free, free[0] + sum(path.values()))
            longest = max(paths, key=lambda path: sum(path.values()))
            hours = sum(path["processor"] for path in paths) / 3600
            rows.append(Row(phase.label, len(paths), longest, hours, max(*free, phase.during[SECONDS])))
    seconds = sum(float((phase.before + phase.during)[SECONDS]) for phase in phases)
    return rows, engine.blocks, peak, seconds


def _seconds(args: argparse.Namespace, used: np.ndarray, at_once: int) -> dict[str, float]:
    """Returns the seconds of one of so many tasks that share a host's network, by what they go to."""
    latency, rate = args.latency / 1000, args.gigabytes_per_second * 1e9 / at_once
    waits = (used[SERIAL] + used[THREADED] / results.THREADS) * latency
    return {
        "processor": float(used[SECONDS]),
        "requests": float(waits),
        "network": float(used[READ] + used[WRITTEN]) / rate,
    }


def table(rows: list[Row]) -> str:
    """Returns the table, its sum and what bounds it."""
    lines = ["phase            tasks  longest task, s (processor + requests + network)   processor hours   wall, s"]
    for row in rows:
        parts = " + ".join(f"{seconds:.1f}" for seconds in row.longest.values())
        longest = f"{sum(row.longest.values()):8.1f} ({parts})"
        lines.append(f"{row.name:14} {row.tasks or '':>7}  {longest:48} {row.hours:15.2f} {row.wall:11.1f}")
    total, path = sum(row.wall for row in rows), sum(sum(row.longest.values()) for row in rows)
    lines.append(f"{'total':72} {sum(row.hours for row in rows):15.2f} {total:11.1f}")
    bounds = Counter()
    for row in rows:
        if not row.tasks:
            bounds.update({f"{why} of the driver": seconds for why, seconds in row.longest.items()})
        elif sum(row.longest.values()) > 0.8 * row.wall:
            bounds[f"the longest task of {row.name!r}"] += row.wall
        else:
            bounds[f"the number of workers, in {row.name!r}"] += row.wall
    shares = ", ".join(f"{why} {seconds / total:.0%}" for why, seconds in bounds.most_common() if seconds > total / 100)
    lines.append(f"critical path, with workers without end: {path:.1f} s; bound by {bounds.most_common(1)[0][0]}")
    lines.append(f"shares of the total: {shares}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"terabytes": 1.0, "hosts": 64, "cores": 112, "parts": 4000, "shards": 1024}
    for name, default in (numbers | {"latency": 30.0, "gigabytes-per-second": 2.0}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    parser.add_argument("--driver-memory", action="store_true")
    parser.add_argument("--folder", type=Path, default=task_costs.FOLDER)
    args = parser.parse_args()
    fit(args.folder)
    if not args.driver_memory:
        rows, blocks, peak, seconds = task_costs.fresh(simulate, args, args.terabytes * 1e12)
        print(table(rows))
        print(
            f"driver: {blocks:,} blocks, peak memory {peak:.0f} MB, {seconds / args.terabytes / 1000:.3f} s for each GB"
        )
        return
    args.parts, first = 0, None
    for size in (1e9, 1e11, 1e12):
        _, blocks, peak, seconds = task_costs.fresh(simulate, args, size)
        first = first or (blocks, peak)
        more = (peak - first[1]) * 1e6 / max(1, blocks - first[0])
        line = f"{size / 1e9:g} GB, {blocks:,} blocks: peak memory {peak:.0f} MB, {more:.0f} bytes for each block more"
        print(f"{line}; {seconds:.1f} s of processor time, {seconds / size * 1e9:.3f} for each GB", flush=True)


if __name__ == "__main__":
    main()
