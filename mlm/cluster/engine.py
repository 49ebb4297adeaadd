"""Tasks on a process pool or a Dask cluster: module-level functions on picklable arguments."""

import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from tqdm import tqdm

from mlm.cluster import watch
from mlm.errors import PreemptedError, StopError

AGAIN = "start the same command again: what is written is kept."
AHEAD = 3  # tasks for each worker that are submitted and not finished: the driver's memory is that of these
Item, Result = TypeVar("Item"), TypeVar("Result")


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
        self._executor, self.workers = executor, workers

    def each(
        self, function: Callable[[Item], Result], items: Sequence[Item], *, label: str
    ) -> Iterator[tuple[int, Result]]:
        """Runs function(item) for each item; yields (index, result) as they finish.

        Raises the first error of a task as it was, PreemptedError if a worker was killed; then begins no other task.
        """
        if not len(items):
            return
        finished: queue.SimpleQueue[concurrent.futures.Future] = queue.SimpleQueue()
        pending: dict[concurrent.futures.Future, int] = {}
        numbers = iter(range(len(items)))
        watch.progress(watch.TASKS)
        try:
            with tqdm(total=len(items), desc=label, unit=" tasks", disable=not sys.stderr.isatty()) as bar:
                while True:
                    for number in itertools.islice(numbers, max(0, AHEAD * self.workers - len(pending))):
                        task = self._submit(function, items[number])
                        pending[task] = number
                        task.add_done_callback(finished.put)
                    if not pending:
                        return
                    task = finished.get()
                    number, result = pending.pop(task), task.result()
                    del task  # the result is the caller's alone
                    watch.progress(watch.TASKS)
                    bar.update()
                    yield number, result
        except Exception as error:
            if (known := self._known(error, label)) is None:
                raise
            raise known from None
        finally:
            self._cancel(pending)
            watch.progress(watch.UNTIMED)

    def _submit(self, function: Callable[[Item], Result], item: Item) -> concurrent.futures.Future:
        return self._executor.submit(function, item)

    def _cancel(self, tasks: Collection[concurrent.futures.Future]) -> None:
        """Cancels tasks; a pool does that when it is closed, and until then runs the few that are submitted."""

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
    before, spawn = set(multiprocessing.active_children()), Spawn()
    try:
        spawn.Lock()
    except (OSError, ImportError):  # semaphores need a writable /dev/shm, which some containers lack
        pool = _PipePool(workers)
    else:
        pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, _start_worker)
    try:
        yield pool
    except BaseException:  # an error or Ctrl-C does not wait for what runs: a task writes its file whole or not at all
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class _PipePool(concurrent.futures.ThreadPoolExecutor):
    """A process pool without semaphores: each thread has a process of its own, and a pipe to it."""

    def __init__(self, workers: int):
        super().__init__(workers)
        self._local, self._pipes, self._starting = threading.local(), [], threading.Lock()

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        """Runs function(*args, **kwargs) in a process; BrokenExecutor if that process is killed."""
        return super().submit(self._ask, functools.partial(function, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            for pipe in self._pipes:
                pipe.close()  # which ends its process

    def _ask(self, task: Callable[[], Any]) -> Any:
        if not hasattr(self._local, "pipe"):
            self._local.pipe, end = multiprocessing.Pipe()
            self._pipes.append(self._local.pipe)
            with self._starting:
                _Process(target=_serve, args=(end,), daemon=True).start()
            end.close()
        try:
            self._local.pipe.send(task)
            result, error = self._local.pipe.recv()
        except (EOFError, ConnectionError):
            raise concurrent.futures.BrokenExecutor("a worker process ended") from None
        if error is not None:
            raise error
        return result


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    """Runs the tasks that come through a pipe until it is closed."""
    _start_worker()
    with contextlib.suppress(EOFError):
        while True:
            task = pipe.recv()
            try:
                answer = task(), None
            except BaseException as error:
                if not isinstance(error, StopError):
                    error.add_note(traceback.format_exc())  # pickle drops the traceback
                answer = None, error
            pipe.send(answer)


def available_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS


def _start_worker() -> None:
    """Initializes a worker process; it uses one thread, since the processes are the parallelism."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group, and the parent ends us
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # otherwise a worker whose parent was killed would wait for work forever
