"""Where this process is, why it ended, and whether it hangs: in files that outlive it. Without jax.

    progress.json   where it was last: step, phase, time
    cause.json      why it ended other than with 0: the first reason alone, never replaced
    stacks.txt      the stacks of all threads, on a hang or a fatal signal

They lie in $MLM_HOST_DIR, or in {workdir}/hosts/{process} if the run has several processes; a single process without
that variable leaves none of them, and is not watched for hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mlm.errors import InputError, PreemptedError, StopError
from mlm.paths import UPath
from mlm.pod import ports
from mlm.pod.client import Client
from mlm.pod.messages import Termination

TICK = 0.5  # seconds
ONCE_A_RUN = ("start", "compile", "save")  # phases that have no beat of their own: they may take
PATIENCE = 4  # times as long as config.pod.hang, that is
HEAR = 2.0  # seconds in which a crash waits to hear whether it is only the consequence of another host's end
Item = TypeVar("Item")


class Watch:
    """What one process notes of itself. `at` is cheap: a thread does the rest."""

    def __init__(self, name: str, folder: Path | None, *, process: int = 0, processes: int = 1):
        """Starts to watch.

        Args:
          name: of the command.
          folder: for the files above, made when its parent is there; None for nowhere.
          process, processes: its number, and how many there are.
        """
        self.name, self.process, self.processes = name, process, processes
        self.peers: Client | None = None
        self._folder, self._host = folder, socket.gethostname()
        self._workdir = ""
        self._place: tuple[str, int | None, float, float] = ("start", None, time.monotonic(), time.time())
        self._hang = self._heartbeat = 0.0
        self._asked: tuple[str, float] | None = None  # to end: the signal's name, and when
        self._lock, self._files = threading.RLock(), threading.RLock()
        self._ended = False  # the first reason is known
        self._over = False  # all is done
        self._stacks: Any = None
        self._thread = None if folder is None else threading.Thread(target=self._run, daemon=True, name="watch")
        if self._thread is not None:
            self._thread.start()

    def connect(self, coordinator: str) -> None:
        """Opens the line to the other processes, if there are any; raises InputError as `Client`, or without one."""
        alone = (self.processes, self.process) == (1, 0) or self.name == "shards"  # its hosts meet in a folder
        if not coordinator and not alone:
            raise InputError("--processes, --process-id: need --coordinator=HOST:PORT, the address of process 0.")
        if not 0 <= self.process < self.processes:
            number, last = self.process, self.processes - 1
            raise InputError(f"--process-id={number}: must be from 0 to {last} (--processes={self.processes}).")
        if coordinator:
            where = ports.address(coordinator, 8474)
            token = UPath(self._workdir or ".") / "hosts" / "token"
            waits = {"jax_port": where[1] + 2, "start_timeout": 600.0}
            self.peers = Client(where, self.processes, self.process, self._peer_ended, token=token, **waits)

    def arm(self, *, hang: float, heartbeat: float) -> None:
        """Sets the seconds without progress after which the process ends itself, and those without any sign of life."""
        self._hang, self._heartbeat = hang, heartbeat
        self.at("start")

    def at(self, phase: str, step: int | None = None) -> None:
        """Notes that the process has come to a phase of a step (see `messages.PHASES`)."""
        self._place = (phase, step, time.monotonic(), time.time())

    def beats(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items; each one is progress in the phase that it comes in."""
        for item in items:
            self.at(*self._place[:2])
            yield item

    def wait_for_all(self, name: str) -> None:
        """Waits until every process has come here, however long it takes; nothing in a single one."""
        if self.peers is not None:
            hang, self._hang = self._hang, 0.0
            self.peers.barrier(name)
            self.at(*self._place[:2])
            self._hang = hang

    def asked(self, signal_name: str) -> None:
        """Notes that this process, not another one, was asked to end."""
        self._asked = self._asked or (signal_name, time.time())

    def end(self, code: int) -> int:
        """Leaves the run in good order; returns the code."""
        if code == 0:
            self.at("done", self._place[1])
            self.wait_for_all("done")
        self._over = True
        self._write_progress()
        if self.peers is not None:
            if "jax" in sys.modules:  # it waits for the other processes, and they are still watched
                sys.modules["jax"].distributed.shutdown()
            self.peers.close()
        self._close_stacks()
        return code

    def failed(self, error: BaseException, code: int) -> int:
        """Writes down why the process ends, and tells the others; returns the exit code.

        One of several processes does not return: what jax does at the exit of Python waits for the others.
        """
        if self.peers is not None and not isinstance(error, StopError | KeyboardInterrupt):
            time.sleep(HEAR)  # a collective breaks when another host dies: then `_peer_ended` ends this process
        what, kind, when = str(error) or type(error).__name__, "exception", time.time()
        if isinstance(error, PreemptedError | KeyboardInterrupt):
            name, when = self._asked or ("", when)
            kind = "signal" if name or isinstance(error, KeyboardInterrupt) else "peer"
            what = f"{name or 'Ctrl-C'}: {what}" if kind == "signal" else what
        foreseen = isinstance(error, StopError | KeyboardInterrupt)
        text = "" if foreseen else "".join(traceback.format_exception(error))
        self._note(kind, code, what if foreseen else f"{type(error).__name__}: {what.splitlines()[0]}", text, when)
        if isinstance(error, PreemptedError):
            return self.end(code)  # all have agreed on it
        self._tell(kind, code, what)
        return code

    def stopped(self, signal_name: str) -> NoReturn:
        """Ends at once, for a signal that came where there is nothing to save."""
        self.asked(signal_name)
        what = f"{signal_name}: stopped before there was anything to save"
        self._note("signal", PreemptedError.code, what)
        self._tell("signal", PreemptedError.code, what)
        _exit(PreemptedError.code)

    def _tell(self, kind: str, code: int, what: str) -> None:
        if self.peers is not None:
            phase, step, *_ = self._place
            self.peers.notify(Termination(self.process, self._host, kind, code, what, step, phase))
            _exit(code)

    def _peer_ended(self, end: Termination) -> None:
        """Ends this process since the run has ended; called in a thread, whatever the main one is at."""
        own = end.process == self.process and end.kind in ("exception", "signal", "hang")
        what = end.what if own else end.sentence
        if self._note(end.kind if own else "peer", end.code, what, of=None if own else end):
            print(f"mlm {self.name}: {what}", file=sys.stderr, flush=True)
            self.peers.leave()
            _exit(end.code)

    def _run(self) -> None:
        written = None
        while not (self._ended or self._over):
            if self._place != written:
                written = self._place
                self._write_progress()
            phase, _, begin, _ = self._place
            limit = self._hang * (PATIENCE if phase in ONCE_A_RUN else 1)
            if limit and time.monotonic() - begin > limit:
                self._hung(phase, limit)
            if self._heartbeat and self._stacks:  # where no Python thread runs, not even this one, C ends the process
                faulthandler.dump_traceback_later(self._heartbeat, exit=True, file=self._stacks)
            time.sleep(TICK)
        faulthandler.cancel_dump_traceback_later()  # the end of Python may take longer

    def _hung(self, phase: str, limit: float) -> None:
        what = f"no progress for {limit:g} s (config.pod.hang{f' times {PATIENCE}' * (phase in ONCE_A_RUN)})"
        if self._open_stacks():
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        if self._note("hang", 1, what):
            print(f"mlm {self.name}: {what}, in {phase}; see stacks.txt in {self._folder}", file=sys.stderr)
            self._tell("hang", 1, what)
            _exit(1)

    def _note(
        self, kind: str, code: int, what: str, text: str = "", when: float | None = None, of: Termination | None = None
    ) -> bool:
        """Writes cause.json; returns whether this is the first reason. `of`: the end of another process, if it is."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
        phase, step, *_ = self._place
        self._write_progress()
        who = {"host": self._host, "process": self.process, "step": step, "phase": phase}
        why = {"kind": kind, "time": when or time.time(), "code": code, "what": what, "traceback": text}
        self._write("cause.json", why | who | ({} if of is None else {"of": dataclasses.asdict(of)}))
        return True

    def _write_progress(self) -> None:
        with self._files:  # an older place must not replace a newer one
            phase, step, _, when = self._place
            place = {"step": step, "phase": phase, "time": when}
            self._write("progress.json", place | {"process": self.process, "host": self._host, "pid": os.getpid()})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with self._files, contextlib.suppress(OSError):
            if self._open_stacks():
                temporary = self._folder / f".{name}"
                temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
                temporary.replace(self._folder / name)

    def _open_stacks(self) -> bool:
        """Makes the folder as soon as that can be, without what an earlier run left; returns whether it is there."""
        if self._stacks is None and self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.parent.mkdir(exist_ok=True)
                self._folder.mkdir(exist_ok=True)
                for name in ("progress.json", "cause.json"):
                    (self._folder / name).unlink(missing_ok=True)
                self._stacks = (self._folder / "stacks.txt").open("w")
                faulthandler.enable(self._stacks, all_threads=True)
        return self._stacks is not None

    def _close_stacks(self) -> None:
        if self._thread is not None:
            self._thread.join(2 * TICK)
        if self._stacks is not None and not self._stacks.tell():
            with contextlib.suppress(OSError):
                (self._folder / "stacks.txt").unlink()


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


current = Watch("", None)


def begin(name: str, workdir: str, *, processes: int, process: int) -> Watch:
    """Starts the watch of this process."""
    global current
    told = os.environ.get("MLM_HOST_DIR", "")
    folder = Path(told) if told else None
    if not told and processes > 1 and workdir and "://" not in workdir:
        folder = Path(workdir) / "hosts" / str(process)
    current = Watch(name, folder, process=process, processes=processes)
    current._workdir = workdir
    return current


def at(phase: str, step: int | None = None) -> None:
    """Notes where this process is; see `Watch.at`."""
    current.at(phase, step)


def beats(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items; see `Watch.beats`."""
    return current.beats(items)
