"""A stranger, with and without the token, against a real coordinator and real clients: the run goes on."""

import contextlib
import json
import pathlib
import re
import socket
import threading
import time

import pytest

from mlm.cluster import coordinator, messages
from mlm.errors import StopError
from tests import strangers
from tests.clients import FINGERPRINT, Several


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(messages, "PING", 0.1)
    monkeypatch.setattr(coordinator, "LINGER", 0.5)
    yield
    Several.abandon()


@pytest.fixture
def running(tmp_path) -> Several:
    several = Several(tmp_path, 2, heartbeat=5.0)
    several.ready()
    return several


def megabytes_of_this_process() -> float:
    return int(re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1024


def member(several: Several, process: int, **changed) -> socket.socket:
    """Returns the connection of one that knows the token and has been let in."""
    token = bytes.fromhex(several.token.read_text())
    connection, challenge = strangers.connect(several.where)
    connection.sendall(strangers.hello(token, challenge, process, several.processes, **changed))
    assert b'{"welcome": "' in connection.recv(200)
    return connection


@pytest.mark.parametrize("line", strangers.WRONG, ids=range(len(strangers.WRONG)))
def test_a_wrong_hello_in_the_middle_of_a_run(running, line, capfd):
    strangers.send(running.where, line)
    running.meet("data")
    assert capfd.readouterr().err == "", "a thread died of it"


@pytest.mark.parametrize(("process", "processes"), [(0, 2), (1, 2), (1, 3), (5, 6), (1, 1)])
def test_a_forged_proof(running, process, processes):
    assert strangers.forge(running.where, process, processes) == (
        b'{"refused": "token"}\n' if process < processes else b""
    )
    running.meet("data")


def test_a_forged_proof_before_the_start(tmp_path):
    """It takes nobody's place, and does not change how many there are."""
    several = Several(tmp_path, 2, present=[0])
    assert strangers.forge(several.where, 1, 2) == b'{"refused": "token"}\n'
    assert strangers.forge(several.where, 1, 3) == b'{"refused": "token"}\n'
    several.add(1)
    assert len(several.ready()) == 2


def test_a_forged_end(running):
    end = json.dumps({"failed": strangers.END | {"code": 1}}).encode() + b"\n"
    strangers.send(running.where, end)
    strangers.forge(running.where, 1, 2, end)
    running.meet("data")


def test_a_hello_that_was_recorded(tmp_path):
    """What a real client sent, sent once more on another connection."""
    several = Several(tmp_path, 2, present=[0])
    real, recorded = several.where, bytearray()
    relay = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                target.sendall(data)

    def serve() -> None:
        one, other = relay.accept()[0], socket.create_connection(real)
        threading.Thread(target=copy, args=(other, one, bytearray()), daemon=True).start()
        copy(one, other, recorded)

    threading.Thread(target=serve, daemon=True).start()
    several.where = relay.getsockname()
    several.add(1)
    several.ready()
    stranger, _ = strangers.connect(real)
    with stranger:
        stranger.sendall(bytes(recorded))
        assert b'"hello": 1' in recorded
        assert strangers.answer(stranger) in (b'{"refused": "token"}\n', b""), "b'': reset, as more was sent"
    several.meet("data")


def test_a_right_hello_that_comes_late(tmp_path, monkeypatch):
    """It is dropped before: no connection without a proof is kept."""
    monkeypatch.setattr(messages, "HANDSHAKE", 0.3)
    several = Several(tmp_path, 2, present=[0])
    stranger, challenge = strangers.connect(several.where)
    assert strangers.answer(stranger) == b""
    with contextlib.suppress(ConnectionError):
        token = bytes.fromhex(several.token.read_text())
        stranger.sendall(strangers.hello(token, challenge, 1, 2))
    several.add(1)
    assert len(several.ready()) == 2


def test_a_second_right_hello_is_refused(running):
    token = bytes.fromhex(running.token.read_text())
    stranger, challenge = strangers.connect(running.where)
    stranger.sendall(strangers.hello(token, challenge, 1, 2))
    assert strangers.answer(stranger) == b'{"refused": "taken", "host": "w-1"}\n'
    running.meet("data")


def test_300_megabytes_without_a_newline(running):
    before = megabytes_of_this_process()
    stranger, _ = strangers.connect(running.where)
    with stranger:
        taken = strangers.flood(stranger)
    assert taken < 300, "all of it was read"
    assert megabytes_of_this_process() < before + 20
    running.meet("data")


def test_300_megabytes_of_a_process_end_its_connection(tmp_path):
    several = Several(tmp_path, 2, present=[0])
    several.until_connected(0)
    before = megabytes_of_this_process()
    with member(several, 1) as connection:
        assert strangers.flood(connection) < 300
    assert megabytes_of_this_process() < before + 20
    assert "it sent something that is not a message of a run" in several.until_ended(0)[0].what


def test_500_idle_connections(tmp_path, monkeypatch):
    """Those that are in go on, one that comes meanwhile gets in; of the idle ones, most are closed at once."""
    monkeypatch.setattr(messages, "HANDSHAKE", 60)
    several = Several(tmp_path, 3, present=[0, 1])
    several.until_connected(0, 1)
    silent = strangers.idle(several.where, 500)
    assert len(silent) == 500
    several.add(2)
    several.until_connected(2)
    inside = several.clients[0]._coordinator
    assert len(inside._strangers) <= coordinator.STRANGERS + 3
    for each in silent[: 500 - coordinator.STRANGERS - 3]:
        strangers.answer(each)  # returns only when it is closed
    assert len(several.ready()) == 3
    several.meet("data")
    monkeypatch.setattr(messages, "HANDSHAKE", 0.1)
    for each in silent:
        strangers.answer(each)
        each.close()
    several.meet("more data")


READY = {"ready": FINGERPRINT}
FAILED = strangers.END | {"process": 1, "code": 3}
REFUSED = {
    "code 0": {"failed": FAILED | {"code": 0}},
    "code 256": {"failed": FAILED | {"code": 256}},
    "code true": {"failed": FAILED | {"code": True}},
    "code text": {"failed": FAILED | {"code": "3"}},
    "another process": {"failed": FAILED | {"process": 0}},
    "kind gone": {"failed": FAILED | {"kind": "gone"}},
    "kind list": {"failed": FAILED | {"kind": ["hang"]}},
    "step": {"failed": FAILED | {"step": -1}},
    "what": {"failed": FAILED | {"what": None}},
    "a field too few": {"failed": {key: value for key, value in FAILED.items() if key != "phase"}},
    "a field too many": {"failed": FAILED | {"x": 1}},
    "no end": {"failed": "all"},
    "1e400": '{"ready": {"a": 1e400}}',
    "NaN": '{"ready": {"a": NaN}}',
    "ready": {"ready": [1]},
    "barrier": {"barrier": 7},
    "ping": {"ping": 1},
    "unknown": {"go": "127.0.0.1:1"},
    "deep": '{"barrier": ' + "[" * 60_000,
    "hello": {"hello": 1},
    "no json": "all is well",
}


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_process_may_not_say_ends_its_connection(tmp_path, message):
    """That is the broken connection of a real process, which ends the run, with a message of our own and code 1."""
    several = Several(tmp_path, 2, present=[0])
    several.until_connected(0)
    with member(several, 1) as connection:
        connection.sendall((message if isinstance(message, str) else json.dumps(message)).encode() + b"\n")
        end = several.until_ended(0)[0]
    assert (end.process, end.kind, end.code, end.host) == (1, "gone", 1, "w")
    assert end.what == "is gone: it sent something that is not a message of a run, and its connection was closed"


def test_ready_twice(tmp_path):
    several = Several(tmp_path, 3, present=[0])
    several.until_connected(0)
    with member(several, 1) as connection:
        connection.sendall((json.dumps(READY).encode() + b"\n") * 2)
        assert several.until_ended(0)[0].kind == "gone"


def test_escape_sequences_reach_nobody(tmp_path):
    """Of the host's name, of the reason, of what differs."""
    clean = "?]0;pwned??[2J??31m? host 0: all is well"
    several = Several(tmp_path, 2, present=[0])
    several.until_connected(0)
    with member(several, 1, host=messages.one_line(strangers.ESCAPES)) as connection:
        end = {"failed": FAILED | {"what": strangers.ESCAPES, "host": strangers.ESCAPES, "phase": strangers.ESCAPES}}
        connection.sendall(json.dumps(end).encode() + b"\n")
        found = several.until_ended(0)[0]
    assert (found.code, found.what, found.host, found.phase) == (3, clean, clean, clean)
    assert found.sentence.isprintable()


def test_escape_sequences_in_a_hello(tmp_path):
    """The name that is proved is the name that is shown, so this one is none of ours."""
    several = Several(tmp_path, 2, present=[0])
    token = bytes.fromhex(several.token.read_text())
    stranger, challenge = strangers.connect(several.where)
    with stranger:
        stranger.sendall(strangers.hello(token, challenge, 1, 2, strangers.ESCAPES))
        assert strangers.answer(stranger) == b'{"refused": "token"}\n'
    assert several.ends == {}


def test_escape_sequences_in_what_differs(tmp_path):
    several = Several(tmp_path, 2, present=[0])
    several.until_connected(0)
    with member(several, 1) as connection:
        odd = {"ready": {f"config.{strangers.ESCAPES}": strangers.ESCAPES}}
        connection.sendall(json.dumps(odd).encode() + b"\n")
        several.ready()
        assert several.until_ended(0)[0].what.isprintable()


def test_jax_port_that_is_held_is_waited_for(tmp_path, capfd):
    several = Several(tmp_path, 2)
    with socket.create_server(("127.0.0.1", several.jax_port)) as held:
        threading.Timer(1.0, held.close).start()
        begin = time.monotonic()
        assert set(several.ready().values()) == {("127.0.0.1", several.jax_port)}
        assert time.monotonic() - begin > 0.9
    err = capfd.readouterr().err
    assert re.search(rf"^mlm: port {several.jax_port} of 127.0.0.1 is held by .* \(process \d+\); stop that", err)
    assert err.count("\n") == 1


def test_jax_port_that_stays_held(tmp_path):
    several = Several(tmp_path, 2, start_timeout=1.0, heartbeat=5.0)
    with socket.create_server(("127.0.0.1", several.jax_port)):
        error = several.ready()[0]
        assert isinstance(error, StopError)
        assert error.code == 1
        assert f"port {several.jax_port} of 127.0.0.1 is held by" in str(error)
        assert "set another port (config.pod.jax_port)" in str(error)


def test_port_of_an_earlier_attempt(tmp_path):
    """Its coordinator still listens: the next attempt's processes wait, and then get in with the new token."""
    several = Several(tmp_path, 2)
    several.until_connected(0, 1)
    old = dict(several.clients)
    several.add(1)  # of the next attempt, with the token of this one
    threading.Timer(0.5, lambda: [old[process].close() for process in (1, 0)]).start()
    several.add(0)
    assert len(several.ready()) == 2
    several.meet("data")
