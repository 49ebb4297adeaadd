"""The coordinator of a run, in process 0, which drops whoever lacks the token (see messages.py). Without jax."""

import contextlib
import dataclasses
import hmac
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm.cluster import fingerprints, messages, ports
from mlm.cluster.messages import PHASES, Connection, Termination, one_line, prove
from mlm.errors import InputError
from mlm.paths import UPath, make_folder, refusing, write_secret

LINGER = 5.0  # seconds to wait for the last message
COLLECT = 2.0  # seconds for several processes to report that they hang, before the one that is behind is named
STRANGERS = 64  # connections at a time without a proof, beside one for each process
RETRY = 0.1  # seconds, where no file descriptor or thread is left for a connection


@dataclasses.dataclass
class _Member:
    process: int
    connection: Connection
    host: str
    fingerprint: dict[str, Any] | None = None
    bye: bool = False  # it leaves in good order
    left: bool = False  # its connection is closed


class Coordinator:
    """One thread for each connection, one that listens, one for pings and time limits."""

    def __init__(self, address: tuple[str, int], processes: int, pod: ConfigDict, token: UPath | Path):
        """Listens, as `ports.listen`, and writes the token; raises InputError or StopError."""
        self._processes, self._pod, self._token = processes, pod, secrets.token_bytes(32)
        self._server = ports.listen(address, pod.start_timeout)
        try:
            with refusing(f"{token}: host 0 can't write it", "choose another --workdir"):
                make_folder(token.parent)
                write_secret(token, self._token.hex())  # before the first greeting; who reads it too early tries again
        except InputError:
            self._server.close()
            raise
        self._changed = threading.Condition(threading.RLock())
        self._strangers: dict[Connection, float] = {}  # to the time of connecting
        self._members: dict[int, _Member] = {}
        self._barriers: dict[str, set[int]] = {}  # the processes that have reached each
        self._deadline: float | None = None  # of the start; 0 when it has passed
        self._started = False
        self._hung: list[Termination] = []
        self._termination: Termination | None = None
        self._finished = False
        for loop in (self._accept, self._keep_time):
            threading.Thread(target=loop, daemon=True, name="coordinator").start()

    def finish(self, timeout: float) -> None:
        """Waits until every process has left, up to `timeout` seconds for those that have not connected yet."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._members) == self._processes or self._deadline == 0.0, timeout)
            self._changed.wait_for(lambda: all(member.left for member in self._members.values()), LINGER)
            self._finished = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while not self._finished:
            try:
                connection = Connection(self._server.accept()[0])
                with self._changed:
                    self._strangers[connection] = time.monotonic()
                    if len(self._strangers) > STRANGERS + self._processes:
                        self._drop(next(iter(self._strangers)))  # the oldest: a process of the run takes milliseconds
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="connection").start()
            except (OSError, RuntimeError):  # it is gone again, or no descriptor or thread is left
                time.sleep(RETRY)

    def _drop(self, stranger: Connection) -> None:
        del self._strangers[stranger]
        stranger.close()

    def _serve(self, connection: Connection) -> None:
        member = None
        with contextlib.suppress(OSError, ValueError):  # not a process of the run
            member = self._admit(connection)
        with self._changed:
            self._strangers.pop(connection, None)
        if member is not None:
            kind, what = connection.receive_all(lambda message: self._handle(member, message))
            with self._changed:
                member.left = True
                self._changed.notify_all()
                if not member.bye:
                    self._terminate(Termination(member.process, member.host, kind, 1, what))
        connection.release()

    def _admit(self, connection: Connection) -> _Member | None:
        """Admits a process that knows the token and whose number is free; raises OSError or ValueError."""
        challenge = secrets.token_hex(32)
        connection.send(challenge=challenge)
        process, processes, host, other_challenge, proof = messages.read_hello(connection.receive() or {})
        signed = (challenge, other_challenge, process, processes, host)
        with self._changed:
            if connection not in self._strangers:
                return None  # too many, or too late
            if not hmac.compare_digest(proof, prove(self._token, "process", *signed)):
                connection.send(refused="token")
                return None
            if process in self._members:  # of an earlier attempt, it may leave soon
                connection.send(refused="taken", host=self._members[process].host)
                return None
            connection.send(welcome=prove(self._token, "coordinator", *signed))
            if processes == self._processes:
                member = self._members[process] = _Member(process, connection, host)
                self._changed.notify_all()
                if self._termination is not None:
                    connection.send(end=dataclasses.asdict(self._termination))
                return member
            what = f"was started with --processes={processes}, host 0 with {self._processes}"
            termination = Termination(process, host, "exception", 2, what)
            connection.send(end=dataclasses.asdict(termination))
            if not self._started:
                self._terminate(termination)
        connection.set_timeout(LINGER)
        connection.receive_all(lambda message: None)  # closing it with something unread would lose what was sent
        return None

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        """Handles a message of a process; raises ValueError if it isn't one."""
        with self._changed:
            match message:
                case {"ping": True}:
                    pass
                case {"bye": True}:
                    member.bye = True
                case {"failed": dict(fields)} if fields.get("process") == member.process:
                    self._failed(Termination.read(fields | {"host": member.host}, messages.OWN_KINDS))
                case {"barrier": name}:
                    name = one_line(name, messages.MAX_NAME)
                    reached = self._barriers.setdefault(name, set())
                    reached.add(member.process)
                    complete = len(reached) == self._processes
                    if complete:
                        del self._barriers[name]
                        self._send_all(barrier=name)
                    if not self._started and (complete or member.process == 0):  # some may never have been started
                        self._deadline = None if complete else time.monotonic() + self._pod.start_timeout
                case {"ready": dict(fingerprint)} if not member.fingerprint:
                    member.fingerprint = {one_line(key): value for key, value in fingerprint.items()}
                    member.connection.set_timeout(self._pod.heartbeat)
                    if member.process == 0:
                        self._deadline = time.monotonic() + self._pod.start_timeout
                    self._start()
                case _:
                    raise ValueError("not a message of a process")

    def _start(self) -> None:
        """Once all are ready, compares them and starts the run."""
        ready = {process: m.fingerprint for process, m in self._members.items() if m.fingerprint is not None}
        if len(ready) < self._processes or self._termination is not None:
            return
        self._deadline, self._started = None, True
        difference = fingerprints.difference(ready)
        if difference is None:
            self._send_all(go=True)
        else:
            process, sentence = difference
            self._terminate(Termination(process, self._members[process].host, "exception", 2, sentence))

    def _failed(self, termination: Termination) -> None:
        if termination.kind != "hang":
            self._terminate(termination)
            return
        self._hung.append(termination)  # the others stand still too, and will report it
        if len(self._hung) == 1:
            threading.Timer(COLLECT, lambda: self._terminate(min(self._hung, key=_position))).start()

    def _terminate(self, termination: Termination) -> None:
        """Notifies every process, once."""
        with self._changed:
            if self._termination is None:
                self._termination = termination
                self._send_all(end=dataclasses.asdict(termination))

    def _send_all(self, **message: Any) -> None:
        for member in self._members.values():
            member.connection.send(**message)

    def _keep_time(self) -> None:
        while True:
            time.sleep(messages.PING)
            with self._changed:
                self._send_all(ping=True)
                now = time.monotonic()
                for stranger in [c for c, since in self._strangers.items() if now - since > messages.HANDSHAKE]:
                    self._drop(stranger)
                if self._deadline and now > self._deadline:
                    self._deadline = 0.0
                    self._terminate_late_start()

    def _terminate_late_start(self) -> None:
        missing = [p for p in range(self._processes) if p not in self._members]
        waiting = set().union(*self._barriers.values())
        unready = [p for p, m in sorted(self._members.items()) if m.fingerprint is None and p not in waiting]
        what = f"within {self._pod.start_timeout:g} s (config.pod.start_timeout)"
        for processes, problem in ((missing, "never connected"), (unready, "connected, but never got ready")):
            if processes:
                what += f" {'host' if len(processes) == 1 else 'hosts'} {', '.join(map(str, processes))} {problem};"
        self._terminate(Termination(0, self._members[0].host, "exception", 1, f"{what} look there for the reason"))


def _position(termination: Termination) -> tuple[int, int]:
    step, phase = termination.step, termination.phase
    return (-1 if step is None else step), PHASES.index(phase) if phase in PHASES else 0
