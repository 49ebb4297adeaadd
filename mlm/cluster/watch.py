"""Where this process is, whether it hangs, and why it ended: in files that outlive it. Without jax.

    progress.json   the last step, phase and time
    cause.json      why it ended with another code than 0: the first reason, never replaced

They lie in $MLM_HOST_DIR, or in {workdir}/hosts/{process} if the run has several processes and a local workdir. After a
hang or a fatal signal the stacks of all threads are on stderr. A single process is watched only if it has a TPU, or
$MLM_HOST_DIR is set.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ml_collections import ConfigDict

from mlm import platforms
from mlm.cluster.detect import Cluster
from mlm.cluster.termination import Termination
from mlm.errors import PreemptedError, StopError
from mlm.paths import is_remote, write_text
from mlm.text import printable, say

if TYPE_CHECKING:  # which imports jax
    from mlm.cluster.service import Service

STDERR = 2  # the process's: in a notebook, sys.stderr is no file
# What asks a process to save and to end: a preemption, a terminal that is gone, Slurm's warning before its time is up.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
INTERVAL = 0.5  # seconds between two checks of the thread
UNTIMED = "data"  # the phase of tokenizer and shards, but for their tasks:
TASKS = "tasks"  # each one that is finished is progress
SLOW_PHASES = ("start", "compile", "save")  # they report no progress of their own, and so may take
SLOW_FACTOR = 4  # times as long as config.pod.hang
CAUSE_WAIT = 2.0  # seconds that a crash waits for the news that another process failed first
# jax's errors that no other process can cause
OF_THIS_PROCESS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
Item = TypeVar("Item")


class Position(NamedTuple):
    """A phase (see `termination.PHASES`) of a step, since when by the clock that nobody sets, and by the other one."""

    phase: str
    step: int | None
    since: float
    time: float


class Watch:
    """The progress and the end of this process. A thread writes the files and notices a hang."""

    def __init__(self, command: str, folder: Path | None):
        self.command = command
        self.cluster = Cluster()
        self.service: Service | None = None
        self.at_end: Callable[[], object] = lambda: None  # called before this process ends at once
        self._folder = folder
        self._host = printable(socket.gethostname())
        self._hang = 0.0
        self._heartbeat = 0.0
        self._signal: tuple[str, float] | None = None  # that asked this process to end, and when
        self._lock = threading.RLock()  # of the files and of the first reason
        self._ended = False  # and the first reason is known
        self._done = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self.progress("start")

    def join(self, cluster: Cluster, workdir: str, pod: ConfigDict) -> None:
        """Starts to watch this process, and meets the others; raises as `Service`."""
        self.cluster = cluster
        several = cluster.processes > 1
        if self._folder is None and several and workdir and not is_remote(workdir):
            self._folder = Path(workdir) / "hosts" / str(cluster.process_id)
        if self._folder is not None:  # what an earlier run left
            with contextlib.suppress(OSError):
                (self._folder / "cause.json").unlink(missing_ok=True)
        if self._folder is not None or several or platforms.is_here("tpu"):
            faulthandler.enable(STDERR)
            self._thread.start()
        if several and cluster.coordinator:
            from mlm.cluster.service import Service

            self.service = Service(cluster, pod, self._run_ended)
        self.set_limits(hang=pod.hang, heartbeat=0.0)

    def set_limits(self, *, hang: float, heartbeat: float) -> None:
        """Sets the seconds without progress, and without any Python thread running, after which the process ends."""
        self._hang = hang
        self._heartbeat = heartbeat
        self.progress("start")

    def progress(self, phase: str, step: int | None = None) -> None:
        """Notes that the process has come to a phase of a step (see `termination.PHASES`)."""
        self._position = Position(phase, step, time.monotonic(), time.time())

    @property
    def step(self) -> int | None:
        """The last step that the process came to; None before the first one of this start."""
        return self._position.step

    @property
    def phase(self) -> str:
        """The phase of it, see `termination.PHASES`."""
        return self._position.phase

    def barrier(self, name: str) -> None:
        """Waits until every process has come here, however long it takes."""
        if self.service is not None:
            phase = self.phase
            self.progress(UNTIMED, self.step)
            self.service.barrier(name)
            self.progress(phase, self.step)

    def signaled(self, number: int) -> None:
        """Notes that a signal asked this process, not another one, to end."""
        self._signal = self._signal or (signal.Signals(number).name, time.time())
        if number == signal.SIGHUP:
            _leave_terminal()

    def end(self, code: int) -> int:
        """Leaves the run in good order; returns the code."""
        self._done = True
        if code == 0:
            self.progress("done", self.step)
        self._write_progress()
        if self.service is not None:
            self.service.close()
        if self._thread.is_alive():
            self._thread.join(2 * INTERVAL)
        return code

    def failed(self, error: BaseException, code: int) -> int:
        """Records why the process ends, notifies the others, and exits if there are any; returns the exit code."""
        self._hang = 0.0  # while it waits here
        what = str(error) or type(error).__name__
        if not isinstance(error, StopError | KeyboardInterrupt):
            what = f"{type(error).__name__}: {what.splitlines()[0]}"
            if self.service is not None:
                # a collective breaks when another process dies: jax ends this one
                if _is_of_jax(error):
                    self.service.wait_for_end()
                time.sleep(CAUSE_WAIT)
        end = self._termination("exception", code, what)
        is_agreed = isinstance(error, PreemptedError) and self.phase not in (UNTIMED, TASKS)
        if is_agreed or isinstance(error, KeyboardInterrupt):
            name, when = self._signal or ("Ctrl-C", end.time)
            end = dataclasses.replace(end, kind="signal", time=when, what=f"{name}: {what}")
        if is_agreed:  # by all processes, of which one was asked
            if self._signal is not None:
                self._record(end)
            return self.end(code)
        self._record(end)
        if self.cluster.processes > 1:  # Python's own exit would wait in jax for the others
            self._leave(end, "")
        return code

    def end_now(self, kind: str, what: str, message: str, code: int = PreemptedError.code) -> None:
        """Prints the message and ends the process at once, from any thread, unless it ends already."""
        end = self._termination(kind, code, what)
        if self._record(end):
            self._leave(end, message)

    def _run_ended(self, cause: Termination) -> None:
        """Ends this process because the run has ended; called in a thread, whatever the main one is doing."""
        if self._record(cause):
            self._leave(cause, cause.sentence)

    def _termination(self, kind: str, code: int, what: str) -> Termination:
        process = self.cluster.process_id
        now = time.time()
        return Termination(process, self._host, kind, code, what, now, self.step, self.phase)

    def _leave(self, end: Termination, message: str) -> NoReturn:
        """Prints the message, notifies the other processes and ends this one: jax's own exit waits for the others."""
        try:
            if message:
                say(f"mlm {self.command}: {message}")
            if self.service is not None:
                self.service.notify(end)
            self.at_end()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(end.code)

    def _run(self) -> None:
        written = None
        while not (self._ended or self._done):
            position = self._position
            if position != written:
                written = position
                self._write_progress()
            factor = SLOW_FACTOR if position.phase in SLOW_PHASES else 1
            limit = self._hang * factor
            if limit and position.phase != UNTIMED and time.monotonic() - position.since > limit:
                self._hung(f"no progress for {limit:g} s ({factor} times config.pod.hang)")
            if self._heartbeat:  # if no Python thread runs, not even this one, C ends the process
                faulthandler.dump_traceback_later(self._heartbeat, exit=True, file=STDERR)
            time.sleep(INTERVAL)
        faulthandler.cancel_dump_traceback_later()  # Python's own exit may take longer

    def _hung(self, what: str) -> None:
        faulthandler.dump_traceback(STDERR)
        message = f"{what}, in {self.phase}; see the stacks above"
        self.end_now("hang", what, message, 1)

    def _record(self, end: Termination) -> bool:
        """Writes cause.json, unless another reason came first; returns whether it did."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
            self._write_progress()
            self._write("cause.json", dataclasses.asdict(end))
        return True

    def _write_progress(self) -> None:
        with self._lock:  # an older position must not replace a newer one
            position = {"step": self.step, "phase": self.phase, "time": self._position.time}
            self._write("progress.json", position)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.parent.mkdir(exist_ok=True)  # once there is a workdir
                self._folder.mkdir(exist_ok=True)
                write_text(self._folder / name, json.dumps(content) + "\n")


def _is_of_jax(error: BaseException) -> bool:
    """Returns whether jax's runtime raised an error: a lost process may be the reason."""
    name = type(error).__name__
    return name == "JaxRuntimeError" and not str(error).startswith(OF_THIS_PROCESS)


