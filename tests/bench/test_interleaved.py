"""Interleaved timing: the order of the timings, what is reported of them, and of a worker that fails."""

import contextlib
import sys
import time
import types

import pytest

from mlm.bench import interleaved
from mlm.errors import InputError

ECHO = """
import json, sys
seconds = json.loads(input())["seconds"]
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    import time; time.sleep(seconds)
    print(line, end="", flush=True)
"""


def started(program: str, settings: dict) -> contextlib.closing[interleaved.Worker]:
    return contextlib.closing(
        interleaved.Worker([sys.executable, "-c", program], settings, name="--torch=x")
    )


@pytest.fixture
def clock(monkeypatch) -> types.SimpleNamespace:
    """In place of time.monotonic: it moves when a test says so."""
    clock = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(interleaved.time, "monotonic", lambda: clock.seconds)
    monkeypatch.setattr(interleaved, "INTERVAL", 0.1)
    return clock


def test_each_is_timed_in_every_round(clock):
    seen = []

    def candidate(name):
        def calls(count):
            seen.append(name)
            clock.seconds += 0.002 * count

        return calls

    rates = interleaved.measure("step", {name: candidate(name) for name in "abc"}, 0.0)
    assert "".join(seen).endswith("abc" * interleaved.ROUNDS)
    assert list(rates.values()) == [pytest.approx([500] * interleaved.ROUNDS)] * 3


def test_timings_are_as_long_as_asked(clock):
    """However long a call takes: neither a first one, which compiles, nor those that were prefetched mislead."""
    counts = []
    durations = iter([0.3, 0.0, 0.0, 0.0, 0.0])

    def repeat(count):
        counts.append(count)
        for _ in range(count):
            clock.seconds += next(durations, 0.01)

    rates = interleaved.measure("step", {"one": repeat}, 0.0, intervals=2)
    assert counts[-3:] == [20] * 3 and rates["one"] == pytest.approx([100] * 3), (
        "0.2 s of 10 ms each"
    )


def test_seconds_and_calls_are_kept(clock):
    seen = []

    def repeat(calls):
        seen.append(calls)
        clock.seconds += 0.03

    rates = interleaved.measure("step", {"one": repeat}, 0.2, calls=1)
    assert seen == [1] * 7 and len(rates["one"]) == 7, "no trial: each of them counts"


def test_ratios_are_of_neighbours():
    """The median of the ratios, not the ratio of the medians: a slow round slows all who are in it."""
    rates = {"one": [10.0, 40.0, 2.0], "two": [5.0, 10.0, 1.0], "three": [1.0, 2.0, 3.0]}
    found = interleaved.summary(rates, 100)
    assert found["ratios"] == {"two": 2.0, "three": 10.0}
    assert found["one"] == {"tokens_per_second": 1000.0, "milliseconds": 100.0}
    assert found["three"] == {"tokens_per_second": 200.0, "milliseconds": 500.0}


@pytest.mark.standard
def test_worker_answers_and_exits():
    with started(ECHO, {"seconds": 0.1}) as worker:
        assert worker.ready == {"ready": True}
        begin = time.monotonic()
        assert worker.ask({"calls": 3}) == {"calls": 3} and time.monotonic() - begin >= 0.1, (
            "a timing is waited for"
        )
    assert worker._process.returncode == 0


@pytest.mark.standard
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pass", "no output on stderr"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_worker_that_fails(program, words):
    with pytest.raises(InputError) as raised:
        started(program, {})
    sentence = str(raised.value)
    assert sentence.startswith("--torch=x: ") and words in sentence and "\n" not in sentence
    with pytest.raises(InputError, match=r"--torch=/tmp: "):
        interleaved.Worker(["/tmp"], {}, name="--torch=/tmp")
