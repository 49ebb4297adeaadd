"""The processes of a run in jax's coordination service: they meet, agree, and end together with one sentence."""

import http.server
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import ROOT
from tests.support.dask_cluster import free_port
from tests.support.tiny import slow

pytestmark = pytest.mark.standard

HEARTBEAT, START_TIMEOUT = 10.0, 40.0
HEAD = """
import os, signal, sys, time
from ml_collections import ConfigDict
from mlm.cluster import watch
from mlm.cluster.detect import Cluster
from mlm.errors import DamageError, StopError

address, count, process, folder, timeout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
w = watch.begin("test")
pod = ConfigDict({"port": 1, "engine_port": 2, "start_timeout": float(timeout), "heartbeat": HEARTBEAT, "hang": 0.0})
try:
    w.join(Cluster("flags", address, count, process, tuple(os.environ.get("TEST_HOSTS", "").split())), folder, pod)
    print("met", flush=True)
    exec(sys.argv[6])
except StopError as error:
    print(f"mlm test: {error}", file=sys.stderr, flush=True)
    sys.exit(w.failed(error, error.code))
except Exception as error:
    sys.exit(w.failed(error, 1))
sys.exit(w.end(0))
""".replace("HEARTBEAT", str(HEARTBEAT))


class Started:
    """Processes that run `body` once they have met."""

    def __init__(self, folder: pathlib.Path, body: str, processes: list[int], count: int, **options):
        self.address = options.pop("address", f"127.0.0.1:{free_port()}")
        self.folder, self.body, self.count, self.timeout = folder, body, count, options.pop("timeout", START_TIMEOUT)
        self.all: dict[int, subprocess.Popen] = {}
        for process in processes:
            self.all[process] = self.start(process)

    def start(self, process: int, *, count: int = 0) -> subprocess.Popen:
        arguments = [
            self.address,
            str(count or self.count),
            str(process),
            str(self.folder),
            str(self.timeout),
            self.body,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        return subprocess.Popen([sys.executable, "-c", HEAD, *arguments], env=environment, **pipes)

    def met(self) -> None:
        for process in self.all.values():
            assert process.stdout.readline() == "met\n", process.communicate()[1]

    def ends(self) -> dict[int, tuple[int, str]]:
        """The exit code and the stderr of each."""
        errors = {number: process.communicate(timeout=120)[1] for number, process in self.all.items()}
        return {number: (process.returncode, errors[number]) for number, process in self.all.items()}


def cause_of(folder: pathlib.Path, process: int) -> dict:
    return json.loads((folder / "hosts" / str(process) / "cause.json").read_text())


def test_they_meet_agree_wait_and_are_done(tmp_path):
    body = """
for name in ("config", "data"):
    w.service.agree(name, {"key": 1.5, "code": "a" * 30_000})
time.sleep(process)
w.barrier("data")
assert w.service.from_primary("share", 3, 7 + process) == 7
print(time.monotonic(), flush=True)
"""
    started = Started(tmp_path, body, [0, 1, 2], 3)
    started.met()
    passed = [float(process.stdout.readline()) for process in started.all.values()]
    assert max(passed) - min(passed) < 1.0, "they wait for the last one"
    assert {code for code, _ in started.ends().values()} == {0}
    assert [path.name for path in sorted(tmp_path.rglob("*")) if path.is_file()] == ["progress.json"] * 3


@pytest.mark.parametrize("odd", [0, 2])
def test_one_that_differs_is_named_by_all(tmp_path, odd):
    body = (
        f"w.service.agree('config', {{'config.train.seed': int(process == {odd}), 'same': '\\x1b[2J'}})\ntime.sleep(60)"
    )
    ends = Started(tmp_path, body, [0, 1, 2], 3).ends()
    for process, (code, error) in ends.items():
        assert code == 2, error
        assert "differs from 2 of 3 hosts in config.train.seed (1, not 0)" in error
        assert process == odd or f"host {odd} (" in error
    assert cause_of(tmp_path, odd)["kind"] == "exception"


@pytest.mark.slow
def test_several_that_differ(tmp_path):
    body = "w.service.agree('config', {'config.train.seed': process if process % 2 else 0})\ntime.sleep(60)"
    for code, error in Started(tmp_path, body, [0, 1, 2, 3, 4], 5).ends().values():
        assert code == 2 and "differs from 3 of 5 hosts in config.train.seed (1, not 0); so does host 3" in error


@pytest.mark.parametrize("victim", [0, 1])
def test_all_end_with_the_code_and_the_sentence_of_the_one_that_fails(tmp_path, victim):
    body = f"""
w.barrier("all say that they met")
if process == {victim}:
    raise DamageError("x: is damaged \\x1b[2J")
time.sleep(60)
"""
    started = Started(tmp_path, body, [0, 1, 2], 3)
    started.met()
    begin = time.monotonic()
    ends = started.ends()
    assert time.monotonic() - begin < 15
    for process, (code, error) in ends.items():
        assert code == 4, error
        assert "\x1b" not in error or process == victim
        assert process == victim or (f"host {victim} " in error.splitlines()[-1] and "x: is damaged" in error)
    assert cause_of(tmp_path, 2)["of"]["process"] == victim
    assert not any("Fatal" in error or "Check failure" in error for _, error in ends.values()), ends


@pytest.mark.parametrize(
    ("victim", "number"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), slow(1, signal.SIGSTOP), (0, signal.SIGSTOP), slow(1, signal.SIGABRT)],
)
def test_one_that_is_lost_is_named(tmp_path, victim, number):
    """Within the heartbeat and some seconds, by the others themselves."""
    started = Started(tmp_path, "time.sleep(90)", [0, 1, 2], 3)
    started.met()
    lost, begin = started.all.pop(victim), time.monotonic()
    lost.send_signal(number)
    ends = started.ends()
    assert time.monotonic() - begin < 2 * HEARTBEAT + 5
    lost.kill()
    lost.communicate()
    for process, (code, error) in ends.items():
        assert code == 1, error
        assert re.search(rf"^mlm test: host {victim} \(.*(is lost|was aborted)", error, re.MULTILINE), error
        assert cause_of(tmp_path, process)["of"]["process"] == victim


