"""Each process's connection to the coordinator: it says who has failed and why, where jax only aborts. Without jax."""

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

from ml_collections import ConfigDict

from mlm.cluster import coordinator, messages, ports
from mlm.cluster.coordinator import Coordinator
from mlm.cluster.detect import Cluster
from mlm.cluster.messages import Connection, Termination, one_line, prove
from mlm.errors import StopError
from mlm.paths import UPath

NOTIFY_TIMEOUT = 30.0  # seconds for which a process that has failed waits for the others, to notify them
RETRY = 0.1  # seconds between two tries to connect
REPORT_AFTER = 10.0  # seconds until the reason why it can't connect is printed
MAX_VALUE = 200  # characters of a config value that are sent unabridged


class Client:
    """This process's connection to the coordinator; in process 0, the coordinator as well."""

    def __init__(self, cluster: Cluster, pod: ConfigDict, token: UPath | Path, on_end: Callable[[Termination], None]):
        """Starts to connect, and keeps trying; process 0 first starts the coordinator, and raises as that does.

        Process 0 writes the file `token`, the others read it. `on_end` is called in a thread when the run ends, unless
        by `notify` or after `close`.
        """
        self._cluster, self._pod, self._on_end = cluster, pod, on_end
        self._address = ports.parse_address(cluster.coordinator, pod.port)
        self._place = ports.format_address(self._address)
        self._host = one_line(socket.gethostname(), messages.MAX_NAME)
        self._token_file, self._token = token, b""
        self._coordinator: Coordinator | None = None
        if cluster.process_id == 0:
            self._coordinator = Coordinator(self._address, cluster.processes, pod, token)
        self._connection: Connection | None = None
        self._changed = threading.Condition()
        self._received: set[str] = set()  # "connected", and the names of messages
        self._barriers = 0  # passed
        self._closed = False  # this process knows already that the run ends
        self._left = False
        self._problem = ""  # why it is not connected
        threading.Thread(target=self._run, daemon=True, name="client").start()

    def ready(self, fingerprint: dict[str, Any]) -> tuple[str, int]:
        """Waits until all processes are ready and alike; returns the address of jax's own service. Raises StopError."""
        jax_address, timeout = (self._address[0], self._pod.jax_port), self._pod.start_timeout
        if self._coordinator is not None:
            ports.listen(jax_address, timeout, key="config.pod.jax_port").close()
        deadline = time.monotonic() + timeout
        self._wait_until_connected()
        self._connection.set_timeout(self._pod.heartbeat)  # silent for longer, it counts as dead
        self._connection.send(ready={key: _abridged(value) for key, value in fingerprint.items()})
        remaining = deadline - time.monotonic()
        if not self._wait("go", remaining + coordinator.LINGER):  # first the coordinator, which knows who is missing
            raise StopError(f"host 0 was not ready within {timeout:g} s (config.pod.start_timeout).")
        return jax_address

    def barrier(self, name: str) -> None:
        """Waits until all have come here; they come to all barriers in the same order. Raises StopError."""
        self._wait_until_connected()
        self._barriers += 1
        name = one_line(f"{self._barriers} {name}", messages.MAX_NAME)
        self._connection.send(barrier=name)
        self._wait(f"barrier {name}", None)

    def notify(self, termination: Termination) -> None:
        """Notifies the others that this process ends the run; waits until they know, at most `NOTIFY_TIMEOUT`."""
        self._closed = True
        if self._wait("connected", NOTIFY_TIMEOUT) and "end" not in self._received:
            short = dataclasses.replace(termination, what=one_line(termination.what))
            self._connection.send(failed=dataclasses.asdict(short))
            self._wait("end", coordinator.COLLECT + coordinator.LINGER)
        self.leave()

    def close(self) -> None:
        """Leaves a run that goes on or is done."""
        self._closed = True
        if self._connection is not None:
            self._connection.send(bye=True)
        self.leave(coordinator.LINGER)

    def leave(self, timeout: float = NOTIFY_TIMEOUT) -> None:
        """Closes the connection; process 0 waits until the others have left, and `timeout` for those still to come."""
        self._left = True
        if self._connection is not None:
            self._connection.close()
        if self._coordinator is not None:
            self._coordinator.finish(timeout)

    def _wait_until_connected(self) -> None:
        if not self._wait("connected", self._pod.start_timeout):
            problem = self._problem or f"host 0 has not answered at {self._place}"
            raise StopError(f"{problem} (tried for {self._pod.start_timeout:g} s, config.pod.start_timeout).")

    def _wait(self, name: str, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: name in self._received, timeout)

    def _mark(self, name: str) -> None:
        with self._changed:
            self._received.add(name)
            self._changed.notify_all()

    def _connect(self) -> Connection | None:
        """Tries until both sides have proved that they belong to the run; returns None if this process has left."""
        begin, reported = time.monotonic(), set()
        while not self._left:
            connection = None
            try:
                connection = Connection(socket.create_connection(self._address, timeout=messages.HANDSHAKE))
                connection.set_timeout(messages.HANDSHAKE)
                problem = self._handshake(connection)
            except socket.gaierror:
                problem = f"the coordinator's name {self._address[0]} does not resolve; check the name and the DNS"
            except (OSError, ValueError):
                problem = f"host 0 has not answered at {self._place}; see whether it runs there, and why not"
                if connection is not None:
                    problem = f"{self._place} does not answer like host 0; check the address and what listens there"
            if not problem:
                connection.set_timeout(messages.HEARTBEAT)
                return connection
            if connection is not None:
                connection.release()
            self._problem = problem
            if problem not in reported and time.monotonic() - begin > REPORT_AFTER:
                reported.add(problem)
                print(f"mlm: {problem}; trying again.", file=sys.stderr, flush=True)
            time.sleep(RETRY)
        return None

    def _handshake(self, connection: Connection) -> str:
        """Returns what is wrong, or ""; raises OSError or ValueError if the other side is not a coordinator."""
        nonce, process, processes = secrets.token_hex(32), self._cluster.process_id, self._cluster.processes
        challenge = messages.hexadecimal((connection.receive() or {}).get("challenge"))
        signed = (challenge, nonce, process, processes, self._host)
        if not self._token:
            try:
                self._token = bytes.fromhex(messages.hexadecimal(self._token_file.read_text(encoding="utf-8")))
            except FileNotFoundError:
                return f"{self._token_file} is not there, but host 0 is: is --workdir a folder that all hosts share?"
            except Exception as error:  # a bucket's client raises its own
                reason = one_line(str(getattr(error, "strerror", None) or error))
                return f"{self._token_file} can't be read ({reason}); check its permissions"
        proof = prove(self._token, "process", *signed)
        connection.send(hello=process, processes=processes, host=self._host, challenge=nonce, proof=proof)
        expected = prove(self._token, "coordinator", *signed)
        match connection.receive():
            case {"welcome": proof} if hmac.compare_digest(messages.hexadecimal(proof), expected):
                return ""
            case {"refused": "taken", "host": other}:
                other = one_line(other, messages.MAX_NAME)
                return f"process {process} is already connected, from {other}; stop one of the two"
            case {"refused": "token"} | {"welcome": _}:
                self._token = b""  # of an earlier attempt: read again
                hint = "is --workdir a folder that all hosts share, and does another run use the port?"
                return f"the token in {self._token_file} is not that of what listens at {self._place}: {hint}"
        raise ValueError("not an answer to a hello")

    def _run(self) -> None:
        self._connection = connection = self._connect()
        if connection is None:
            return
        threading.Thread(target=_ping, args=(connection,), daemon=True, name="ping").start()
        self._mark("connected")
        kind, what = connection.receive_all(self._handle)
        self._terminated(Termination(0, self._address[0], kind, 1, what))

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"ping": True}:
                pass
            case {"end": fields}:
                self._terminated(Termination.read(fields))
            case {"go": True}:
                self._mark("go")
            case {"barrier": name}:
                self._mark(f"barrier {one_line(name, messages.MAX_NAME)}")
            case _:
                raise ValueError("not a message of a coordinator")

    def _terminated(self, termination: Termination) -> None:
        closed, self._closed = self._closed, True
        self._mark("end")
        if not closed:
            self._on_end(termination)


def _abridged(value: Any) -> Any:
    """Returns a value that fits into a message, and is equal on two hosts where the value is."""
    text = json.dumps(value, default=str)
    if len(text) <= MAX_VALUE and "NaN" not in text and "Infinity" not in text:
        return json.loads(text)
    return f"{text[:MAX_VALUE]}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _ping(connection: Connection) -> None:
    while True:
        time.sleep(messages.PING)
        connection.send(ping=True)
