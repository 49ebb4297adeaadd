"""Measures what writing shards costs: processor time, bytes and memory of the tasks and of the driver, on Linux.

    python -m mlm.bench.task_costs --megabytes=40 --workers 1 4 16

The corpus is docstrings as JSON lines, repeated with another beginning where it is larger than they are; --folder keeps
it, for the next call.
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Self

from mlm import config as configs
from mlm.data import docstrings, shards, tokenizer
from mlm.data.corpus import Corpus
from mlm.engine.engine import Engine, process_pool

VOCABULARY, LENGTH = 50_265, 512
COUNTS = {"train": 64, "validation": 8}
FOLDER = Path(tempfile.gettempdir(), "mlm_task_costs")


class Usage(NamedTuple):
    """Of this process so far, or of a task."""

    seconds: float  # of the processor
    read: int  # bytes, files and pipes
    written: int

    @classmethod
    def now(cls) -> Self:
        """Returns what this process has used."""
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return cls(time.process_time(), int(fields["rchar"]), int(fields["wchar"]))

    def since(self, begin: "Usage") -> "Usage":
        """Returns what was used after `begin`."""
        return Usage(*(after - before for after, before in zip(self, begin, strict=True)))


def peak_megabytes() -> float:
    """Returns the most resident memory of this process so far; ru_maxrss is its parent's, where that had more."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def measured(function: Callable, task: Any) -> tuple[Usage, float]:
    """Runs a task; returns what it has used, and the peak memory of its process so far."""
    begin = Usage.now()
    function(task)
    return Usage.now().since(begin), peak_megabytes()


class MeasuredTasks(Engine):
    """An engine that keeps what its tasks use."""

    def __init__(self, executor: Any, workers: int):
        super().__init__(executor, workers)
        self.usages: list[Usage] = []
        self.peak = 0.0

    def each(self, function: Callable, items: Sequence, *, label: str) -> Iterator[tuple[int, None]]:
        """Runs the tasks, whose results are files."""
        for index, (usage, peak) in super().each(function, items, label=label):
            self.usages.append(usage)
            self.peak = max(self.peak, peak)
            yield index, None

    def _submit(self, function: Callable, item: Any) -> Future:
        return self._executor.submit(measured, function, item)


def prepare(file: Path, megabytes: float) -> None:
    """Writes docstrings as JSON lines, again and again with another beginning, and a tokenizer, if they are missing."""
    folder, left = file.parent, megabytes * 1e6
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        texts = [text for part in docstrings.parts() for _, text in docstrings.read(part)]
        documents = (f"{copy} {text}" if copy else text for copy in itertools.count() for text in texts)
        with file.with_suffix(".new").open("w") as out:
            while left > 0:
                left -= out.write(json.dumps({"text": next(documents)}) + "\n")
        file.with_suffix(".new").rename(file)
    if not (folder / "tokenizer").exists():
        with file.open() as lines:
            texts = [json.loads(line)["text"] for line in itertools.islice(lines, 50_000)]
        target = str(folder / "tokenizer")
        tokenizer.train(texts, kind="bpe", vocab_size=VOCABULARY, lowercase=False, length=LENGTH, folder=target)


def write_shards(text: Path, workers: int) -> MeasuredTasks:
    """Writes the shards of a text, and removes them; returns their engine."""
    target = text.with_name(f"{text.stem}-{workers}")
    shutil.rmtree(target, ignore_errors=True)
    config = configs.load(str(configs.BASE), [f"corpus.sources=jsonl:{text}"])
    with process_pool(workers) as pool:
        engine = MeasuredTasks(pool, workers)
        shards.write(
            Corpus.from_config(config.corpus),
            shards.Settings(LENGTH, COUNTS),
            tokenizer_folder=str(text.with_name("tokenizer")),
            folder=str(target / "shards"),
            source=text.name,
            engine=engine,
        )
    shutil.rmtree(target)
    return engine


def costs(text: Path, workers: int) -> str:
    """Returns what the shards of a corpus cost, as a line."""
    begin, peak_before = Usage.now(), peak_megabytes()
    engine = write_shards(text, workers)
    size, driver = text.stat().st_size, Usage.now().since(begin)
    tasks = Usage(*map(sum, zip(*engine.usages, strict=True)))
    return (
        f"{size / 1e6:.0f} MB, {workers} workers, {len(engine.usages)} tasks. Bytes read and written per byte of text: "
        f"{tasks.read / size:.3f} and {tasks.written / size:.3f} by tasks, {driver.read / size:.3f} and "
        f"{driver.written / size:.3f} by the driver. Processor seconds per GB: {tasks.seconds / size * 1e9:.0f} "
        f"of tasks, {driver.seconds / size * 1e9:.2f} of the driver. Peak memory: {peak_megabytes():.0f} MB of the "
        f"driver, {peak_before:.0f} before it began, {engine.peak:.0f} MB of the largest worker."
    )


def in_new_process(function: Callable, *args: Any) -> Any:
    """Calls a function in a process of its own, whose peak memory is that of the call."""
    with process_pool(1) as pool:
        return pool.submit(function, *args).result()


def main() -> None:
    """Prints a line for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    text = args.folder / f"{args.megabytes:g}.jsonl"
    in_new_process(prepare, text, args.megabytes)  # the texts' memory is not the driver's
    for workers in args.workers:
        print(in_new_process(costs, text, workers), flush=True)


if __name__ == "__main__":
    from mlm.bench import task_costs  # by its name, under which the workers find its functions

    task_costs.main()
