"""What may come over a socket, and what of it may be shown."""

import json
import math
import re
import socket
import sys
import unicodedata

import pytest

from mlm.cluster import messages
from mlm.cluster.messages import Connection, Termination, one_line, prove

END = Termination(1, "w-1", "hang", 1, "no progress for 9 s", 8, "input")


def pair() -> tuple[socket.socket, Connection]:
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver = Connection(server.accept()[0])
    server.close()
    return sender, receiver


@pytest.fixture
def ends():
    sender, receiver = pair()
    yield sender, receiver
    sender.close()
    receiver.release()


def test_no_control_character_is_ever_shown():
    """C0, C1, DEL, surrogates, line separators, what turns the direction of writing, what nobody sees."""
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            assert one_line(f"a{character}b") in ("a?b", "a b"), hex(code)
    assert one_line("Überraschung: 学習 ✓ £5") == "Überraschung: 学習 ✓ £5"


def test_text_is_one_line_and_not_too_long():
    assert one_line("one\n\ttwo \r\n three\u2028four") == "one two three four"
    assert one_line("x" * 100_000) == "x" * messages.MAX_TEXT
    assert one_line("x" * 100, 10) == "x" * 10
    for other in (None, 7, b"x", ["x"]):
        with pytest.raises(ValueError, match="not a text"):
            one_line(other)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 6, [1]])
def test_integer(value):
    assert [messages.integer(each, 0, 5) for each in (0, 5)] == [0, 5]
    with pytest.raises(ValueError, match="not an integer"):
        messages.integer(value, 0, 5)


def test_a_termination_comes_as_it_was_sent():
    fields = json.loads(json.dumps(END.__dict__))
    assert Termination.read(fields) == END
    assert Termination.read(fields | {"step": None}).step is None
    with pytest.raises(ValueError, match="not a termination"):
        Termination.read(fields | {"kind": "gone"}, messages.OWN_KINDS)


NO_END = [{"code": 0}, {"code": -9}, {"code": 256}, {"process": -1}, {"process": 0.0}, {"kind": "done"}, {"kind": None}]
NO_PLACE = [{"step": "8"}, {"step": math.nan}, {"what": 7}, {"phase": None}, {"host": {}}, {"more": 1}]


@pytest.mark.parametrize("changed", [*NO_END, *NO_PLACE])
def test_a_termination_of_which_something_is_wrong(changed):
    with pytest.raises(ValueError, match="not a"):
        Termination.read(END.__dict__ | changed)


@pytest.mark.parametrize("fields", [None, "end", [], 1, {}, {"process": 1}])
def test_what_is_no_termination(fields):
    with pytest.raises(ValueError, match="not a termination"):
        Termination.read(fields)


def test_proofs():
    """It differs for another token, another role, or anything else in the hello."""
    first = prove(b"a" * 32, "process", "c1", "c2", 1, 2, "host")
    others = [
        prove(b"b" * 32, "process", "c1", "c2", 1, 2, "host"),
        prove(b"a" * 32, "coordinator", "c1", "c2", 1, 2, "host"),
        prove(b"a" * 32, "process", "c2", "c1", 1, 2, "host"),
        prove(b"a" * 32, "process", "c1", "c2", 12, "host"),
        prove(b"a" * 32, "process", "c1", "c2", 1, 2, "other"),
    ]
    assert len({first, *others}) == 6
    assert re.fullmatch("[0-9a-f]{64}", first)


def test_messages_arrive(ends):
    sender, receiver = ends
    Connection(sender.dup()).send(ping=True)
    sender.sendall(b'{"a": "\xc3\xa9"')
    sender.sendall(b"}\n")
    assert receiver.receive() == {"ping": True}
    assert receiver.receive() == {"a": "é"}
    sender.close()
    assert receiver.receive() is None


def test_the_longest_message(ends):
    sender, receiver = ends
    frame = len(json.dumps({"a": ""})) + 1
    other = Connection(sender.dup())
    other.send(a="x" * (messages.LIMIT - frame))
    assert len(receiver.receive()["a"]) == messages.LIMIT - frame
    with pytest.raises(ValueError, match="a message of 65537 bytes"):
        other.send(a="x" * (messages.LIMIT - frame + 1))
    sender.sendall(b'{"a": "' + b"x" * messages.LIMIT + b'"}\n')
    with pytest.raises(ValueError, match="too long"):
        receiver.receive()
    other.release()


NO_NUMBER = [
    b"1e400",
    b'{"a": 1e400}',
    b'{"a": [-1e999]}',
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": %s}' % (b"9" * 5000),
]
NO_OBJECT = [b'"x"', b"[]", b"", b"{", b'{"a": "\xff"}', b"[" * 65_000, b'{"a":' * 13_000, "{}".encode("utf-16")]


@pytest.mark.parametrize("line", [*NO_NUMBER, *NO_OBJECT])
def test_what_is_no_message(ends, line):
    sender, receiver = ends
    sender.sendall(line + b"\n")
    with pytest.raises(ValueError):
        receiver.receive()


def test_a_message_that_is_cut_off(ends):
    sender, receiver = ends
    sender.sendall(b'{"bye": true}')
    sender.close()
    with pytest.raises(ValueError, match="cut off"):
        receiver.receive()


def test_what_cannot_be_sent(ends):
    with pytest.raises(ValueError, match="not JSON compliant"):
        ends[1].send(a=math.nan)


def test_sending_to_nobody_does_nothing(ends):
    sender, receiver = ends
    sender.close()
    for _ in range(3):
        receiver.send(ping=True)
    receiver.release()
    receiver.send(ping=True)
