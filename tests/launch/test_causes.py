"""Of several hosts' ends, the one that brought the others with it."""

import re
import time

import pytest
from pods import causes
from pods.causes import HostReport, first_cause

from mlm.cluster import termination

NOON = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
KILL, ABORT, TERM = 9, 6, 15


def test_launcher_and_run_know_the_same_phases():
    """launch/ imports nothing of mlm/, so each has its own list."""
    assert causes.PHASES == termination.PHASES


def ended(process, *, code=None, signal=None, at=0.0, step=7, phase="step", cause=None, us=False):
    return HostReport(
        process,
        f"w-{process}",
        "exited",
        {"code": code, "signal": signal, "ended": NOON + at},
        {"step": step, "phase": phase, "time": NOON - 1},
        cause,
        us,
    )


def reason(kind, at=0.0, *, code=1, step=7, phase="step", what="ValueError: it broke"):
    place = {"step": step, "phase": phase}
    return {"kind": kind, "time": NOON + at, **place, "code": code, "what": what}


def aborted(process, at=1.0, **rest):
    return ended(process, signal=ABORT, at=at, **rest)


def running(process):
    return HostReport(process, f"w-{process}", "running", None, {"step": 7, "phase": "step"})


def test_nothing_happened():
    absent = HostReport(1, "w-1", "absent")
    assert first_cause([]) is None
    assert first_cause([running(0), absent]) is None
    assert first_cause([ended(0, code=0, phase="done"), running(1)]) is None


def test_killed():
    hosts = [aborted(0, 0.5), ended(1, signal=KILL, at=2, step=412, phase="input"), aborted(2), aborted(3)]
    cause = first_cause(hosts)
    assert (cause.process, cause.kind, cause.code) == (1, "signal", 137)
    assert cause.sentence == "host 1 (w-1) was killed by SIGKILL at 12:00:02, at step 412 (input)"


def test_killed_coordinator_and_its_peers_exit_codes():
    """Through a shell or a container, a signal is 128 + n."""
    hosts = [ended(0, code=137, at=3), ended(1, code=134, at=1), ended(2, code=134, at=2)]
    assert (first_cause(hosts).process, first_cause(hosts).code) == (0, 137)


@pytest.mark.parametrize("kind", ["exception", "signal"])
def test_a_reason_of_its_own_beats_what_followed(kind):
    hosts = [
        ended(0, code=1, cause=reason("peer", at=-2, what="host 2 is gone")),
        aborted(1, at=-1),
        ended(2, code=1, at=9, cause=reason(kind, at=3)),
    ]
    assert first_cause(hosts).process == 2


def test_exception():
    why = reason("exception", code=4, what="shards/train/x: is damaged")
    cause = first_cause([ended(0, code=4, cause=why), aborted(1)])
    assert (cause.kind, cause.code) == ("exception", 4)
    assert cause.sentence == "host 0 (w-0) failed at 12:00:00, at step 7 (step): shards/train/x: is damaged"


def test_of_several_the_earliest():
    hosts = [
        ended(0, code=1, cause=reason("exception", at=0.2)),
        ended(1, code=1, cause=reason("exception", at=0.1)),
        ended(2, signal=KILL, at=0.15),
    ]
    assert first_cause(hosts).process == 1


def test_hang_of_the_one_that_is_behind():
    """All stand still; the one whose step is the smallest keeps the others, and input comes before the step."""
    hosts = [
        ended(0, code=1, cause=reason("hang", at=0.0, step=9, phase="step")),
        ended(1, code=1, cause=reason("hang", at=0.3, step=9, phase="input")),
        ended(2, code=1, cause=reason("hang", at=0.1, step=10, phase="input")),
    ]
    assert first_cause(hosts).process == 1
    hosts[1] = aborted(1)
    assert first_cause(hosts).process == 0
    early = ended(1, signal=KILL, at=-1)
    assert first_cause([hosts[0], early, hosts[2]]).process == 1


def test_hang_before_the_first_step():
    hung = reason("hang", step=None, phase="compile", what="no progress for 60 s")
    cause = first_cause([ended(0, code=1, cause=hung), aborted(1)])
    assert "hung at 12:00:00, before its first step (compile): no progress for 60 s" in cause.sentence


def test_stopped():
    """It can't end, so the launcher has killed it; the others have missed it."""
    of = {"process": 0, "host": "w-0", "kind": "lost", "what": "is lost: no sign of life for up to 60 s", "step": None}
    hosts = [ended(0, signal=KILL, at=9, us=True), ended(1, code=1, cause=reason("peer", at=5) | {"of": of})]
    assert (first_cause(hosts).process, first_cause(hosts).kind, first_cause(hosts).code) == (0, "lost", 1)
    assert "host 0 (w-0) is lost at 12:00:05: no sign of life" in first_cause(hosts).sentence
    hosts[0] = running(0)
    assert first_cause(hosts).kind == "lost", "it stands there still"


def test_killed_by_the_launcher_is_a_consequence():
    hosts = [ended(0, signal=KILL, at=-1, us=True), ended(1, code=1, cause=reason("exception", at=5))]
    assert first_cause(hosts).process == 1


def test_preempted():
    saved = "stopped after step 8 of 30, saved"
    hosts = [ended(n, code=75, cause=reason("peer", at=n, code=75, what=saved)) for n in range(4)]
    hosts[2] = ended(2, code=75, cause=reason("signal", at=9, code=75, what=f"SIGTERM: {saved}"))
    cause = first_cause(hosts)
    assert (cause.process, cause.code, cause.kind) == (2, 75, "signal")
    assert "host 2 (w-2) was asked to end at 12:00:09" in cause.sentence
    assert saved in cause.sentence
    hosts.pop(2)
    assert first_cause(hosts).code == 75


def test_all_only_followed():
    """Whoever was first has left nothing: better a consequence than nothing."""
    hosts = [aborted(0, at=2), aborted(1, at=1)]
    assert (first_cause(hosts).process, first_cause(hosts).code) == (1, 134)


def test_lost_host():
    lost = HostReport(1, "w-1", "lost", None, {"step": 3, "phase": "step", "time": NOON - 60})
    assert first_cause([aborted(0), lost]).kind == "lost"
    assert first_cause([aborted(0), lost, ended(2, signal=KILL, at=0)]).kind == "signal"


def test_exit_without_a_word():
    cause = first_cause([ended(0, code=1, step=None, phase=None), running(1)])
    assert (cause.kind, cause.code) == ("exit", 1)
    assert re.search("ended with exit code 1 and gave no reason at 12:00:00$", cause.sentence)


def test_what_the_others_received_counts_where_the_first_gave_no_reason():
    """A process that stood still is aborted by jax when those that missed it have ended."""
    of = {"process": 1, "host": "w-1", "kind": "silent", "what": "has given no sign of life for 10 s", "step": 5}
    notified = ended(0, code=1, at=10, cause=reason("peer", 10, what="host 1 has given no sign of life") | {"of": of})
    cause = first_cause([notified, aborted(1, at=11)])
    assert (cause.process, cause.kind, cause.step, cause.code) == (1, "silent", 5, 1)
    killed = ended(1, signal=KILL, at=11)  # by the clock of its host
    assert first_cause([notified, killed]).kind == "signal", "its own end says more"
