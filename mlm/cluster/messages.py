"""The messages that the processes of a run send each other: JSON objects, one a line.

Both sides first prove that they belong to the run. The coordinator greets: {"challenge": hex}. A process answers
    {"hello": process, "processes", "host", "challenge": hex, "proof": hex}
and receives {"welcome": proof}, or {"refused": "token"} or {"refused": "taken", "host"}. Then a process sends
    {"ready": fingerprint}     its config and data are good; see fingerprints.py
    {"barrier": name}, {"failed": Termination}, {"bye": true}, {"ping": true}
and the coordinator {"go": true}, {"barrier": name}, {"end": Termination}, {"ping": true}.

A proof is an HMAC-SHA256 of both challenges, keyed by the token of this attempt, which lies in the workdir. Whatever
comes over a socket is checked here first; anything else than the above raises ValueError.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import math
import re
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

LIMIT = 1 << 16  # bytes of a message
PING = 1.0  # seconds between two pings
HEARTBEAT = 60.0  # seconds of silence that end a connection, until config.pod.heartbeat is known
HANDSHAKE = 5.0  # seconds in which the other side must have proved that it belongs to the run
MAX_PROCESSES = 1 << 20
MAX_TEXT, MAX_NAME, MAX_PHASE = 2000, 200, 40  # characters of a sentence, of a host or a barrier, of a phase
OWN_KINDS = ("exception", "signal", "hang")  # of termination, that a process reports of itself
PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step


def one_line(text: Any, limit: int = MAX_TEXT) -> str:
    """Returns text from the network in one line without control, format or bidirectional characters, cut to `limit`."""
    if not isinstance(text, str):
        raise ValueError("not a text")
    text = " ".join(text[: 2 * limit].split())
    return "".join(c if c.isprintable() else "?" for c in text)[:limit]


def integer(value: Any, low: int, high: int) -> int:
    """Returns an integer within [low, high]; true and false are not integers."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"not an integer from {low} to {high}")
    return value


def hexadecimal(value: Any) -> str:
    """Returns the 64 digits of a challenge or a proof."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError("not 64 hexadecimal digits")
    return value


def prove(token: bytes, role: str, *parts: str | int) -> str:
    """Returns the proof that the sender of `parts` knows the token; it differs between the two roles."""
    return hmac.new(token, json.dumps([role, *parts]).encode(), hashlib.sha256).hexdigest()


def read_hello(message: dict[str, Any]) -> tuple[int, int, str, str, str]:
    """Returns (process, processes, host, challenge, proof) of a stranger's hello; raises ValueError."""
    processes = integer(message.get("processes"), 1, MAX_PROCESSES)
    process = integer(message.get("hello"), 0, processes - 1)
    host, challenge, proof = (message.get(name) for name in ("host", "challenge", "proof"))
    return process, processes, one_line(host, MAX_NAME), hexadecimal(challenge), hexadecimal(proof)


@dataclasses.dataclass(frozen=True)
class Termination:
    """Why a run ends: which process ends it, where it was, and the exit code of all processes, never 0."""

    process: int
    host: str
    kind: str  # one of OWN_KINDS, "gone" (its connection broke) or "silent" (stopped, or cut off)
    code: int
    what: str  # a sentence; for "gone" and "silent", the predicate of a sentence that begins with the host
    step: int | None = None
    phase: str = "start"

    @property
    def sentence(self) -> str:
        """The message that other processes show."""
        verb = {"hang": "hung: ", "signal": "was asked to end: ", "exception": "failed: "}.get(self.kind, "")
        return f"host {self.process} ({self.host}) {verb}{self.what}"

    @classmethod
    def read(cls, fields: Any, kinds: tuple[str, ...] = (*OWN_KINDS, "gone", "silent")) -> Self:
        """Checks the fields of a termination that came over a connection; raises ValueError."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or fields.keys() != names or fields["kind"] not in kinds:
            raise ValueError("not a termination")
        return cls(
            integer(fields["process"], 0, MAX_PROCESSES),
            one_line(fields["host"], MAX_NAME),
            fields["kind"],
            integer(fields["code"], 1, 255),
            one_line(fields["what"]),
            None if fields["step"] is None else integer(fields["step"], 0, 1 << 62),
            one_line(fields["phase"], MAX_PHASE),
        )


class Connection:
    """A connection: any thread may send, one receives."""

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._lock = threading.RLock()  # a signal handler sends too
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_timeout(HEARTBEAT)
        self._file = connected.makefile("rb")

    def set_timeout(self, timeout: float) -> None:
        """Sets the seconds of silence after which receiving raises TimeoutError."""
        self._socket.settimeout(timeout)

    def send(self, **message: Any) -> None:
        """Sends a message; does nothing if the other side is gone, which the receiving thread will notice."""
        data = json.dumps(message, allow_nan=False).encode() + b"\n"
        if len(data) > LIMIT:
            raise ValueError(f"a message of {len(data)} bytes; at most {LIMIT} are allowed")
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message, of at most `LIMIT` bytes, None at the end; raises OSError or ValueError."""
        line = self._file.readline(LIMIT)
        if not line:
            return None
        if not line.endswith(b"\n"):
            raise ValueError("a line that is too long or cut off")
        try:
            message = json.loads(line.decode(), parse_constant=_finite, parse_float=_finite)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message

    def receive_all(self, handle: Callable[[dict[str, Any]], None]) -> tuple[str, str]:
        """Handles messages until the connection ends; returns `kind` and `what` of a termination that says why."""
        try:
            while (message := self.receive()) is not None:
                handle(message)
        except TimeoutError:
            return "silent", f"has given no sign of life for {self._socket.gettimeout():g} s: it is stopped, or cut off"
        except ValueError:
            return "gone", "is gone: it sent something that is not a message of a run, and its connection was closed"
        except OSError:
            pass
        return "gone", "is gone: its connection broke without warning"

    def close(self) -> None:
        """Closes it, for both sides and for the receiving thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes it and frees its file descriptors; only for the receiving thread."""
        self.close()
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._socket.close()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
