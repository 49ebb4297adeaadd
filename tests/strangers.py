"""What a stranger may send to the coordinator's port, without the token of the run or with it."""

import contextlib
import hashlib
import hmac
import json
import socket
import time

ESCAPES = "\x1b]0;pwned\x07\x1b[2J\u202e\x9b31m\x00\nhost 0: all is well"
END = {"process": 0, "host": "w-0", "kind": "exception", "code": 0, "what": "done", "step": None, "phase": "done"}
WRONG = (  # instead of a hello
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
    b"\xff\xfe\x00\n",
    b"",
    b"\n",
    b"{}\n",
    b"[1]\n",
    b'{"hello": "x"}\n',
    b'{"hello": 1, "processes": 2, "host": "h"}\n',
    b'{"hello": 1, "processes": 1e400, "host": "h"}\n',
    b'{"hello": -1, "processes": 2, "host": "h"}\n',
    b'{"hello": true, "processes": 2, "host": "h", "challenge": null, "proof": null}\n',
    b'{"hello": 1, "processes": 2, "host": "\\ud800", "challenge": "%s", "proof": "%s"}\n'
    % (b"0" * 64, b"\xc3\xa9" * 64),
    b'{"hello": ' + b"9" * 5_000 + b"}\n",
    b"[" * 60_000 + b"\n",
    b'{"a":' * 12_000 + b"\n",
    json.dumps({"failed": END}).encode() + b"\n",
    json.dumps({"end": END}).encode() + b"\n",
    b'{"bye": true}\n',
    b'{"ready": {"a": 1e400}}\n',
)


def connect(where: tuple[str, int]) -> tuple[socket.socket, str]:
    """Returns a connection and the challenge that it was greeted with."""
    stranger = socket.create_connection(where, timeout=10)
    greeting = b""
    while not greeting.endswith(b"\n"):
        greeting += stranger.recv(1)
    return stranger, json.loads(greeting)["challenge"]


def hello(token: bytes, challenge: str, process: int, processes: int, host: str = "w") -> bytes:
    own = "5" * 64
    signed = json.dumps(["process", challenge, own, process, processes, host]).encode()
    proof = hmac.new(token, signed, hashlib.sha256).hexdigest()
    line = {"hello": process, "processes": processes, "host": host, "challenge": own, "proof": proof}
    return json.dumps(line).encode() + b"\n"


def answer(stranger: socket.socket) -> bytes:
    """Returns all that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := stranger.recv(1 << 16):
            found += data
    return found


def send(where: tuple[str, int], line: bytes) -> None:
    """Sends something instead of a hello."""
    with contextlib.suppress(ConnectionError), socket.create_connection(where, timeout=10) as stranger:
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        answer(stranger)


def forge(where: tuple[str, int], process: int, processes: int, then: bytes = b"") -> bytes:
    """Says a hello that is right but for its proof, and more; returns the answer."""
    stranger, challenge = connect(where)
    with stranger:
        stranger.sendall(hello(bytes(32), challenge, process, processes) + then)
        return answer(stranger)


def flood(stranger: socket.socket, megabytes: int = 300) -> int:
    """Sends so much without a newline; returns how many megabytes were taken before the connection broke."""
    for sent in range(megabytes):
        try:
            stranger.sendall(b"x" * (1 << 20))
        except OSError:
            return sent
    return megabytes


def idle(where: tuple[str, int], number: int) -> list[socket.socket]:
    """Returns connections that say nothing."""
    strangers = []
    deadline = time.monotonic() + 30
    while len(strangers) < number and time.monotonic() < deadline:
        with contextlib.suppress(ConnectionError):
            strangers.append(socket.create_connection(where, timeout=10))
    return strangers


def all_of_it(where: tuple[str, int], processes: int) -> int:
    """Does all of this to a run, and returns how many connections it took."""
    silent = idle(where, 500)
    for line in WRONG:
        send(where, line)
    ends = json.dumps({"failed": END | {"what": ESCAPES, "host": ESCAPES}}).encode() + b"\n"
    for process in range(processes):
        with contextlib.suppress(ConnectionError, IndexError, ValueError):
            forge(where, process, processes, ends)
            forge(where, process, processes + 1, ends)
    with contextlib.suppress(ConnectionError), socket.create_connection(where, timeout=10) as stranger:
        assert flood(stranger) < 300
    for stranger in silent:
        stranger.close()
    return len(silent) + len(WRONG) + 2 * processes + 1
