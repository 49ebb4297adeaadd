"""Each process's connection to the coordinator: who is there, who has failed and why. Without jax.

Process 0 holds the coordinator (coordinator.py); every process, 0 too, is connected to it and sends a sign of life
every second. So each learns at once, in words, that another one has failed, is gone, or has fallen silent; jax would
only abort. The coordinator also compares what all must have in common, and says where jax's own service will be.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlm.cluster import coordinator, messages, ports
from mlm.cluster.coordinator import Coordinator
from mlm.cluster.messages import Connection, Termination, one_line, prove
from mlm.errors import StopError
from mlm.paths import UPath

NOTIFY = 30.0  # seconds for which one that has failed before the others came waits to notify them
RETRY = 0.1  # seconds between two tries to connect
NOTE = 10.0  # seconds after which what keeps it from connecting is reported
LONG = 200  # characters of a config value that are sent as they are


class Client:
    """This process's connection to the coordinator; in process 0, the coordinator as well."""

    def __init__(
        self,
        where: tuple[str, int],
        processes: int,
        process: int,
        on_end: Callable[[Termination], None],
        *,
        token: UPath | Path,
        jax_port: int,
        start_timeout: float,
        host: str | None = None,
    ):
        """Starts to connect, and keeps trying; process 0 first waits for its port.

        Args:
          where: host and port of the coordinator.
          processes, process: how many, and which of them this is.
          on_end: called in a thread when the run ends, unless it is by `notify` or after `close`.
          token: file that process 0 writes and the others read.
          jax_port: of jax's own service, on the coordinator's host.
          start_timeout: seconds for which process 0 waits for its port.
          host: name of this one; default: the machine's.

        Raises:
          InputError, StopError: process 0 can't listen there, or can't write the token.
        """
        self._where, self._on_end, self._token_file = where, on_end, token
        self._process, self._processes = process, processes
        self._host = one_line(host or socket.gethostname(), messages.NAME)
        self._token: bytes | None = None
        own = {"token": token, "jax_port": jax_port, "start_timeout": start_timeout}
        self._coordinator = Coordinator(where, processes, **own) if process == 0 else None
        self._connection: Connection | None = None
        self._changed = threading.Condition()
        self._received: set[str] = set()  # names of messages
        self._go = ""
        self._barriers = 0  # passed
        self._closed = False  # the end of the run is no news to this process
        self._left = False
        self._heartbeat = messages.HEARTBEAT
        self._start_timeout = start_timeout
        self._problem = ""  # why it is not connected
        threading.Thread(target=self._run, daemon=True, name="client").start()

    def ready(self, fingerprint: dict[str, Any], *, start_timeout: float, heartbeat: float) -> str:
        """Waits until all are ready and alike; returns "host:port" for jax's service.

        Args:
          fingerprint: what all must have in common.
          start_timeout: seconds to wait for the others.
          heartbeat: seconds of silence after which a process counts as dead, from now on.

        Raises:
          StopError: there is no connection to process 0.
        """
        begin = time.monotonic()
        self._heartbeat = heartbeat
        self._connected(start_timeout)
        self._connection.set_timeout(heartbeat)
        brief = {key: _brief(value) for key, value in fingerprint.items()}
        self._connection.send(ready=brief, start_timeout=start_timeout, heartbeat=heartbeat)
        left = start_timeout + begin - time.monotonic()
        if not self._wait("go", left + coordinator.LINGER):  # the coordinator, which knows who is missing, comes first
            raise StopError(f"host 0 was not ready within {start_timeout:g} s (config.pod.start_timeout).")
        return self._go

    def barrier(self, name: str) -> None:
        """Waits until all have come here, as long as they live; all come to the same ones in the same order.

        Raises:
          StopError: there is no connection to process 0.
        """
        self._connected(self._start_timeout)
        self._barriers += 1
        name = one_line(f"{self._barriers} {name}", messages.NAME)
        self._connection.send(barrier=name)
        self._wait(f"barrier {name}", None)

    def notify(self, termination: Termination) -> None:
        """Notifies the others that this process ends the run; waits until they know, at most `NOTIFY` seconds."""
        self._closed = True
        if self._wait("connected", NOTIFY) and "end" not in self._received:
            short = dataclasses.replace(termination, what=one_line(termination.what))
            self._connection.send(failed=dataclasses.asdict(short))
            self._wait("end", coordinator.COLLECT + coordinator.LINGER)
        self.leave(NOTIFY)

    def close(self) -> None:
        """Leaves the run in good order."""
        self._closed = True
        if self._connection is not None:
            self._connection.send(bye=True)
        self.leave(coordinator.LINGER)

    def leave(self, limit: float = NOTIFY) -> None:
        """Closes the connection; process 0 waits until the others have been notified and have left.

        Args:
          limit: seconds, for those who have not come yet.
        """
        self._left = True
        if self._connection is not None:
            self._connection.close()
        if self._coordinator is not None:
            self._coordinator.finish(limit)

    def _connected(self, limit: float) -> None:
        if not self._wait("connected", limit):
            problem = self._problem or f"host 0 has not answered at {ports.joined(self._where)}"
            raise StopError(f"{problem} (tried for {limit:g} s, config.pod.start_timeout).")

    def _wait(self, name: str, limit: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: name in self._received, limit)

    def _note(self, name: str) -> None:
        with self._changed:
            self._received.add(name)
            self._changed.notify_all()

    def _connect(self) -> Connection | None:
        """Returns a connection, None if this process has left before there was one."""
        since, noted = time.monotonic(), ""
        while not self._left:
            connection, problem = self._try()
            if connection is not None:
                return connection
            if problem != self._problem:
                self._problem, since = problem, time.monotonic()
            if problem != noted and time.monotonic() - since > NOTE:
                noted = problem
                print(f"mlm: {problem}; trying again.", file=sys.stderr, flush=True)
            time.sleep(RETRY)
        return None

    def _try(self) -> tuple[Connection | None, str]:
        """Returns a connection on which both sides have proved that they belong to the run, or None and why not."""
        place = ports.joined(self._where)
        try:
            connection = Connection(socket.create_connection(self._where, timeout=messages.HANDSHAKE))
        except socket.gaierror:
            return None, f"the coordinator's name {self._where[0]} does not resolve; check the name and the DNS"
        except OSError:
            return None, f"host 0 has not answered at {place}; see whether it runs there, and why not"
        connection.set_timeout(messages.HANDSHAKE)
        try:
            problem = self._handshake(connection)
        except (OSError, ValueError):
            problem = f"what listens at {place} does not answer as host 0 would; check the address, and what runs there"
        if problem:
            connection.release()
            return None, problem
        connection.set_timeout(self._heartbeat)
        return connection, ""

    def _handshake(self, connection: Connection) -> str:
        """Returns why not, "" if both sides have proved who they are; raises OSError or ValueError."""
        place, own = ports.joined(self._where), secrets.token_hex(32)
        greeting = connection.receive() or {}
        said = (messages.hexadecimal(greeting.get("challenge")), own, self._process, self._processes, self._host)
        if self._token is None:
            try:
                self._token = bytes.fromhex(messages.hexadecimal(self._token_file.read_text(encoding="utf-8")))
            except FileNotFoundError:
                return f"{self._token_file} is not there, but host 0 is: is --workdir a folder that all hosts share?"
            except Exception as error:  # a bucket's client raises its own
                words = getattr(error, "strerror", None) or error
                return f"{self._token_file} can't be read ({one_line(str(words))}); check who may read it"
        hello = {"hello": self._process, "processes": self._processes, "host": self._host, "challenge": own}
        connection.send(**hello, proof=prove(self._token, "process", *said))
        match connection.receive():
            case {"welcome": proof} if hmac.compare_digest(
                messages.hexadecimal(proof), prove(self._token, "coordinator", *said)
            ):
                return ""
            case {"refused": "taken", "host": other}:
                other = one_line(other, messages.NAME)
                return f"process {self._process} is already connected, from {other}; stop one of the two"
            case {"refused": "token"} | {"welcome": _}:
                self._token = None  # of an earlier attempt: read again
                return (
                    f"the token in {self._token_file} is not that of what listens at {place}: is --workdir a folder "
                    "that all hosts share, and does another run use the port?"
                )
        raise ValueError("no answer to a hello")

    def _run(self) -> None:
        self._connection = connection = self._connect()
        if connection is None:
            return
        threading.Thread(target=_ping, args=(connection,), daemon=True, name="ping").start()
        self._note("connected")
        kind, what = "gone", "is gone: its connection broke without warning"
        try:
            for message in connection:
                match message:
                    case {"ping": True}:
                        pass
                    case {"end": fields}:
                        self._ended(Termination.read(fields))
                        return
                    case {"go": str(place)}:
                        self._go = ports.joined(ports.address(one_line(place), 0))
                        self._note("go")
                    case {"barrier": name}:
                        self._note(f"barrier {one_line(name, messages.NAME)}")
                    case _:
                        raise ValueError("no message of a coordinator")
        except TimeoutError:
            kind, what = "silent", messages.silence(self._heartbeat)
        except (OSError, ValueError, StopError):
            pass
        self._ended(Termination(0, self._where[0], kind, 1, what))

    def _ended(self, termination: Termination) -> None:
        self._note("end")
        if not self._closed:
            self._on_end(termination)


def _brief(value: Any) -> Any:
    """Returns a value that fits into a message and is equal on two hosts where the value is."""
    text = json.dumps(value, default=str)
    if len(text) <= LONG and "NaN" not in text and "Infinity" not in text:
        return json.loads(text)
    return f"{text[:LONG]}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _ping(connection: Connection) -> None:
    while True:
        time.sleep(messages.PING)
        connection.send(ping=True)
