"""The processes of a run in jax's coordination service: they meet, agree, and end together with one sentence."""

import os
import signal
import time

import pytest

from tests.cluster.coordinated import HEARTBEAT, Started
from tests.support.dask_cluster import until
from tests.support.tiny import slow

pytestmark = pytest.mark.standard
ABORTED = -signal.SIGABRT  # by jax


def test_they_meet_agree_wait_share_the_gpus_and_are_done(tmp_path):
    """One GPU for each process of a machine, unless its variable names one already; behind a proxy that is dead."""
    body = """
from jax._src import xla_bridge
for name in ("config", "data"):
    w.service.agree(name, {"key": 1.5, "code": "a" * 30_000})
time.sleep(process)
w.barrier("data")
print(time.monotonic(), xla_bridge.CUDA_VISIBLE_DEVICES.value, flush=True)
"""
    dead = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    visible = {
        0: dead,
        1: dead | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        2: {"CUDA_VISIBLE_DEVICES": "2"},
    }
    started = Started(tmp_path, body, [0, 1, 2], 3, environment=visible)
    ends = started.ends()
    assert {code for code, _ in ends.values()} == {0}, ends
    passed, gpus = zip(*(started.text(process).split()[1:] for process in started.all), strict=True)
    assert max(map(float, passed)) - min(map(float, passed)) < 1.0, "they wait for the last one"
    assert gpus == ("0", "1", "all")
    assert list((tmp_path / "hosts").rglob("cause.json")) == []
    assert "proxy" not in ends[0][1], "jax advises against variables that do no harm"


@pytest.mark.parametrize("odd", [[0], [1, 3]])
def test_those_that_differ_are_named_by_all(tmp_path, odd):
    settings = f"{{'config.train.seed': int(process in {odd}), 'same': '\\x1b[2J'}}"
    count = 2 * len(odd) + 1
    body = f"w.service.agree('config', {settings})\ntime.sleep(60)"
    started = Started(tmp_path, body, list(range(count)), count)
    for process, (code, error) in started.ends().items():
        assert code == 2, error
        assert (
            f"differs from {len(odd) + 1} of {count} hosts in config.train.seed (1, not 0)" in error
        )
        assert f"host {odd[0]} (" in error and started.cause(process)["process"] == odd[0]
        assert len(odd) == 1 or "so does host 3" in error


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
        if process != victim:
            assert (
                f"host {victim} " in error.splitlines()[-1]
                and "x: is damaged" in error
                and "\x1b" not in error
            )
        assert "Fatal" not in error and "Check failure" not in error
    assert {started.cause(process)["process"] for process in range(3)} == {victim}


@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), slow(1, signal.SIGSTOP)]
)
def test_one_that_is_killed_or_stopped_ends_all_in_jax_s_words(tmp_path, victim, number):
    """Within the heartbeat and some seconds; who misses it gives no reason of its own, even if a collective breaks."""
    body = """
import jax
if process == 2:
    time.sleep(2)
    raise jax.errors.JaxRuntimeError("INTERNAL: Gloo: connection closed by peer")
time.sleep(90)
"""
    started = Started(tmp_path, body, [0, 1, 2], 3)
    started.met()
    lost = started.all.pop(victim)
    begin = time.monotonic()
    os.kill(lost.pid, number)
    ends = started.ends()
    assert time.monotonic() - begin < 2 * HEARTBEAT + 5
    lost.kill()
    for process, (code, error) in ends.items():
        assert code == ABORTED and "JAX distributed service detected fatal errors" in error, (
            process,
            code,
            error,
        )
        assert not (tmp_path / "hosts" / str(process) / "cause.json").exists()
    assert victim == 0 or f"\n{victim}\n" in ends[0][1], "jax names it"


def test_a_strangers_message_ends_all_with_what_it_says(tmp_path):
    text = b"out of \xff disk \x1b[2J"
    body = f"if process == 1:\n    w.service._client.key_value_set_bytes('cause', {text!r})\ntime.sleep(60)"
    started = Started(tmp_path, body, [0, 1], 2)
    for process, (code, error) in started.ends().items():
        said = [line for line in error.split("\n") if "disk" in line]  # jax's own lines may follow
        assert code == 1 and said and said[0].isprintable() and "\x1b" not in error, error
        assert started.cause(process)["process"] == -1


def test_signals_to_one_stop_all_after_the_same_step(tmp_path):
    """At once, although the clock of the one that is asked is 1,000 seconds ahead: jax's notice holds a time."""
    body = """
import datetime
from mlm.cluster import distributed
class Ahead(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return datetime.datetime.fromtimestamp(time.time() + 1000, zone)
if process == 1:
    datetime.datetime = Ahead
with distributed.StopSignal() as stop:
    step = 0
    while not stop.requested(step):
        if process == step - 5 == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
        step += 1
        time.sleep(0.02 * (process + 1))
        assert step < 300
print(step, flush=True)
"""
    started = Started(tmp_path, body, [0, 1], 2)
    ends = started.ends()
    assert {code for code, _ in ends.values()} == {0}, ends
    steps = {int(started.text(process).split()[1]) for process in started.all}
    assert len(steps) == 1 and 6 <= steps.pop() < 100


@pytest.mark.parametrize("present", [[0], [0, 1]])
def test_who_waits_for_the_others_gets_a_signal(tmp_path, present):
    """Before they have met, or at a barrier: it waits in C, and Python's main thread would hear of it at the end."""
    body = "print('waits', flush=True)\nif process == 0: time.sleep(60)\nw.barrier('end')"
    started = Started(tmp_path, body, present, 2)
    until(lambda: "waits" in started.text(1) if len(present) > 1 else started.is_served())
    time.sleep(1)
    begin = time.monotonic()
    os.kill(started.all[present[-1]].pid, signal.SIGTERM)
    assert {code for code, _ in started.ends().values()} == {75} and time.monotonic() - begin < 20


def test_of_hangs_the_one_that_is_behind(tmp_path):
    """Process 2 does not hang, and gets the name of the other that is the cause."""
    body = "w.progress('input' if process == 1 else 'step', 7)\nw._hang = 1.0 if process < 2 else 0.0\ntime.sleep(60)"
    started = Started(tmp_path, body, [0, 1, 2], 3)
    ends = started.ends()
    assert [code for code, _ in ends.values()] == [1, 1, 1]
    assert [started.cause(process)["kind"] for process in (0, 1)] == ["hang", "hang"]
    assert started.cause(2)["process"] == 1 and "host 1 (" in ends[2][1]
    assert all("most recent call first" in ends[process][1] for process in (0, 1))


def test_who_never_comes(tmp_path):
    ends = Started(tmp_path, "", [0, 1], 3, timeout=5).ends()
    for code, error in ends.values():
        assert (
            code == 1
            and "not all of 3 processes" in error
            and "5 s (config.pod.start_timeout" in error
        ), error


@pytest.mark.slow
def test_a_stranger_with_the_number_of_another_is_not_called_a_loss(tmp_path):
    """jax ends all, and says that a process has come again."""
    started = Started(tmp_path, "time.sleep(60)", [0, 1], 2)
    started.met()
    stranger = started.start(1)
    started.all[0].join(60)
    error = started.text(0, "stderr")
    assert (
        started.all[0].exitcode == ABORTED and "is lost" not in error and "incarnation" in error
    ), error
    for process in (stranger, started.all[1]):
        process.kill()
