"""The coordinator of a run, in process 0: every process connects to it and reports how it is. Without jax.

See messages.py for the protocol. Only those who know the token of this attempt, which lies in the workdir, are let in;
whatever anybody else sends is dropped, and never ends the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from mlm.cluster import fingerprints, messages, ports
from mlm.cluster.messages import PHASES, Connection, Hello, Termination, one_line, prove
from mlm.errors import InputError, StopError
from mlm.paths import UPath, is_remote, make_folder

LINGER = 5.0  # seconds to wait for the last message: until it has been received, or until it comes
COLLECT = 2.0  # seconds in which several processes may find that they hang, before it is judged which one it was
STRANGERS = 64  # connections at a time that have not proved who they are, beside one for each process
RETRY = 0.1  # seconds, where this process has no file descriptor or thread left for a connection


@dataclasses.dataclass
class _Member:
    connection: Connection
    host: str
    fingerprint: dict[str, Any] | None = None
    left: bool = False  # its connection is closed


class Coordinator:
    """One thread for each connection, one that listens, one that keeps time."""

    def __init__(
        self, where: tuple[str, int], processes: int, *, token: UPath | Path, jax_port: int, start_timeout: float
    ):
        """Listens at `where` and writes the token; waits up to `start_timeout` seconds for the port.

        Raises:
          InputError, StopError: it can't listen there (see `ports.listen`), or can't write the token.
        """
        self._where, self._processes, self._jax_port = where, processes, jax_port
        self._token = secrets.token_bytes(32)
        self._server = ports.listen(where, start_timeout)
        try:
            _write_token(token, self._token)  # those who are connecting already are not greeted before that
        except InputError:
            self._server.close()
            raise
        self._changed = threading.Condition(threading.RLock())
        self._strangers: dict[Connection, float] = {}  # since when they are here
        self._members: dict[int, _Member] = {}
        self._barriers: dict[str, set[int]] = {}  # who has come
        self._deadline: float | None = None  # of the start
        self._started = False  # the run has started
        self._timeouts = (messages.HEARTBEAT, messages.HEARTBEAT)  # of the start, between signs of life
        self._hung: list[Termination] = []
        self._termination: Termination | None = None
        self._finished = False
        for loop in (self._accept, self._keep_time):
            threading.Thread(target=loop, daemon=True, name="coordinator").start()

    def finish(self, limit: float) -> None:
        """Waits until every process has left: up to `limit` seconds for those who have not come, to notify them too."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._members) == self._processes or self._deadline == 0.0, limit)
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
            except (OSError, RuntimeError):  # it is gone again, or no descriptor or no thread is left
                time.sleep(RETRY)

    def _drop(self, stranger: Connection) -> None:
        del self._strangers[stranger]
        stranger.close()

    def _serve(self, connection: Connection) -> None:
        try:
            found = self._admit(connection)
        except (OSError, ValueError):
            found = None  # none of ours
        finally:
            with self._changed:
                self._strangers.pop(connection, None)
        if found is not None:
            self._receive_all(*found)
        connection.release()

    def _admit(self, connection: Connection) -> tuple[int, _Member] | None:
        """Takes a process in that knows the token and whose place is free; raises OSError or ValueError."""
        challenge = secrets.token_hex(32)
        connection.send(challenge=challenge)
        hello = Hello.read(connection.receive() or {})
        said = (challenge, hello.challenge, hello.process, hello.processes, hello.host)
        with self._changed:
            if connection not in self._strangers:
                return None  # too many, or too late
            if not hmac.compare_digest(hello.proof, prove(self._token, "process", *said)):
                connection.send(refused="token")
                return None
            there = self._members.get(hello.process)
            if there is not None:  # of an earlier attempt, it may leave soon
                connection.send(refused="taken", host=there.host)
                return None
            connection.send(welcome=prove(self._token, "coordinator", *said))
            if hello.processes == self._processes:
                member = self._members[hello.process] = _Member(connection, hello.host)
                self._changed.notify_all()
                if self._termination is not None:
                    connection.send(end=dataclasses.asdict(self._termination))
                return hello.process, member
            what = f"was started with --processes={hello.processes}, host 0 with {self._processes}"
            termination = Termination(hello.process, hello.host, "exception", 2, what)
            connection.send(end=dataclasses.asdict(termination))
            if not self._started:
                self.terminate(termination)
        connection.set_timeout(LINGER)
        for _ in connection:  # closed with something unread, it would lose what was sent
            pass
        return None

    def _receive_all(self, process: int, member: _Member) -> None:
        what, kind, bye = "is gone: its connection broke without warning", "gone", False
        try:
            for message in member.connection:
                bye = bye or "bye" in message
                self._receive(process, member, message)
        except TimeoutError:
            what, kind = messages.silence(self._timeouts[1]), "silent"
        except ValueError:
            what = "is gone: it sent something that is no message of a run, and its connection was closed"
        except OSError:
            pass
        with self._changed:
            member.left = True
            self._changed.notify_all()
            if not bye:
                self.terminate(Termination(process, member.host, kind, 1, what))

    def _receive(self, process: int, member: _Member, message: dict[str, Any]) -> None:
        """Does what a process asks for; raises ValueError if that is no message."""
        with self._changed:
            match message:
                case {"ping": True} | {"bye": True}:
                    pass
                case {"failed": dict(fields)} if fields.get("process") == process:
                    self._failed(Termination.read(fields | {"host": member.host}, messages.OWN_KINDS))
                case {"barrier": name}:
                    self._meet(process, one_line(name, messages.NAME))
                case {"ready": dict(found), "start_timeout": start, "heartbeat": heartbeat} if not member.fingerprint:
                    start, heartbeat = messages.seconds(start), messages.seconds(heartbeat)
                    member.fingerprint = {one_line(key): value for key, value in found.items()}
                    member.connection.set_timeout(heartbeat)
                    if process == 0:
                        self._timeouts = (start, heartbeat)
                        self._deadline = time.monotonic() + start
                    self._start()
                case _:
                    raise ValueError("no message of a process")

    def _meet(self, process: int, barrier: str) -> None:
        come = self._barriers.setdefault(barrier, set())
        come.add(process)
        if len(come) == self._processes:
            del self._barriers[barrier]
            self._send_all(barrier=barrier)

    def _start(self) -> None:
        """Once all are ready, compares them and lets them go."""
        ready = {process: m for process, m in self._members.items() if m.fingerprint is not None}
        if len(ready) < self._processes or self._termination is not None:
            return
        limit = self._deadline - time.monotonic()
        self._deadline, self._started = None, True
        odd = fingerprints.difference({process: m.fingerprint for process, m in ready.items()})
        if odd is None:
            threading.Thread(target=self._go, args=(limit,), daemon=True, name="go").start()
        else:
            self.terminate(Termination(odd[0], ready[odd[0]].host, "exception", 2, odd[1]))

    def _go(self, limit: float) -> None:
        """Sends all to jax's own service as soon as its port is free."""
        place = (self._where[0], self._jax_port)
        try:
            ports.listen(place, limit, key="config.pod.jax_port").close()
        except StopError as error:
            self.terminate(Termination(0, self._members[0].host, "exception", error.code, str(error)))
            return
        with self._changed:
            self._send_all(go=ports.joined(place))

    def _failed(self, termination: Termination) -> None:
        if termination.kind != "hang":
            self.terminate(termination)
            return
        self._hung.append(termination)  # the others stand still too, and will find so
        if len(self._hung) == 1:
            threading.Timer(COLLECT, lambda: self.terminate(min(self._hung, key=_behind))).start()

    def terminate(self, termination: Termination) -> None:
        """Notifies everybody, once."""
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
                    self._deadline = 0.0  # over: nobody is waited for
                    self._miss()

    def _miss(self) -> None:
        absent = [p for p in range(self._processes) if p not in self._members]
        late = [p for p, m in sorted(self._members.items()) if m.fingerprint is None]
        words = [f"{_hosts(absent)} never connected"] * bool(absent)
        words += [f"{_hosts(late)} connected, but never got ready"] * bool(late)
        limit = f"{self._timeouts[0]:g} s (config.pod.start_timeout)"
        what = f"within {limit} {' and '.join(words)}; look there for the reason"
        self.terminate(Termination(0, self._members[0].host, "exception", 1, what))


def _write_token(path: UPath | Path, token: bytes) -> None:
    """Writes the file whole; on a disk its owner alone reads it. Raises InputError."""
    try:
        make_folder(path.parent)
        if is_remote(path):
            path.write_text(token.hex(), encoding="utf-8")
            return
        temporary = Path(f"{path}.tmp")
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(token.hex())
        temporary.replace(path)
    except Exception as error:  # a bucket's client raises its own
        words = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: host 0 can't write it ({words}); choose another --workdir.") from None


def _hosts(numbers: list[int]) -> str:
    return f"host{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _behind(termination: Termination) -> tuple[int, int]:
    step, phase = termination.step, termination.phase
    return (-1 if step is None else step), PHASES.index(phase) if phase in PHASES else 0
