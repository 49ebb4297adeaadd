"""Tasks on a process pool or a Dask cluster: module-level functions on picklable arguments."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TypeVar

from tqdm import tqdm

from mlm.cluster import watch
from mlm.errors import PreemptedError, StopError
from mlm.paths import refusing
from mlm.text import can_draw

AGAIN = "start the same command again: what is written is kept."
# tasks for each worker that are submitted and not finished: the driver's memory is that of these
AHEAD = 3
# of a task: processes are the parallelism
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
Item = TypeVar("Item")
Result = TypeVar("Result")


class _Process(SpawnProcess):
    """A spawned process that does not import the script: a researcher's file would run its command again."""

    def start(self) -> None:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = script


class Spawn(SpawnContext):
    """How worker processes start; what they run stands in modules of the package."""

    Process = _Process


class Engine:
    """Runs tasks: module-level functions on picklable arguments, in a process pool or on a Dask cluster."""

    def __init__(self, executor: concurrent.futures.Executor | None, workers: int):
        self._executor = executor
        self.workers = workers

    def each(
        self, function: Callable[[Item], Result], items: Sequence[Item], *, label: str
    ) -> Iterator[tuple[int, Result]]:
        """Runs function(item) for each item; yields (index, result) as they finish.

        Raises the first error of a task as it was, PreemptedError if a worker was killed; then submits no other task.
        """
        if not len(items):
            return
        finished: queue.SimpleQueue[concurrent.futures.Future] = queue.SimpleQueue()
        pending: dict[concurrent.futures.Future, int] = {}
        numbers = iter(range(len(items)))
        watch.progress(watch.TASKS)
        is_hidden = not can_draw(sys.stderr)
        try:
            with tqdm(total=len(items), desc=label, unit=" tasks", disable=is_hidden) as bar:
                while True:
                    room = max(0, AHEAD * self.workers - len(pending))
                    for number in itertools.islice(numbers, room):
                        task = self._submit(function, items[number])
                        pending[task] = number
                        task.add_done_callback(finished.put)
                    if not pending:
                        return
                    task = finished.get()
                    number = pending.pop(task)
                    result = task.result()
                    del task  # the result is the caller's alone
                    watch.progress(watch.TASKS)
                    bar.update()
                    yield number, result
        except Exception as error:
            if (known := self._known(error, label)) is None:
                raise
            raise known from None
        finally:
            watch.progress(watch.UNTIMED)

    def _submit(self, function: Callable[[Item], Result], item: Item) -> concurrent.futures.Future:
        return self._executor.submit(function, item)

    def _known(self, error: Exception, label: str) -> StopError | None:
        """Returns what an error of the engine means, None for one of a task."""
        if isinstance(error, concurrent.futures.BrokenExecutor):
            why = "perhaps for want of memory (fewer workers need less: config.shards.workers)"
            return PreemptedError(f"{label}: a worker process was killed, {why}; {AGAIN}")
        return None


@contextlib.contextmanager
def open_pool(workers: int = 0) -> Iterator[Engine]:
    """Yields an engine on `workers` processes of this machine; 0: one per core."""
    workers = workers or available_cores()
    with process_pool(workers) as pool:
        yield Engine(pool, workers)


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[concurrent.futures.Executor]:
    """Yields a pool of processes of one thread, which start with the first tasks and end with this one."""
    before = set(multiprocessing.active_children())
    with refusing(
        "worker processes can't share semaphores", "mount a /dev/shm that can be written"
    ):
        pool = concurrent.futures.ProcessPoolExecutor(workers, Spawn(), _start_worker)
    try:
        yield pool
    # an error or Ctrl-C does not wait for what runs: a task writes its file whole or not at all
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def available_cores() -> int:
    """Returns the cores that this process may use."""
    # macOS
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group, and the parent ends us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ |= ONE_THREAD
    # its own is a semaphore, which Python reports as leaked if we are terminated
    tqdm.set_lock(threading.RLock())


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # otherwise a worker whose parent was killed would wait for work forever