@pytest.mark.parametrize(
    ("said", "process"),
    [  # by the service of jax 0.10.2, when process 12 was killed, and process 0
        ("INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 12 heartbeat timeout. This", "12"),
        ("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n12\nThe tasks have", "12"),
        ("UNAVAILABLE: Failed to send RPC to coordination service. ... logs from 1) this task (usually task 0)", None),
    ],
)
def test_a_loss_in_the_words_of_the_service(said, process):
    from mlm.cluster.service import LOST

    match = LOST.search(said)
    assert (match and match[1]) == process


@pytest.mark.parametrize("text", [b"out of \xff disk \x1b[2J", b'{"process": 1, "kind": [], "what": "out of disk"}'])
def test_a_cause_in_another_form_ends_all_with_what_it_says(tmp_path, text):
    """As somebody who is none of the processes may write it."""
    body = f"if process == 1:\n    w.service._client.key_value_set_bytes('cause', {text!r})\ntime.sleep(60)"
    ends = Started(tmp_path, body, [0, 1], 2).ends()
    for process, (code, error) in ends.items():
        assert code == 1 and "disk" in error and error.rstrip("\n").isprintable(), error
        assert cause_of(tmp_path, process)["of"]["process"] == -1


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
def test_a_signal_to_one_stops_all_after_the_same_step(tmp_path, numbers):
    body = """
from mlm.cluster import distributed
with distributed.StopSignal() as stop:
    step = 0
    while not stop.requested(step):
        print(step, flush=True)
        step += 1
        time.sleep(0.02 * (process + 1))
print("stops", step, flush=True)
"""
    started = Started(tmp_path, body, [0, 1], 2)
    started.met()
    while started.all[1].stdout.readline() != "5\n":
        pass
    for number in numbers:
        started.all[1].send_signal(number)
    said = [process.communicate(timeout=60)[0].split()[-2:] for process in started.all.values()]
    assert said[0] == said[1] and said[0][0] == "stops" and int(said[0][1]) < 100


