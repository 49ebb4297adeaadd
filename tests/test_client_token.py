"""How a process finds the coordinator and both prove that they belong to the run; and why one can't, in a sentence."""

import contextlib
import json
import re
import socket
import threading

import pytest

from mlm.cluster import coordinator, messages
from mlm.errors import InputError, StopError
from mlm.paths import UPath
from tests.clients import FINGERPRINT, Several


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(messages, "PING", 0.1)
    monkeypatch.setattr(coordinator, "LINGER", 0.5)
    yield
    Several.abandon()


def refused(several: Several, process: int = 1, **changed) -> str:
    """Returns why a process could not connect within a second."""
    with pytest.raises(StopError) as raised:
        several.add(process, start_timeout=1.0, **changed).ready(FINGERPRINT)
    assert several.ends == {}
    return str(raised.value)


def test_token_is_the_owners_and_new_for_each_attempt(tmp_path):
    several = Several(tmp_path, 1)
    assert several.token.stat().st_mode & 0o777 == 0o600
    first = several.token.read_text()
    assert len(bytes.fromhex(first)) == 32
    several.clients[0].close()
    several.add(0)
    assert several.token.read_text() != first
    assert [path.name for path in several.token.parent.iterdir()] == ["token"]


def test_token_of_an_earlier_attempt_is_read_again(tmp_path):
    several = Several(tmp_path, 2, present=[0])
    right = several.token.read_text()
    several.token.write_text("ab" * 32)
    late = several.add(1)
    assert not late._wait("connected", 0.5)
    several.token.write_text(right)
    several.until_connected(1)
    assert len(several.ready()) == 2


def test_token_that_stays_wrong(tmp_path):
    several = Several(tmp_path, 2, present=[0])
    several.token.write_text("ab" * 32)
    message = refused(several)
    assert f"the token in {several.token} is not that of what listens at {several.address}" in message
    assert "is --workdir a folder that all hosts share" in message


@pytest.mark.parametrize("content", [None, "", "ab" * 31, "zz" * 32])
def test_token_that_is_not_there(tmp_path, content):
    several = Several(tmp_path, 2, present=[0])
    other = tmp_path / "other"
    if content is None:
        assert f"{other} is not there" in refused(several, token=other)
    else:
        other.write_text(content)
        assert f"{other} can't be read (not 64 hexadecimal digits)" in refused(several, token=other)


def test_token_that_cannot_be_written(tmp_path):
    (tmp_path / "hosts").write_text("a file")
    with pytest.raises(InputError, match=r"token: host 0 can't write it \(.*\); choose another --workdir"):
        Several(tmp_path, 1, present=[]).add(0, token=tmp_path / "hosts" / "token")


def test_token_in_a_bucket(bucket, tmp_path):
    several = Several(tmp_path, 2, present=[], start_timeout=20.0)
    several.token = UPath(bucket) / "first" / "hosts" / "token"
    for process in (0, 1):
        several.add(process)
    assert len(several.ready()) == 2
    several.meet("data")


def false_coordinator(say: list[bytes]) -> tuple[str, int]:
    """Listens as the coordinator would and sends some lines to whoever connects; returns where."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection = server.accept()[0]
            with contextlib.suppress(OSError):
                for line in say:
                    connection.sendall(line)
                connection.recv(1 << 16)
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()


GREETING = json.dumps({"challenge": "0" * 64}).encode() + b"\n"


@pytest.mark.parametrize(
    "answer",
    [
        {"welcome": "0" * 64},
        {"welcome": "é" * 64},
        {"welcome": None},
        {"refused": "taken", "host": ["x"]},
        {
            "end": {
                "process": 0,
                "host": "h",
                "kind": "exception",
                "code": 1,
                "what": "x",
                "step": None,
                "phase": "start",
            }
        },
        {"go": "127.0.0.1:1"},
    ],
)
def test_who_cannot_prove_that_it_is_the_coordinator_is_not_believed(tmp_path, answer):
    several = Several(tmp_path, 2, present=[0])
    several.where = false_coordinator([GREETING, json.dumps(answer).encode() + b"\n"])
    message = refused(several)
    assert re.search("does not answer like host 0|is not that of what listens at", message)


def test_a_false_coordinator_writes_no_escape_sequences(tmp_path):
    several = Several(tmp_path, 2, present=[0])
    other = {"refused": "taken", "host": "\x1b]0;pwned\x07\u202e\x9b31m\nx"}
    several.where = false_coordinator([GREETING, json.dumps(other).encode() + b"\n"])
    assert "from ?]0;pwned???31m x; stop" in refused(several)


def test_a_name_that_does_not_resolve_yet(tmp_path, monkeypatch):
    """As that of a pod of Kubernetes which is about to start: both ask again."""
    resolve, known = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host, *arguments, **keywords):
        if host == "train-0.train" and not known.is_set():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host == "train-0.train" else host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    several = Several(tmp_path, 2, present=[])
    several.where = ("train-0.train", several.where[1])
    assert "the coordinator's name train-0.train does not resolve" in refused(several)
    with pytest.raises(
        StopError, match=r"train-0.train: the name does not resolve .* \(waited 0.6 s, config.pod.start_t"
    ):
        several.add(0, start_timeout=0.6)
    threading.Timer(0.7, known.set).start()
    several.add(0)
    assert several.ready() == dict.fromkeys((0, 1), ("train-0.train", several.jax_port))
