"""Of several hosts' ends, the one that brought the others with it."""

import dataclasses
import time

import pytest
from pods import causes
from pods.causes import HostReport, first_cause

from mlm.cluster import termination

NOON = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
KILL = 9
ABORT = 6


def test_launcher_and_run_know_the_same_phases():
    """launch/ imports nothing of mlm/, so each has its own list."""
    assert causes.PHASES == termination.PHASES


def ended(process, *, code=None, signal=None, at=0.0, step=7, phase="step", cause=None, us=False):
    end = {"code": code, "signal": signal, "ended": NOON + at}
    progress = {"step": step, "phase": phase, "time": NOON - 1}
    return HostReport(process, f"w-{process}", "exited", end, progress, cause, us)


def reason(process, kind, at=0.0, *, code=1, step=7, phase="step", what="ValueError: it broke"):
    who = {"process": process, "host": f"w-{process}", "kind": kind, "time": NOON + at}
    return who | {"step": step, "phase": phase, "code": code, "what": what}


def aborted(process, at=1.0, **rest):
    return ended(process, signal=ABORT, at=at, **rest)


def failed(process, at=0.0, kind="exception", **rest):
    return ended(process, code=1, cause=reason(process, kind, at, **rest))


def reported(process, at, kind, of):
    return ended(process, code=1, at=at, cause=reason(of, kind, at, what="is damaged"))


RUNNING = HostReport(0, "w-0", "running", None, {"step": 7, "phase": "step", "time": NOON})
STOPPED = HostReport(0, "w-0", "running", None, {"step": 7, "phase": "step", "time": NOON - 30})
LOST = HostReport(1, "w-1", "lost", None, {"step": 3, "phase": "step", "time": NOON - 60})
PREEMPTED = reason(2, "signal", 9, code=75, what="SIGTERM: saved")
# name: (what the hosts have left, the process, kind and code of the first cause)
TABLE = {
    "killed": ([aborted(0, 0.5), ended(1, signal=KILL, at=2), aborted(2)], 1, "signal", 137),
    "killed, and the others abort through a shell, where a signal is 128 + n": (
        [ended(0, code=137, at=3), ended(1, code=134, at=1)], 0, "signal", 137),
    "its own exception beats what followed": (
        [reported(0, -2, "hang", of=1), aborted(1, -1),
         ended(2, code=4, at=9, cause=reason(2, "exception", 3, code=4))],
        2, "exception", 4),
    "asked to end, and the others followed": (
        [*(ended(n, code=75) for n in (0, 1)), ended(2, code=75, cause=PREEMPTED)],
        2, "signal", 75),
    "asked to end, and one still saves": (
        [RUNNING, ended(1, code=75)], 1, "exit", 75),
    "the earliest of several": ([failed(0, 0.2), failed(1, 0.1), ended(2, signal=KILL, at=0.15)], 1, "exception", 1),
    "of hangs the one whose step is the smallest, and input comes before the step": (
        [failed(0, 0.0, "hang", step=9), failed(1, 0.3, "hang", step=9, phase="input"),
         failed(2, 0.1, "hang", step=10, phase="input")], 1, "hang", 1),
    "a hang before the first step": (
        [failed(0, 0.0, "hang", step=2), failed(1, 0.3, "hang", step=None, phase="compile")], 1, "hang", 1),
    "stopped, missed by all, and killed by the launcher": (
        [aborted(0), ended(1, signal=KILL, at=9, us=True), aborted(2)], 1, "lost", 1),
    "stopped on a pod, where nobody kills it; another one has not ended yet": (
        [STOPPED, aborted(1), dataclasses.replace(RUNNING, process=2)], 0, "lost", 1),
    "killed by the launcher, a consequence": (
        [ended(0, signal=KILL, at=-1, us=True), failed(1, 5)], 1, "exception", 1),
    "what another has reported beats a code without a reason, as of a full disk": (
        [ended(0, code=2), reported(1, 5, "exception", of=0)], 0, "exception", 1),
    "what another has said is in its last line, where a full disk keeps all else": (
        [dataclasses.replace(ended(1, code=2), last_line="mlm run: host 0 (w-0) failed: full"),
         ended(0, code=2, at=3)], 0, "exit", 2),
    "all only followed: better a consequence than nothing": ([aborted(0, 2), aborted(1, 1)], 1, "signal", 134),
    "lost": ([aborted(0), LOST], 1, "lost", 1),
    "ended without a word": ([ended(1, code=1, step=None, phase=None), RUNNING], 1, "exit", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_first_cause(name):
    hosts, *expected = TABLE[name]
    for order in (hosts, hosts[::-1]):
        cause = first_cause(order)
        assert [cause.process, cause.kind, cause.code] == expected


def test_nothing_happened():
    assert first_cause([]) is None
    assert first_cause([RUNNING, HostReport(1, "w-1", "absent")]) is None
    assert first_cause([ended(0, code=0, phase="done"), RUNNING]) is None


def test_a_sentence_says_who_what_when_and_where():
    for host, parts in [
        (
            ended(1, signal=KILL, at=2, step=412, phase="input"),
            ["SIGKILL", "12:00:02, at step 412 (input)"],
        ),
        (
            failed(1, what="shards/train/x: is damaged"),
            ["12:00:00, at step 7 (step): shards/train/x: is damaged"],
        ),
        (
            failed(1, 0, "hang", step=None, phase="compile", what="none"),
            ["first step (compile): none"],
        ),
        (
            ended(1, code=75, cause=PREEMPTED | {"process": 1, "host": "w-1"}),
            ["12:00:09", "SIGTERM: saved"],
        ),
        (ended(1, code=1, step=None, phase=None), ["exit code 1", "12:00:00"]),
    ]:
        sentence = first_cause([host]).sentence
        assert [part for part in ["host 1 (w-1) ", *parts] if part not in sentence] == [], sentence


def test_a_lost_host_is_where_its_own_file_says():
    stopped = ended(0, signal=KILL, at=9, us=True, step=412)
    assert "11:59:59, at step 412 (step): " in first_cause([stopped, aborted(1)]).sentence
