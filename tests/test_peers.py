"""Processes that speak to one another, played by threads of this one: who is there, alike, failed, gone or silent."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mlm.errors import InputError, StopError
from mlm.pod import hub
from mlm.pod.hub import End
from mlm.pod.peers import Peers

FACTS = {"config.optimizer.learning_rate": 0.1, "code mlm/run.py": "abc"}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(hub, "PING", 0.1)
    monkeypatch.setattr(hub, "COLLECT", 0.3)
    monkeypatch.setattr(hub, "LINGER", 0.5)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


class Several:
    """Some processes, all in one; `ends` is what each heard of the run's end."""

    def __init__(self, processes: int, present: list[int] | None = None):
        self.address, self.processes = free_address(), processes
        self.ends: dict[int, End] = {}
        self.peers: dict[int, Peers] = {}
        for process in range(processes) if present is None else present:
            self.add(process)

    def add(self, process: int) -> Peers:
        heard = self.ends
        self.peers[process] = Peers(self.address, self.processes, process, lambda end: heard.setdefault(process, end))
        return self.peers[process]

    def ready(self, facts: dict[int, dict] | None = None, *, start_timeout=5.0, heartbeat=1.0) -> dict[int, object]:
        """Returns what `ready` gave to each that came through, or the error that it raised."""
        found: dict[int, object] = {}

        def one(process: int) -> None:
            mine = (facts or {}).get(process, FACTS)
            try:
                found[process] = self.peers[process].ready(mine, start_timeout=start_timeout, heartbeat=heartbeat)
            except StopError as error:
                found[process] = error

        threads = [threading.Thread(target=one, args=(process,), daemon=True) for process in self.peers]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + start_timeout + 3
        while len(found) < len(threads) and time.monotonic() < deadline and len(self.ends) < len(threads):
            time.sleep(0.02)
        return found

    def until_ended(self, *processes: int, seconds: float = 5.0) -> list[End]:
        deadline = time.monotonic() + seconds
        while not set(processes) <= self.ends.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert set(processes) <= self.ends.keys(), f"only {sorted(self.ends)} heard of the end"
        return [self.ends[process] for process in processes]


