"""What XLA did: compilations as jax reports them, executions, and the devices' waits."""

import random
import threading
import time
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from mlm import logs
from mlm.monitor.loss_spikes import MetricsHook
from mlm.training import xla_metrics
from tests.training.toy import Toy, run


@pytest.fixture
def programs():
    with xla_metrics.Programs() as programs:
        yield programs


def compile_double(number: float):
    def double_it(x):
        return 2 * x + number

    return jax.jit(double_it)(jnp.arange(3.0))


def test_compilations_are_those_that_jax_reports(programs):
    """A program that is compiled again, by another function of the same text, comes from the persistent cache."""
    heard = []
    jax.monitoring.register_event_duration_secs_listener(
        heard_by := lambda *event, **of: heard.append((*event, of))
    )
    number = random.random()  # no earlier run of the tests has cached it
    compile_double(number)
    first = programs.summary()
    compile_double(number)
    jax.monitoring.unregister_event_duration_listener(heard_by)
    found = programs.summary()
    expected = Counter()
    for event, seconds, of in heard:
        if "double_it" in of.get("fun_name", "") and event in xla_metrics.STAGES:
            expected.update({"seconds": seconds, xla_metrics.STAGES[event]: seconds})
    assert found["double_it"] == pytest.approx(expected | {"compilations": 2}, abs=0.001)
    total = found["all programs"]
    before = first["all programs"]
    assert (
        total["cache_hits"] == before["cache_hits"] + 1
        and before["cache_misses"] == total["cache_misses"] >= 1
    )
    assert total["seconds"] == pytest.approx(
        sum(found[name]["seconds"] for name in list(found)[1:]), abs=0.01
    )


class Output:
    """Of a step that ends when it is told to."""

    def __init__(self):
        self.end = threading.Event()

    def block_until_ready(self):
        self.end.wait(10)
        raise RuntimeError("as of a step that failed")


def test_devices_wait_only_without_a_step():
    waits = xla_metrics.Waits()
    output = Output()
    waits.running.put(output)
    time.sleep(0.03)
    waits.add("input_wait")
    assert waits.seconds == {"input_wait": 0, "host_wait": 0}, "the step ran all the time"
    output.end.set()
    while waits.running.unfinished_tasks:
        time.sleep(0.001)
    time.sleep(0.05)
    waits.add("input_wait")
    time.sleep(0.03)
    waits.add("host_wait")
    assert waits.seconds["input_wait"] >= 0.05 and waits.seconds["host_wait"] >= 0.03
    waits.running.put(None)


SLOW = 0.2  # seconds, long beside a step on a busy machine


class Slow(MetricsHook):
    def on_metrics(self, kind, step, values):
        time.sleep(SLOW)


def shares_of(folder, capsys) -> tuple[float, float]:
    """Of the last two steps of four, for input and for the host; those of all are said at the end."""
    workdir = run(folder, "train.steps=4", "log.every=2", "evaluate.every=3")
    programs = logs.read(workdir.timing, "xla")[-1]["programs"]
    waits = [
        programs["all programs"][name] / programs["all programs"]["steps"]
        for name in ("input_wait", "host_wait")
    ]
    said = f"devices waited {waits[0]:.1%} of the time for input, {waits[1]:.1%} for process 0"
    assert said in capsys.readouterr().err.splitlines()[-1] and programs["step"]["executions"] == 4
    line = logs.read(workdir.timing, "train")[-1]
    return line["input_wait"], line["host_wait"]


def test_a_run_with_a_slow_input_or_a_slow_host_says_so(tmp_path, monkeypatch, capsys):
    """A slow evaluation is neither."""
    monkeypatch.setattr(Toy, "evaluate", lambda task, params: time.sleep(SLOW) or {"loss": 1.0})
    with monkeypatch.context() as patch:
        batches = Toy.batches
        patch.setattr(
            Toy,
            "batches",
            lambda task, start: (time.sleep(SLOW) or batch for batch in batches(task, start)),
        )
        for_input, for_host = shares_of(tmp_path / "input", capsys)
    assert for_input > 0.6 and for_host < 0.3 and for_input + for_host <= 1
    monkeypatch.setattr(Toy, "make_hooks", lambda task, notify: [Slow()])
    for_input, for_host = shares_of(tmp_path / "host", capsys)
    assert for_host > 0.5 and for_input < 0.3
