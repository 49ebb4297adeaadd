"""Where this process is, why it ended, and whether it hangs: in files that outlive it. Without jax.

    progress.json   where it was last: step, phase, time
    cause.json      why it ended other than with 0: the first reason alone, never replaced
    stacks.txt      the stacks of all threads, on a hang or a fatal signal

They lie in $MLM_HOST_DIR, or in {workdir}/hosts/{process} if the run has several processes and a workdir that is no
bucket; without such a folder the stacks go to stderr. A single process is watched for hangs where it has a TPU, or that
variable.
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

from ml_collections import ConfigDict

from mlm.cluster import detect, ports
from mlm.cluster.client import Client
from mlm.cluster.detect import Cluster
from mlm.cluster.messages import Termination
from mlm.errors import InputError, PreemptedError, StopError
from mlm.paths import UPath

TICK = 0.5  # seconds
UNTIMED = "data"  # the phase of tokenizer and shards, whose hosts have config.shards.patience with one another
ONCE_A_RUN = ("start", "compile", "save")  # phases that have no beat of their own: they may take
PATIENCE = 4  # times as long as config.pod.hang, that is
HEAR = 2.0  # seconds in which a crash waits to hear whether it is only the consequence of another host's end
Item = TypeVar("Item")


class Watch:
    """What one process notes of itself. `at` is cheap: a thread does the rest."""

    def __init__(self, name: str, folder: Path | None):
        """Starts to watch.

        Args:
          name: of the command.
          folder: for the files above, made when its parent is there; None for nowhere.
        """
        self.name, self.cluster = name, Cluster()
        self.peers: Client | None = None
        self._folder, self._host = folder, socket.gethostname()
        self._place: tuple[str, int | None, float, float] = ("start", None, time.monotonic(), time.time())
        self._hang = self._heartbeat = 0.0
        self._asked: tuple[str, float] | None = None  # to end: the signal's name, and when
        self._lock, self._files = threading.RLock(), threading.RLock()
        self._ended = False  # the first reason is known
        self._over = False  # all is done
        self._stacks: Any = None
        self._thread: threading.Thread | None = None
        if folder is not None:
            self._start()

    @property
    def process(self) -> int:
        """Which process of the run this is."""
        return self.cluster.process_id

    def join(self, cluster: Cluster, workdir: str, pod: ConfigDict) -> None:
        """Takes the place in the run that was found, and starts to connect to the other processes.

        Raises:
          InputError: a port that can't be used, or as `Client`.
        """
        self.cluster, self._hang = cluster, pod.hang
        several = cluster.processes > 1
        if self._folder is None and several and workdir and "://" not in workdir:
            self._folder = Path(workdir) / "hosts" / str(cluster.process_id)
        if several or detect.tpu_is_attached():
            self._start()
        if several and cluster.coordinator:
            for name in ("port", "jax_port"):
                if pod[name] in detect.libtpu_ports():
                    raise InputError(f"config.pod.{name} = {pod[name]}: libtpu uses this port; choose another one.")
            self.peers = Client(
                ports.address(cluster.coordinator, pod.port),
                cluster.processes,
                cluster.process_id,
                self._peer_ended,
                token=UPath(workdir) / "hosts" / "token",
                jax_port=pod.jax_port,
                start_timeout=pod.start_timeout,
            )

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
            self._thread.start()

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

        One of several processes does not return: jax's own exit waits for the others.
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
            if limit and phase != UNTIMED and time.monotonic() - begin > limit:
                self._hung(phase, limit)
            if self._heartbeat:  # where no Python thread runs, not even this one, C ends the process
                faulthandler.dump_traceback_later(self._heartbeat, exit=True, file=self._stacks or sys.stderr)
            time.sleep(TICK)
        faulthandler.cancel_dump_traceback_later()  # the end of Python may take longer

    def _hung(self, phase: str, limit: float) -> None:
        what = f"no progress for {limit:g} s (config.pod.hang{f' times {PATIENCE}' * (phase in ONCE_A_RUN)})"
        file = self._stacks if self._open_stacks() else sys.stderr
        faulthandler.dump_traceback(file, all_threads=True)
        if self._note("hang", 1, what):
            where = f"stacks.txt in {self._folder}" if self._stacks else "the stacks above"
            print(f"mlm {self.name}: {what}, in {phase}; see {where}", file=sys.stderr, flush=True)
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


def begin(name: str) -> Watch:
    """Starts the watch of this process."""
    global current
    folder = os.environ.get("MLM_HOST_DIR")
    current = Watch(name, Path(folder) if folder else None)
    return current


def progress(phase: str, step: int | None = None) -> None:
    """Notes where this process is; see `Watch.at`."""
    current.at(phase, step)


def is_primary() -> bool:
    """Returns whether this is the process that writes what is written once."""
    return current.process == 0


def barrier(name: str) -> None:
    """Waits until every process has come here; see `Watch.wait_for_all`."""
    current.wait_for_all(name)


def beats(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items; see `Watch.beats`."""
    return current.beats(items)
