"""What the shards of a real corpus cost: processor time, bytes, requests and memory of the driver and of each task.

    python -m tests.measure.task_costs --megabytes=40 --workers 1 4 16

The corpus is docstrings as JSON lines, repeated with another beginning where it is larger than they are; --folder keeps
it, for the next call.
"""

import argparse
import functools
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlm.cluster.engine import Engine, process_pool
from mlm.data import docstrings, results, shards, tokenizer
from mlm.data.manifest import Manifest
from mlm.data.map_part import BLOCK, RANGES
from tests.support.corpora import corpus_of

SECONDS, READ, WRITTEN, SERIAL, THREADED = range(5)  # of `usage`: processor, bytes, bytes, requests one by one, others
VOCABULARY, LENGTH, VALIDATION = 50_265, 512, 0.01
PAGE = 1000  # files in one answer of a bucket's listing
COUNTS, LOCK = Counter(), threading.Lock()
FOLDER = Path(tempfile.gettempdir(), "mlm_simulate")


def units(name: str, task: Any) -> float:
    """What the cost of a task is proportional to: bytes of a part, documents, or tokens."""
    if name == "map_part":
        return task.part.bytes
    if name == "write_shard":
        return float(np.frombuffer(task.blocks, BLOCK)["tokens"].sum())
    share = (task.stop - task.first) / RANGES if name == "deduplicate" else 1
    return share * sum(int(blocks["documents"].sum()) for blocks in blocks_of(task.folder, task.maps))


def requests(name: str, task: Any) -> tuple[int, int]:
    """Files that a task reads or writes one by one, and in threads; the text itself is not among them."""
    if name == "map_part":
        return 6, 0
    if name == "deduplicate":
        return 1, 2 * len(task.maps)
    if name == "leave_out":
        losing = sum(Path(task.folder, task.rows(part)).exists() for part in range(task.first, task.stop))
        return 2, 2 * len(task.duplicates) + losing
    return 4, 2 * len(task.parts) + sum(part in task.left_out for part in task.parts)


@functools.lru_cache(1)
def blocks_of(folder: str, maps: tuple[str, ...]) -> list[np.ndarray]:
    return [np.fromfile(f"{folder}/{name}.blocks", BLOCK) for name in maps]


