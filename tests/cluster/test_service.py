"""The processes of a run in jax's coordination service: they meet, agree, and end together with one sentence."""

import http.server
import os
import re
import signal
import threading
import time

import pytest

from mlm.cluster import ports
from tests.cluster.coordinated import HEARTBEAT, Started
from tests.support.dask_cluster import until
from tests.support.tiny import slow

pytestmark = pytest.mark.standard


def test_they_meet_agree_wait_share_the_gpus_and_are_done(tmp_path):
    """One GPU for each process of a machine, unless its variable names one already."""
    body = """
from jax._src import xla_bridge
for name in ("config", "data"):
    w.service.agree(name, {"key": 1.5, "code": "a" * 30_000})
time.sleep(process)
w.barrier("data")
assert w.service.from_primary("share", 3, 7 + process) == 7
print(time.monotonic(), xla_bridge.CUDA_VISIBLE_DEVICES.value, flush=True)
"""
    visible = {1: {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2: {"CUDA_VISIBLE_DEVICES": "2"}}
    started = Started(tmp_path, body, [0, 1, 2], 3, environment=visible)
    assert {code for code, _ in started.ends().values()} == {0}
    passed, gpus = zip(*(started.text(process).split()[1:] for process in started.all), strict=True)
    assert max(map(float, passed)) - min(map(float, passed)) < 1.0, "they wait for the last one"
    assert gpus == ("0", "1", "all")
    assert [path.name for path in sorted((tmp_path / "hosts").rglob("*.*"))] == ["progress.json"] * 3


@pytest.mark.parametrize("odd", [[0], [2], [1, 3]])
def test_those_that_differ_are_named_by_all(tmp_path, odd):
    settings = f"{{'config.train.seed': int(process in {odd}), 'same': '\\x1b[2J'}}"
    count = 2 * len(odd) + 1
    body = f"w.service.agree('config', {settings})\ntime.sleep(60)"
    started = Started(tmp_path, body, list(range(count)), count)
    for process, (code, error) in started.ends().items():
        assert code == 2, error
        assert f"differs from {len(odd) + 1} of {count} hosts in config.train.seed (1, not 0)" in error
        assert process == odd[0] or f"host {odd[0]} (" in error
        assert len(odd) == 1 or "so does host 3" in error
    assert started.cause(odd[0])["kind"] == "exception"


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
        assert process == victim or "\x1b" not in error
        assert process == victim or (f"host {victim} " in error.splitlines()[-1] and "x: is damaged" in error)
        assert "Fatal" not in error and "Check failure" not in error
    assert started.cause(2)["of"]["process"] == victim


@pytest.mark.parametrize(
    ("victim", "number"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), slow(1, signal.SIGSTOP), (0, signal.SIGSTOP), slow(1, signal.SIGABRT)],
)
def test_one_that_is_lost_is_named(tmp_path, victim, number):
    """Within the heartbeat and some seconds, by one of the others at least, and by none falsely."""
    started = Started(tmp_path, "time.sleep(90)", [0, 1, 2], 3)
    started.met()
    lost, begin = started.all.pop(victim), time.monotonic()
    os.kill(lost.pid, number)
    ends = started.ends()
    assert time.monotonic() - begin < 2 * HEARTBEAT + 5
    lost.kill()
    for code, error in ends.values():
        assert code == 1, error
        named = re.findall(r"^mlm test: (host \d|another host).* (?:is lost|was aborted)", error, re.MULTILINE)
        assert named == [f"host {victim}"] or (victim and named == ["another host"]), error
    assert victim in [started.cause(process).get("of", {}).get("process") for process in ends]


def test_where_only_jax_knows_which_one_is_lost_no_other_is_blamed(tmp_path):
    """On a busy machine jax may abort a process before it hears which barrier failed by whom."""
    body = """
if process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
w.service._lose = lambda process: time.sleep(90)
time.sleep(90)
"""
    started = Started(tmp_path, body, [0, 1, 2], 3)
    ends = started.ends()
    for process in (0, 2):
        code, error = ends[process]
        assert code == 1 and error.endswith("mlm test: another host is lost; jax's lines above give its number\n"), (
            error
        )
        assert "unhealthy (stopped sending heartbeats):\n1\n" in error
        assert started.cause(process)["kind"] == "peer"


def test_who_ends_already_when_another_one_is_lost_ends_in_time(tmp_path):
    """jax aborts it while it tells the others why, and it can't read their answers then."""
    body = """
from mlm.cluster import service
if process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
service.COLLECT = 20.0
w.end_now("hang", "no progress for 1 s", "no progress for 1 s, in step", 3)
"""
    begin = time.monotonic()
    ends = Started(tmp_path, body, [0, 1, 2], 3).ends()
    assert time.monotonic() - begin < 2 * HEARTBEAT + 5
    for process in (0, 2):
        code, error = ends[process]
        assert code == 3 and "mlm test: no progress for 1 s, in step\n" in error, error


