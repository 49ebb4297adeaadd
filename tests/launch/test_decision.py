"""What the supervisor decides, in a table: what is seen and remembered, and what is done then."""

import pytest
from pods import supervise
from pods.backend import CREATE, DELETE, Host, Pod
from pods.causes import HostReport
from pods.runs import RunStatus
from pods.supervise import DONE, GIVE_UP, START, WAIT, Memory


def report(process, state="running", code=None, step=None, kind=None, by=None):
    ended = {"code": code, "signal": by, "ended": 50.0 + process} if state == "exited" else None
    progress = None if step is None else {"step": step, "phase": "step", "time": 0.0}
    cause = kind and {
        "process": process,
        "host": f"w-{process}",
        "kind": kind,
        "time": 40.0 + process,
        "step": step,
        "phase": "step",
        "code": code,
        "what": "it",
    }
    return HostReport(process, f"w-{process}", state, ended, progress, cause or None)


def ended(*codes, attempt=1, stopped=False, **more):
    reports = tuple(report(i, "exited", code, **more) for i, code in enumerate(codes))
    return RunStatus(attempt, reports, stopped=stopped)


def ready(found, **more):
    return Pod("p", "READY", (Host(0, "x"), Host(1, "x")), **more), found


RUNS = RunStatus(1, (report(0, step=5), report(1, step=5)))
ONE_SILENT = ended(134)  # of two hosts
MOVED = {"reason": "UNHEALTHY_MAINTENANCE is moved"}
DEAD = {"silent": supervise.SILENT}
# name: (pod and run that are seen, what is remembered, action, code)
TABLE = {
    "done": (ready(ended(0, 0)), {}, DONE, 0),
    "done on one host only is not done": (
        ready(RunStatus(1, (report(0, "exited", 0), report(1)))), {}, WAIT, 0),
    "not done while a host does not answer": (ready(ended(0)), {}, WAIT, 0),
    "no pod yet": ((Pod("p", "ABSENT"), None), {}, CREATE, 0),
    "it waits in the queue": ((Pod("p", "WAITING_FOR_RESOURCES"), None), {}, WAIT, 0),
    "preempted": ((Pod("p", "PREEMPTED"), None), {}, DELETE, 0),
    "its repair failed": ((Pod("p", "UNKNOWN"), None), {}, DELETE, 0),
    "its request failed": ((Pod("p", "FAILED", reason="no quota"), None), {}, DELETE, 0),
    "under repair": ((Pod("p", "REPAIRING"), None), {}, WAIT, 0),
    "stopping": ((Pod("p", "STOPPING"), None), {}, WAIT, 0),
    "running": (ready(RUNS), {}, WAIT, 0),
    "running, one host silent": (ready(RunStatus(1, (report(0),))), DEAD, WAIT, 0),
    "nothing is there": (ready(RunStatus(0, (report(0, "absent"), report(1, "absent")))), {}, START, 0),
    "crashed": (ready(ended(1, 134)), {}, START, 0),
    "done before we came": (ready(ended(0, 0)), {"watched": 0}, START, 0),
    "asked to end, and saved": (ready(ended(75, 75)), {}, START, 0),
    "ended by stop": (ready(ended(75, 75, stopped=True)), {}, GIVE_UP, 75),
    "ended by stop before we came": (ready(ended(75, 75, stopped=True)), {"watched": 0}, START, 0),
    "a bad config": (ready(ended(2, 2, kind="exception")), {}, GIVE_UP, 2),
    "the guard": (ready(ended(3, 3, kind="exception")), {}, GIVE_UP, 3),
    "damage": (ready(ended(4, 4, kind="exception")), {}, GIVE_UP, 4),
    "a bad config, before we came": (ready(ended(2, 2, kind="exception")), {"watched": 0}, START, 0),
    "one host is silent, and then taken for dead": (ready(ONE_SILENT), DEAD, DELETE, 0),
    "one host is silent, and Google says that it is moved": (ready(ONE_SILENT, **MOVED), DEAD, WAIT, 0),
    "one host is silent, and the others ended for good": (ready(ended(4, kind="exception")), DEAD, GIVE_UP, 4),
    "no host answers: it may be us": (ready(RunStatus(0, (), ("host 0: ssh failed",))), {"silent": 99}, WAIT, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_is_done(name):
    seen, remembered, kind, code = TABLE[name]
    memory = Memory(**{"watched": 1} | remembered)
    action = supervise.decide(*seen, memory)
    assert (action.kind, action.code) == (kind, code)
    assert action.why and not action.why.endswith(".")
    if kind == DELETE:
        assert memory.watched == memory.silent == 0


def test_health_stands_in_every_line():
    nothing = RunStatus(0, (report(0, "absent"), report(1, "absent")))
    bad = ended(2, 2, kind="exception")
    for found in (RUNS, ONE_SILENT, ended(1, 134), nothing, ended(0, 0), bad):
        assert "is moved" in supervise.decide(*ready(found, **MOVED), Memory(watched=1)).why
    assert "is moved" in supervise.decide(Pod("p", "REPAIRING", **MOVED), None, Memory()).why


def test_a_new_step_ends_all_trouble():
    memory = Memory(watched=1, step=4, trouble=1e4)
    supervise.decide(*ready(ended(1, 134, step=4)), memory)
    assert memory.trouble == 1e4
    supervise.decide(*ready(RUNS), memory)
    assert (memory.step, memory.trouble) == (5, 0.0)