def _leave_terminal() -> None:
    """Lets what is still printed to a terminal that is gone, where each word would be an error, go nowhere."""
    for descriptor in (1, STDERR):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


current = Watch("", None)


def begin(command: str) -> Watch:
    """Starts to watch this process."""
    global current
    folder = os.environ.get("MLM_HOST_DIR")
    current = Watch(command, Path(folder) if folder else None)
    return current


def progress(phase: str, step: int | None = None) -> None:
    """Notes that this process has come to a phase of a step."""
    current.progress(phase, step)


def is_primary() -> bool:
    """Returns whether this is process 0, which writes what is written once."""
    return current.cluster.process_id == 0


def barrier(name: str) -> None:
    """Waits until every process has come here, however long it takes; does nothing in a single process."""
    current.barrier(name)


def with_progress(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items; each one counts as progress in the current phase."""
    for item in items:
        current.progress(current.phase, current.step)
        yield item


@contextlib.contextmanager
def handling(handler: Callable, *numbers: int, restores: bool = True) -> Iterator[None]:
    """Handles signals; then whoever handled them before does so again. Python allows it in the main thread alone.

    One that is ignored stays so: nohup has SIGHUP ignored.
    """
    old = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        old = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, before in old.items() if restores else ():
            signal.signal(number, before)