def test_all_alike_go_and_meet_and_leave():
    several = Several(3)
    found = several.ready()
    assert len(set(found.values())) == 1
    assert set(found) == {0, 1, 2}
    host, _, port = found[0].rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    passed: list[int] = []

    def meet(process: int) -> None:
        several.peers[process].barrier("data")
        passed.append(process)

    threads = [threading.Thread(target=meet, args=(process,), daemon=True) for process in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert not passed
    meet(2)
    for thread in threads:
        thread.join(3)
    assert sorted(passed) == [0, 1, 2]
    for process in (2, 1, 0):
        several.peers[process].close()
    time.sleep(0.3)
    assert several.ends == {}, "a goodbye is no failure"


def test_listens_on_its_address_alone():
    several = Several(1)
    port = int(several.address.rpartition(":")[2])
    with contextlib.closing(socket.socket()) as other:
        assert other.connect_ex(("127.0.0.2", port)) != 0
        assert other.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("odd", [0, 2])
def test_one_that_differs_is_named(odd):
    several = Several(4)
    several.ready({odd: FACTS | {"config.optimizer.learning_rate": 0.2}})
    for end in several.until_ended(0, 1, 2, 3):
        assert (end.process, end.code, end.kind) == (odd, 2, "exception")
        assert "differs from 3 others in config.optimizer.learning_rate (0.2, not 0.1)" in end.what


def test_a_key_that_one_lacks():
    several = Several(2)
    several.ready({1: {"config.optimizer.learning_rate": 0.1}})
    end = several.until_ended(0, 1)[0]
    assert "host 1" in end.sentence
    assert "differs from host 0 in code mlm/run.py (None, not 'abc')" in end.what


def test_missing_ones_are_named():
    several = Several(4, present=[0, 2])
    begin = time.monotonic()
    several.ready(start_timeout=1.0)
    end = several.until_ended(0, 2)[0]
    assert time.monotonic() - begin < 3
    assert end.code == 1
    assert "within 1 s (config.pod.start_timeout) hosts 1, 3 never came" in end.what


def test_one_that_never_gets_ready():
    several = Several(2)

    def ready() -> None:
        with contextlib.suppress(StopError):
            several.peers[0].ready(FACTS, start_timeout=0.5, heartbeat=1.0)

    threading.Thread(target=ready, daemon=True).start()
    assert "host 1 came, and never got ready" in several.until_ended(0, 1)[1].what


def test_no_coordinator():
    several = Several(2, present=[1])
    error = several.ready(start_timeout=0.5)[1]
    assert isinstance(error, StopError)
    assert f"host 0 has not answered at {several.address} within 0.5 s" in str(error)


def test_a_failure_is_heard_by_all_before_and_after_the_start():
    """One that has failed before the others came waits for them, and tells them."""
    several = Several(3, present=[0, 1])
    failed = End(1, "b", "exception", 4, "shards/x: is damaged")
    teller = threading.Thread(target=several.peers[1].tell, args=(failed,), daemon=True)
    teller.start()
    assert several.until_ended(0)[0] == failed
    several.add(2)
    assert several.until_ended(2)[0] == failed
    teller.join(3)
    assert 1 not in several.ends, "who tells it is not told"


def test_the_coordinator_fails_first():
    several = Several(2, present=[0])
    failed = End(0, "a", "exception", 2, "config.train.steps = -1: must be")
    teller = threading.Thread(target=several.peers[0].tell, args=(failed,), daemon=True)
    teller.start()
    time.sleep(0.3)
    assert teller.is_alive(), "it waits for the other one"
    several.add(1)
    assert several.until_ended(1)[0] == failed


def test_of_hangs_the_one_that_is_behind():
    several = Several(3)
    several.ready()
    for process, step, phase in ((0, 8, "step"), (1, 8, "input"), (2, 9, "input")):
        end = End(process, "h", "hang", 1, "no progress for 9 s", step, phase)
        threading.Thread(target=several.peers[process].tell, args=(end,), daemon=True).start()
        time.sleep(0.05)  # the one that is behind is not the first to find it
    witness = several.peers[0]
    with witness._changed:
        assert witness._changed.wait_for(lambda: "end" in witness._heard, 5)
    assert several.peers[0]._hub._end.process == 1


def test_twice_the_same():
    several = Several(2)
    first = several.peers[1]
    several.peers[0]._wait("connected", 5), first._wait("connected", 5)
    time.sleep(0.2)
    several.add(1)
    assert "process 1 is there already" in several.until_ended(1)[0].what
    assert 0 not in several.ends


def test_another_number_of_processes():
    several = Several(3, present=[0])
    other: list[End] = []
    Peers(several.address, 4, 1, other.append)
    assert "was started with --processes=4, host 0 with 3" in several.until_ended(0)[0].what
    assert several.ends[0].code == 2


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "no sign of life for 1")])
def test_a_process_that_is_killed_or_stopped(number, words):
    several = Several(2, present=[0])
    program = (
        "import sys, time\nfrom mlm.pod.peers import Peers\n"
        "p = Peers(sys.argv[1], 2, 1, lambda end: None)\n"
        "p.ready({'a': 1}, start_timeout=30, heartbeat=1)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, several.address], stdout=subprocess.PIPE, text=True)
    try:
        several.ready({0: {"a": 1}}, start_timeout=30, heartbeat=1.0)
        assert child.stdout.readline() == "ready\n"
        begin = time.monotonic()
        os.kill(child.pid, number)
        end = several.until_ended(0)[0]
        assert time.monotonic() - begin < 3
        assert (end.process, end.code) == (1, 1)
        assert words in end.what
    finally:
        child.kill()
        child.wait()


def test_strangers_do_no_harm():
    several = Several(2)
    host, _, port = several.address.rpartition(":")
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"hello": "x"}\n', json.dumps([1]).encode() + b"\n", b""):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(text)
    assert len(several.ready()) == 2


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "1.2.3.4:0", "1.2.3.4:99999", "1.2.3.4:x"])
def test_bad_address(address):
    with pytest.raises(InputError, match="must be HOST:PORT"):
        Peers(address, 2, 1, print)


def test_address_of_another_machine():
    with pytest.raises(InputError, match="process 0 can't listen there"):
        Peers("192.0.2.1:7777", 2, 0, print)


def test_the_coordinator_leaves_when_all_have_heard():
    """Its end would be the end of the hub; those who have heard it, or never will, are not waited for."""
    several = Several(3)
    several.ready()
    failed = End(2, "c", "exception", 2, "config.x: must be")
    threading.Thread(target=several.peers[2].tell, args=(failed,), daemon=True).start()
    several.until_ended(0, 1)
    left = threading.Thread(target=several.peers[0].leave, daemon=True)
    left.start()
    left.join(0.2)
    assert left.is_alive(), "host 1 is still there"
    several.peers[1].leave()
    left.join(2)
    assert not left.is_alive()
