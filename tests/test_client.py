"""Processes of a run, played by threads: which are there, alike, failed, gone or silent."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mlm.cluster import client, coordinator, messages
from mlm.cluster.detect import Cluster
from mlm.cluster.messages import Termination
from mlm.errors import StopError
from tests.clients import FINGERPRINT, Several


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(messages, "PING", 0.1)
    monkeypatch.setattr(coordinator, "COLLECT", 0.3)
    monkeypatch.setattr(coordinator, "LINGER", 0.5)
    yield
    Several.abandon()


def test_all_alike_go_and_meet_and_leave(tmp_path):
    several = Several(tmp_path, 3)
    found = several.ready()
    assert len(set(found.values())) == 1
    assert set(found) == {0, 1, 2}
    assert found[0] == ("127.0.0.1", several.jax_port)
    passed: list[int] = []

    def meet(process: int) -> None:
        several.clients[process].barrier("data")
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
        several.clients[process].close()
    time.sleep(0.3)
    assert several.ends == {}, "a goodbye is no failure"


def test_listens_on_its_address_alone(tmp_path):
    several = Several(tmp_path, 1)
    port = several.where[1]
    with contextlib.closing(socket.socket()) as other:
        assert other.connect_ex(("127.0.0.2", port)) != 0
        assert other.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("odd", [0, 2])
def test_one_that_differs_is_named(tmp_path, odd):
    several = Several(tmp_path, 4)
    several.ready({odd: FINGERPRINT | {"config.optimizer.learning_rate": 0.2}})
    for end in several.until_ended(0, 1, 2, 3):
        assert (end.process, end.code, end.kind) == (odd, 2, "exception")
        assert "differs from 3 others in config.optimizer.learning_rate (0.2, not 0.1)" in end.what


def test_a_key_that_one_lacks(tmp_path):
    several = Several(tmp_path, 2)
    several.ready({1: {"config.optimizer.learning_rate": 0.1}})
    end = several.until_ended(0, 1)[0]
    assert "host 1" in end.sentence
    assert "differs from host 0 in code mlm/commands/run.py (None, not 'abc')" in end.what


def test_missing_ones_are_named(tmp_path):
    several = Several(tmp_path, 4, present=[0, 2], start_timeout=1.0)
    begin = time.monotonic()
    several.ready()
    end = several.until_ended(0, 2)[0]
    assert time.monotonic() - begin < 3
    assert end.code == 1
    assert "within 1 s (config.pod.start_timeout) hosts 1, 3 never connected" in end.what


def test_one_that_never_gets_ready(tmp_path):
    several = Several(tmp_path, 2, start_timeout=0.5)

    def ready() -> None:
        with contextlib.suppress(StopError):
            several.clients[0].ready(FINGERPRINT)

    threading.Thread(target=ready, daemon=True).start()
    assert "host 1 connected, but never got ready" in several.until_ended(0, 1)[1].what


def test_no_coordinator(tmp_path):
    several = Several(tmp_path, 2, present=[1], start_timeout=0.5)
    error = several.ready()[1]
    assert isinstance(error, StopError)
    assert f"host 0 has not answered at {several.address}; see whether it runs there" in str(error)
    assert "(tried for 0.5 s, config.pod.start_timeout)" in str(error)


def test_all_are_notified_of_a_failure_before_and_after_the_start(tmp_path):
    """One that has failed before the others came waits for them, and notifies them."""
    several = Several(tmp_path, 3, present=[0, 1])
    failed = Termination(1, "w-1", "exception", 4, "shards/x: is damaged")
    notifier = threading.Thread(target=several.clients[1].notify, args=(failed,), daemon=True)
    notifier.start()
    assert several.until_ended(0)[0] == failed
    several.add(2)
    assert several.until_ended(2)[0] == failed
    notifier.join(3)
    assert 1 not in several.ends, "the one that notifies is not notified"


def test_the_coordinator_fails_first(tmp_path):
    several = Several(tmp_path, 2, present=[0])
    failed = Termination(0, "w-0", "exception", 2, "config.train.steps = -1: must be")
    notifier = threading.Thread(target=several.clients[0].notify, args=(failed,), daemon=True)
    notifier.start()
    time.sleep(0.3)
    assert notifier.is_alive(), "it waits for the other one"
    several.add(1)
    assert several.until_ended(1)[0] == failed


def test_of_hangs_the_one_that_is_behind(tmp_path):
    several = Several(tmp_path, 3)
    several.ready()
    for process, step, phase in ((0, 8, "step"), (1, 8, "input"), (2, 9, "input")):
        end = Termination(process, "h", "hang", 1, "no progress for 9 s", step, phase)
        threading.Thread(target=several.clients[process].notify, args=(end,), daemon=True).start()
        time.sleep(0.05)  # the one that is behind is not the first to find it
    witness = several.clients[0]
    with witness._changed:
        assert witness._changed.wait_for(lambda: "end" in witness._received, 5)
    assert several.clients[0]._coordinator._termination.process == 1


def test_twice_the_same(tmp_path):
    """The second one waits, as the first may be of an earlier attempt; the run does not notice it."""
    several = Several(tmp_path, 2)
    several.until_connected(0, 1)
    second = several.add(1, host="w-second", start_timeout=0.5)
    with pytest.raises(
        StopError, match=r"process 1 is already connected, from w-1; .* \(tried for 0.5 s, config.pod.start_t"
    ):
        second.ready(FINGERPRINT)
    assert several.ends == {}


def test_another_number_of_processes(tmp_path):
    several = Several(tmp_path, 3, present=[0])
    several.add(1, processes=4)
    for end in several.until_ended(0, 1):
        assert "was started with --processes=4, host 0 with 3" in end.what
        assert end.code == 2


def test_another_number_of_processes_in_the_middle_of_a_run(tmp_path):
    """The run goes on; the one that differs is notified why it can't join."""
    several = Several(tmp_path, 2)
    several.ready()
    ends: list[Termination] = []
    pod = SimpleNamespace(port=1, jax_port=several.jax_port, start_timeout=2.0, heartbeat=1.0)
    client.Client(Cluster("test", several.address, 3, 2), pod, several.token, ends.append)
    several.meet("data")
    deadline = time.monotonic() + 5
    while not ends and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [end.code for end in ends] == [2]
    several.meet("more data")


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "no sign of life for 1")]
)
def test_a_process_that_is_killed_or_stopped(tmp_path, number, message):
    several = Several(tmp_path, 2, present=[0], start_timeout=30.0)
    program = (
        "import pathlib, sys, time, types\nfrom mlm.cluster.client import Client\n"
        "from mlm.cluster.detect import Cluster\n"
        "pod = types.SimpleNamespace(port=1, jax_port=1, start_timeout=30, heartbeat=1)\n"
        "p = Client(Cluster('test', sys.argv[1], 2, 1), pod, pathlib.Path(sys.argv[2]), print)\n"
        "p.ready({'a': 1})\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", program, several.address, str(several.token)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        several.ready({0: {"a": 1}})
        assert child.stdout.readline() == "ready\n"
        begin = time.monotonic()
        os.kill(child.pid, number)
        end = several.until_ended(0)[0]
        assert time.monotonic() - begin < 3
        assert (end.process, end.code) == (1, 1)
        assert message in end.what
    finally:
        child.kill()
        child.wait()


def test_the_coordinator_leaves_when_all_have_been_notified(tmp_path):
    """Only it notifies the others; it does not wait for those that know already, or will never connect."""
    several = Several(tmp_path, 3)
    several.ready()
    failed = Termination(2, "c", "exception", 2, "config.x: must be")
    threading.Thread(target=several.clients[2].notify, args=(failed,), daemon=True).start()
    several.until_ended(0, 1)
    left = threading.Thread(target=several.clients[0].leave, daemon=True)
    left.start()
    left.join(0.2)
    assert left.is_alive(), "host 1 is still there"
    several.clients[1].leave()
    left.join(2)
    assert not left.is_alive()


def test_long_and_infinite_values_fit_into_a_message(tmp_path):
    several = Several(tmp_path, 2)
    long = {f"config.{n}": ["part"] * 10_000 for n in range(100)} | {"config.inf": float("inf")}
    assert several.ready({0: long, 1: long}) == dict.fromkeys((0, 1), ("127.0.0.1", several.jax_port))


def test_long_values_that_differ_at_the_end(tmp_path):
    several = Several(tmp_path, 2)
    several.ready({0: {"config.x": "a" * 9_000}, 1: {"config.x": "a" * 8_999 + "b"}})
    assert "in config.x" in several.until_ended(0, 1)[0].what


def test_over_ipv6(tmp_path):
    several = Several(tmp_path, 2, present=[])
    several.where = ("::1", several.where[1])
    for process in (0, 1):
        several.add(process)
    assert several.ready() == dict.fromkeys((0, 1), ("::1", several.jax_port))


def test_a_barrier_without_a_connection(tmp_path):
    """Process 0 never came: an error, and no endless wait."""
    client_1 = Several(tmp_path, 2, present=[]).add(1, start_timeout=0.3)
    with pytest.raises(StopError, match=r"host 0 has not answered at .* \(tried for 0.3 s, config.pod.start_timeout\)"):
        client_1.barrier("done")