@pytest.mark.parametrize(("visible", "gpus"), [("", "0 1"), ("0,1,2,3", "0 1"), ("2", "all all")])
def test_processes_on_a_machine_share_its_gpus(tmp_path, monkeypatch, visible, gpus):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    body = "from jax._src import xla_bridge\nprint(xla_bridge.CUDA_VISIBLE_DEVICES.value, flush=True)"
    started = Started(tmp_path, body, [0, 1], 2)
    started.met()
    assert [process.stdout.readline().strip() for process in started.all.values()] == gpus.split()
    assert {code for code, _ in started.ends().values()} == {0}


def test_of_hangs_the_one_that_is_behind(tmp_path):
    """Process 2 does not hang, and hears which of the two others is the cause."""
    body = "w.progress('input' if process == 1 else 'step', 7)\nw._hang = 1.0 if process < 2 else 0.0\ntime.sleep(60)"
    ends = Started(tmp_path, body, [0, 1, 2], 3).ends()
    assert [code for code, _ in ends.values()] == [1, 1, 1]
    assert [cause_of(tmp_path, process)["kind"] for process in (0, 1)] == ["hang", "hang"]
    assert cause_of(tmp_path, 2)["of"]["process"] == 1 and "host 1 (" in ends[2][1]
    assert all((tmp_path / "hosts" / str(process) / "stacks.txt").stat().st_size for process in (0, 1))


def test_a_crash_of_jax_waits_for_the_loss_that_caused_it(tmp_path):
    """A collective breaks at once where a process dies, long before its heartbeats are missed."""
    body = """
if process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
import jax
raise jax.errors.JaxRuntimeError("INTERNAL: Gloo: connection closed by peer")
"""
    code, error = Started(tmp_path, body, [0, 1], 2).ends()[0]
    assert (code == 1 and "host 1 (" in error.splitlines()[-1]) or "host 1 (" in error
    assert cause_of(tmp_path, 0)["of"]["process"] == 1


@pytest.mark.parametrize(
    ("count", "present", "hosts", "missing"),
    [
        (2, [0], "", "1 of 2 hosts (all but 127.0.0.1) never"),
        slow(4, [0, 1], "", "2 of 4 hosts"),
        (3, [0], "127.0.0.1 127.0.0.8 no.such.host", "host 1 (127.0.0.8), host 2 (no.such.host) never"),
    ],
)
def test_who_never_comes_is_named(tmp_path, monkeypatch, count, present, hosts, missing):
    monkeypatch.setenv("TEST_HOSTS", hosts)
    ends = Started(tmp_path, "", present, count, timeout=8).ends()
    code, error = ends[0]
    assert code == 1
    assert f"within 8 s (config.pod.start_timeout) {missing}" in error and "never connected" in error
    assert {code for code, _ in ends.values()} == {1}


def test_where_process_0_is_not(tmp_path):
    alone = Started(tmp_path, "", [1], 2, timeout=2)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        other = Started(tmp_path, "", [1], 2, timeout=2, address=f"127.0.0.1:{server.server_port}")
        ends = [started.ends()[1] for started in (alone, other)]
        server.shutdown()
    for (code, error), started in zip(ends, (alone, other), strict=True):
        assert code == 1 and started.address in error and "config.pod.start_timeout" in error, error
    assert "see whether it runs there" in ends[0][1]


@pytest.mark.slow
def test_another_number_of_processes_or_one_twice(tmp_path):
    started = Started(tmp_path, "time.sleep(25)", [0, 1], 2, timeout=12)
    started.met()
    stranger = started.start(2, count=3)
    _, error = stranger.communicate(timeout=60)
    assert stranger.returncode == 1 and "process 2 of 3" in error, error
    assert [code for code, _ in started.ends().values()] == [0, 0], "the run goes on"
