"""What process 0 keeps for a run of several processes: the place where each says how it is. Without jax.

Messages are JSON objects, one a line. Of a process:
    {"hello": process, "processes", "host"}            the first
    {"ready": facts, "start_timeout", "heartbeat"}     its config and data are good; see fingerprints.py
    {"barrier": name}, {"failed": End}, {"bye": true}, {"ping": true}
of the hub: {"go": "host:port", for jax}, {"barrier": name}, {"end": End}, {"ping": true}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from mlm.errors import InputError
from mlm.pod import fingerprints

PING = 1.0  # seconds between two signs of life
PATIENCE = 60.0  # heartbeat until that of the config is known
LINGER = 5.0  # seconds for which the last word is waited on: to be heard, or to come
COLLECT = 2.0  # seconds in which several processes may find that they hang, before it is judged which one it was
PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step


@dataclasses.dataclass(frozen=True)
class End:
    """Why a run ends.

    Attributes:
      process, host: whose end it is.
      kind: "exception", "signal", "hang", "gone" (its connection broke) or "silent" (stopped, or cut off).
      code: with which all should exit.
      what: a sentence; of "gone" and "silent", the end of one that begins with the host.
      step, phase: where it was.
    """

    process: int
    host: str
    kind: str
    code: int
    what: str
    step: int | None = None
    phase: str = "start"

    @property
    def sentence(self) -> str:
        """The end, as another process tells it."""
        verb = {"hang": "hung: ", "signal": "was asked to end: ", "exception": "failed: "}.get(self.kind, "")
        return f"host {self.process} ({self.host}) {verb}{self.what}"


class Line:
    """One connection; any thread may send."""

    def __init__(self, connection: socket.socket):
        """Takes the connection over."""
        self._socket = connection
        self._lock = threading.RLock()  # a signal's handler sends too
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.patience(PATIENCE)
        self._file = connection.makefile("rb")

    def patience(self, seconds: float) -> None:
        """Sets the silence after which reading raises TimeoutError."""
        self._socket.settimeout(seconds)

    def send(self, **message: Any) -> None:
        """Sends a message; if the other side is gone it does nothing: who reads will notice."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields messages to the end of the connection; raises OSError or ValueError if it breaks."""
        for line in self._file:
            yield json.loads(line)

    def close(self) -> None:
        """Closes it, for both sides and for the thread that reads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def silence(seconds: float) -> str:
    """Returns what a process has done that has not been heard of."""
    return f"has given no sign of life for {seconds:g} s: it is stopped, or cut off"


@dataclasses.dataclass
class _Member:
    line: Line
    host: str
    facts: dict[str, Any] | None = None
    left: bool = False  # its connection is closed


class Hub:
    """One thread for each connection, one that listens, one that keeps time."""

    def __init__(self, where: tuple[str, int], processes: int):
        """Listens at `where`, on no other interface; raises InputError if that can't be."""
        self._where, self._processes = where, processes
        self._family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        try:
            self._server = socket.create_server(where, family=self._family, backlog=1024)
        except OSError as error:
            raise InputError(
                f"--coordinator={where[0]}:{where[1]}: process 0 can't listen there ({error.strerror}); name an "
                "address of its own machine, and a port that is free."
            ) from None
        self._changed = threading.Condition(threading.RLock())
        self._members: dict[int, _Member] = {}
        self._barriers: dict[str, set[int]] = {}  # who has come
        self._deadline: float | None = None  # of the start
        self._patience = (PATIENCE, PATIENCE)  # for the start, between signs of life
        self._hung: list[End] = []
        self._end: End | None = None
        for loop in (self._accept, self._keep_time):
            threading.Thread(target=loop, daemon=True, name="hub").start()

    def finish(self, seconds: float) -> None:
        """Waits until every process has left: up to `seconds` for those who have not come, to tell them too."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._members) == self._processes or self._deadline == 0.0, seconds)
            self._changed.wait_for(lambda: all(member.left for member in self._members.values()), LINGER)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="hub line").start()

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection)
        messages = iter(line)
        try:
            hello = next(messages)
            process, host = int(hello["hello"]), str(hello["host"])
        except (OSError, ValueError, LookupError, TypeError, StopIteration):
            line.close()  # none of ours
            connection.close()
            return
        member = self._welcome(process, _Member(line, host), hello.get("processes"))
        if member is None:
            return
        what, kind, bye = "is gone: its connection broke without a word", "gone", False
        try:
            for message in messages:
                bye = bye or "bye" in message
                self._hear(process, member, message)
        except TimeoutError:
            what, kind = silence(self._patience[1]), "silent"
        except (OSError, ValueError):
            pass
        with self._changed:
            member.left = True
            self._changed.notify_all()
            if not bye:
                self.ended(End(process, host, kind, 1, what))

    def _welcome(self, process: int, member: _Member, processes: Any) -> _Member | None:
        """Takes a process in; None if its place is taken."""
        with self._changed:
            there = self._members.get(process)
            if there is not None:
                what = f"process {process} is there already, on {there.host}; stop one of them"
                member.line.send(end=dataclasses.asdict(End(process, member.host, "exception", 1, what)))
                return None
            self._members[process] = member
            self._changed.notify_all()
            if self._end is not None:
                member.line.send(end=dataclasses.asdict(self._end))
            elif processes != self._processes or not 0 <= process < self._processes:
                what = f"was started with --processes={processes}, host 0 with {self._processes}"
                self.ended(End(process, member.host, "exception", 2, what))
        return member

    def _hear(self, process: int, member: _Member, message: dict[str, Any]) -> None:
        with self._changed:
            if "failed" in message:
                self._failed(End(**message["failed"]))
            elif "ready" in message:
                member.facts = message["ready"]
                member.line.patience(message["heartbeat"])
                if process == 0:
                    self._patience = (message["start_timeout"], message["heartbeat"])
                    self._deadline = time.monotonic() + message["start_timeout"]
                self._start()
            elif "barrier" in message:
                self._barriers.setdefault(message["barrier"], set()).add(process)
                if len(self._barriers[message["barrier"]]) == self._processes:
                    self._send_all(barrier=message["barrier"])

    def _start(self) -> None:
        """Once all are ready, compares them and lets them go."""
        ready = {process: m for process, m in self._members.items() if m.facts is not None}
        if len(ready) < self._processes or self._end is not None:
            return
        self._deadline = None
        odd = fingerprints.difference({process: m.facts for process, m in ready.items()})
        if odd is not None:
            process, what = odd
            self.ended(End(process, ready[process].host, "exception", 2, what))
            return
        with socket.create_server((self._where[0], 0), family=self._family) as free:
            port = free.getsockname()[1]
        host = f"[{self._where[0]}]" if self._family == socket.AF_INET6 else self._where[0]
        self._send_all(go=f"{host}:{port}")

    def _failed(self, end: End) -> None:
        if end.kind != "hang":
            self.ended(end)
            return
        self._hung.append(end)  # the others stand still too, and will find so
        if len(self._hung) == 1:
            threading.Timer(COLLECT, lambda: self.ended(min(self._hung, key=_behind))).start()

    def ended(self, end: End) -> None:
        """Tells everybody, once."""
        with self._changed:
            if self._end is None:
                self._end = end
                self._send_all(end=dataclasses.asdict(end))

    def _send_all(self, **message: Any) -> None:
        for member in self._members.values():
            member.line.send(**message)

    def _keep_time(self) -> None:
        while True:
            time.sleep(PING)
            with self._changed:
                self._send_all(ping=True)
                if self._deadline and time.monotonic() > self._deadline:
                    self._deadline = 0.0  # over: nobody is waited for
                    self._miss()

    def _miss(self) -> None:
        absent = [p for p in range(self._processes) if p not in self._members]
        late = [p for p, m in sorted(self._members.items()) if m.facts is None]
        words = [f"{_hosts(absent)} never came"] * bool(absent) + [f"{_hosts(late)} came, and never got ready"] * bool(
            late
        )
        what = f"within {self._patience[0]:g} s (config.pod.start_timeout) {' and '.join(words)}; see why there."
        self.ended(End(0, self._members[0].host, "exception", 1, what))


def _hosts(numbers: list[int]) -> str:
    return f"host{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _behind(end: End) -> tuple[int, int]:
    return (-1 if end.step is None else end.step), PHASES.index(end.phase) if end.phase in PHASES else 0