def test_a_strangers_message_ends_all_with_what_it_says(tmp_path):
    text = b"out of \xff disk \x1b[2J"
    body = f"if process == 1:\n    w.service._client.key_value_set_bytes('cause', {text!r})\ntime.sleep(60)"
    started = Started(tmp_path, body, [0, 1], 2)
    for process, (code, error) in started.ends().items():
        said = [line for line in error.split("\n") if "disk" in line]  # jax's own lines may follow
        assert code == 1 and said and said[0].isprintable() and "\x1b" not in error, error
        assert started.cause(process)["of"]["process"] == -1


def test_signals_to_one_stop_all_after_the_same_step(tmp_path):
    body = """
from mlm.cluster import distributed
with distributed.StopSignal() as stop:
    step = 0
    while not stop.requested(step):
        if process == step - 5 == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        step += 1
        time.sleep(0.02 * (process + 1))
print(step, flush=True)
"""
    started = Started(tmp_path, body, [0, 1], 2)
    assert {code for code, _ in started.ends().values()} == {0}
    steps = {int(started.text(process).split()[1]) for process in started.all}
    assert len(steps) == 1 and 6 <= steps.pop() < 100


@pytest.mark.parametrize("present", [[0], [0, 1]])
def test_who_waits_for_the_others_hears_a_signal(tmp_path, present):
    """Before they have met, or at a barrier: it waits in C, and Python's main thread would hear of it at the end."""
    body = "print('waits', flush=True)\nif process == 0: time.sleep(60)\nw.barrier('end')"
    started = Started(tmp_path, body, present, 2)
    if len(present) == 1:
        until(lambda: ports.speaks_first(ports.parse_address(started.address, 0), 1.0))
    else:
        until(lambda: "waits" in started.text(1))
    time.sleep(1)
    begin = time.monotonic()
    os.kill(started.all[present[-1]].pid, signal.SIGTERM)
    assert {code for code, _ in started.ends().values()} == {75} and time.monotonic() - begin < 20


def test_of_hangs_the_one_that_is_behind(tmp_path):
    """Process 2 does not hang, and hears which of the two others is the cause."""
    body = "w.progress('input' if process == 1 else 'step', 7)\nw._hang = 1.0 if process < 2 else 0.0\ntime.sleep(60)"
    started = Started(tmp_path, body, [0, 1, 2], 3)
    ends = started.ends()
    assert [code for code, _ in ends.values()] == [1, 1, 1]
    assert [started.cause(process)["kind"] for process in (0, 1)] == ["hang", "hang"]
    assert started.cause(2)["of"]["process"] == 1 and "host 1 (" in ends[2][1]
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
    started = Started(tmp_path, body, [0, 1], 2)
    code, error = started.ends()[0]
    assert code == 1 and "host 1 (" in error
    assert started.cause(0)["of"]["process"] == 1


@pytest.mark.parametrize(
    ("count", "present", "hosts", "missing"),
    [
        (2, [0], (), "1 of 2 hosts (all but 127.0.0.1) never"),
        slow(4, [0, 1], (), "2 of 4 hosts"),
        (3, [0], ("127.0.0.1", "127.0.0.8", "no.such.host"), "host 1 (127.0.0.8), host 2 (no.such.host) never"),
    ],
)
def test_who_never_comes_is_named(tmp_path, count, present, hosts, missing):
    ends = Started(tmp_path, "", present, count, timeout=5, hosts=hosts).ends()
    assert f"within 5 s (config.pod.start_timeout) {missing}" in ends[0][1] and "never connected" in ends[0][1]
    assert {code for code, _ in ends.values()} == {1}


def test_where_process_0_is_not(tmp_path):
    """Nothing listens there, or something else does."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started = []
        for name, options in (("alone", {}), ("other", {"address": f"127.0.0.1:{server.server_port}"})):
            (tmp_path / name).mkdir()
            started.append(Started(tmp_path / name, "", [1], 2, timeout=2, **options))
        for one in started:
            code, error = one.ends()[1]
            assert code == 1 and one.address in error and "config.pod.start_timeout" in error, error
        server.shutdown()
    assert "see whether it runs there" in started[0].text(1, "stderr")


@pytest.mark.slow
def test_a_process_of_a_run_of_another_size_is_refused(tmp_path):
    started = Started(tmp_path, "time.sleep(25)", [0, 1], 2, timeout=12)
    started.met()
    stranger = started.start(2, count=3)
    stranger.join(60)
    assert stranger.exitcode == 1 and "process 2 of 3" in started.text(2, "stderr")
    assert [code for code, _ in started.ends().values()] == [0, 0], "the run goes on"