@functools.cache
def count_requests() -> None:
    """Counts the files that this process reads, writes and lists, by whether several threads do it."""

    def counted(function: Callable, count: Callable[[Any], int] = lambda _: 1) -> Callable:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            with LOCK:
                COUNTS[threading.current_thread() is threading.main_thread()] += count(result)
            return result

        return wrapper

    results.load, results.written = counted(results.load), counted(results.written)
    shards.sizes = counted(shards.sizes, lambda found: 1 + len(found) // PAGE)


def usage() -> np.ndarray:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    moved = int(fields["rchar"]), int(fields["wchar"])
    return np.array([time.process_time(), *moved, COUNTS[True], COUNTS[False]])


def peak() -> float:
    """The most resident memory of this process so far, in MB; ru_maxrss is its parent's, where that had more."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


class Record(NamedTuple):
    """Of a task."""

    units: float
    used: np.ndarray
    peak: float  # of its worker so far


class Phase(NamedTuple):
    label: str
    name: str  # of the tasks' function
    records: list[Record]
    before: np.ndarray  # what the driver has used since the phase before
    during: np.ndarray


def measured(function: Callable, task: Any) -> Record:
    """Runs a task; returns its units, and what it has used."""
    count_requests()
    begin = usage()
    function(task)
    used, name = usage() - begin, function.__name__
    assert tuple(used[SERIAL:]) == requests(name, task), f"{name}: {used[SERIAL:]} requests, not {requests(name, task)}"
    return Record(units(name, task), used, peak())


class Recorder(Engine):
    """An engine whose tasks return a Record, by `run`."""

    def __init__(self, executor: Any, workers: int, run: Callable[[Callable, Any], Record]):
        super().__init__(executor, workers)
        count_requests()
        self._run, self._mark = run, usage()
        self.phases: list[Phase] = []
        self.blocks = 0  # of the shards

    def each(self, function: Callable, items: list, *, label: str) -> Iterator[tuple[int, None]]:
        if not items:
            return
        self.blocks += sum(len(task.parts) for task in items) if function.__name__ == "write_shard" else 0
        begin, records = usage(), {}
        for index, record in super().each(functools.partial(self._run, function), items, label=label):
            records[index] = record
            yield index, None
        self.add(label, function.__name__, [records[index] for index in range(len(items))], begin)

    def add(self, label: str, name: str, records: list[Record], begin: np.ndarray) -> None:
        now = usage()
        self.phases.append(Phase(label, name, records, begin - self._mark, now - begin))
        self._mark = now


def make_text(folder: Path, megabytes: float) -> Path:
    """Writes docstrings as JSON lines, again and again with another beginning, if they are not there."""
    file, left = folder / f"{megabytes:g}.jsonl", megabytes * 1e6
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        texts = [text for part in docstrings.parts() for _, text in docstrings.read(part)]
        documents = (f"{copy} {text}" if copy else text for copy in itertools.count() for text in texts)
        with file.with_suffix(".new").open("w") as out:
            while left > 0:
                left -= out.write(json.dumps({"text": next(documents)}) + "\n")
        file.with_suffix(".new").rename(file)
    return file


def write_shards(folder: Path, text: Path, counts: dict[str, int], workers: int) -> tuple[Manifest, list[Phase]]:
    """Writes the shards of real text, and removes them; returns their manifest, and what was used."""
    target, words = folder / f"{text.stem}-{workers}", folder / "tokenizer"
    shutil.rmtree(target, ignore_errors=True)
    if not words.exists():
        texts = (json.loads(line)["text"] for line in itertools.islice(text.open(), 50_000))
        options = {"kind": "bpe", "vocab_size": VOCABULARY, "lowercase": False}
        tokenizer.train(texts, **options, length=LENGTH, folder=str(words))
    corpus = corpus_of((f"jsonl:{text}",), validation_fraction=VALIDATION)
    with process_pool(workers) as pool:
        engine, settings = Recorder(pool, workers, measured), shards.Settings(LENGTH, counts)
        names = {"tokenizer_folder": str(words), "folder": str(target / "shards"), "source": text.name}
        made = shards.write(corpus, settings, engine=engine, **names)
        engine.add("", "", [], usage())
    shutil.rmtree(target)
    return made, engine.phases


def fresh(function: Callable, *args: Any) -> Any:
    """Calls a function in a process of its own."""
    with process_pool(1) as pool:
        return pool.submit(function, *args).result()


def of_corpus(folder: Path, megabytes: float, workers: int) -> str:
    """Returns what a real corpus moves and takes, as a line."""
    text, begin = make_text(folder, megabytes), peak()
    _, phases = write_shards(folder, text, {"train": 64, "validation": 8}, workers)
    records, size = [record for phase in phases for record in phase.records], text.stat().st_size
    tasks, driver = sum(each.used for each in records), sum(phase.before + phase.during for phase in phases)
    return (
        f"{size / 1e6:.0f} MB, {workers} workers, {len(records)} tasks. Bytes read and written for each byte of text: "
        f"{tasks[READ] / size:.3f} and {tasks[WRITTEN] / size:.3f} by tasks, {driver[READ] / size:.3f} and "
        f"{driver[WRITTEN] / size:.3f} by the driver. Processor seconds for each GB: {tasks[SECONDS] / size * 1e9:.0f} "
        f"of tasks, {driver[SECONDS] / size * 1e9:.2f} of the driver. Peak memory: {peak():.0f} MB of the driver, "
        f"{begin:.0f} before it began, {max(record.peak for record in records):.0f} MB of the largest worker."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    fresh(make_text, args.folder, args.megabytes)  # the texts' memory is not the driver's
    for workers in args.workers:
        print(fresh(of_corpus, args.folder, args.megabytes, workers), flush=True)


if __name__ == "__main__":
    main()
