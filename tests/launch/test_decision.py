"""What the supervisor decides, in a table: what is seen and remembered, and what is done then."""

from argparse import Namespace

import pytest
from pods import decision
from pods.backend import CREATE, DELETE, RESUME, Host, Pod
from pods.causes import HostReport
from pods.decision import DONE, GIVE_UP, START, WAIT, Memory
from pods.runs import RunStatus

FLAGS = Namespace(max_crashes=2, max_preemptions=2, silent=2, recreate=False)


def report(process, state="running", code=None, step=None, kind=None, by=None):
    ended = {"code": code, "signal": by, "ended": 50.0 + process} if state == "exited" else None
    progress = None if step is None else {"step": step, "phase": "step", "time": 0.0}
    cause = kind and {"kind": kind, "time": 40.0 + process, "step": step, "phase": "step", "code": code, "what": "it"}
    return HostReport(process, f"w-{process}", state, ended, progress, cause or None)


def ended(*codes, attempt=1, stopped=False, **more):
    reports = (report(i, "exited", code, **more) for i, code in enumerate(codes))
    return status(*reports, attempt=attempt, stopped=stopped)


def status(*reports, attempt=1, stopped=False):
    return RunStatus(attempt, reports, stopped=stopped)


def at(state, **more):
    return Pod("p", state, **{"ours": True, **more}), None


def ready(found, hosts=2, **more):
    return Pod("p", "READY", tuple(Host(i, "x") for i in range(hosts)), **{"ours": True, **more}), found


def decide(seen, flags=FLAGS, **memory):
    after = Memory(**{"watched": 1} | memory)
    action = decision.decide(*seen, 1000.0, after, flags)
    assert action.why
    assert not action.why.endswith(".")
    return action, after


RUNS = status(report(0, step=5), report(1, step=5))
ONE_SILENT = ended(134)  # of two hosts
DIFFERENT = status(report(0, "exited", 75), report(1, "exited", 1, kind="exception"))
KILLED = status(report(0, "exited", None, by=9), report(1, "exited", 134))

# name: (what is seen, what is remembered, action, code, what is remembered then)
TABLE = {
    "done": (ready(ended(0, 0)), {}, DONE, 0, {}),
    "done on one host only is not done": (ready(status(report(0, "exited", 0), report(1))), {}, WAIT, 0, {}),
    "not done while a host does not answer": (ready(ended(0)), {}, WAIT, 0, {"silent": 1}),
    "no pod yet": (at("ABSENT"), {"watched": 0}, CREATE, 0, {"preemptions": 0}),
    "pod waits in the queue": (at("ACCEPTED"), {"watched": 0}, WAIT, 0, {}),
    "cloud does not answer": (at("UNKNOWN", reason="503"), {}, WAIT, 0, {"preemptions": 0, "watched": 1}),
    "preempted": (at("PREEMPTED"), {}, DELETE, 0, {"preemptions": 1, "gone": True, "watched": 0}),
    "preempted, counted already": (at("PREEMPTED"), {"preemptions": 1, "gone": True}, DELETE, 0, {
        "preemptions": 1}),
    "preempted, in the API's words for one without a queue": (at("TERMINATED"), {}, DELETE, 0, {"preemptions": 1}),
    "under repair": (at("REPAIRING"), {}, WAIT, 0, {"preemptions": 0}),
    "stopped": (at("STOPPED"), {}, RESUME, 0, {"preemptions": 1, "gone": True, "watched": 0}),
    "stopped before any run": (at("STOPPED"), {"watched": 0}, RESUME, 0, {"preemptions": 0}),
    "a stranger's, preempted": (at("PREEMPTED", ours=False), {}, GIVE_UP, 75, {"ours": False}),
    "a stranger's, and a host is dead": (ready(ONE_SILENT, ours=False), {"silent": 2}, GIVE_UP, 75, {}),
    "a stranger's, and it is gone": (at("ABSENT"), {"ours": False}, GIVE_UP, 75, {"ours": False}),
    "a stranger's, stopped": (at("STOPPED", ours=False), {}, RESUME, 0, {}),
    "our own after a stranger's": (at("PREEMPTED"), {"ours": False}, DELETE, 0, {"ours": True}),
    "there is one again since we lost one": (ready(RUNS), {"gone": True}, WAIT, 0, {"gone": False}),
    "what we deleted is not gone yet": (at("DELETING"), {"gone": True}, WAIT, 0, {"gone": True}),
    "failed while it was queued": (at("FAILED"), {"watched": 0}, DELETE, 0, {"preemptions": 1}),
    "failed for good": (at("FAILED", reason="x", permanent=True), {"watched": 0}, GIVE_UP, 1, {}),
    "deleted behind our back": (at("ABSENT"), {}, CREATE, 0, {"preemptions": 1, "watched": 0}),
    "preempted too often": (at("PREEMPTED"), {"preemptions": 2}, GIVE_UP, 75, {"preemptions": 0}),
    "a new pod": (ready(status(report(0, "absent"), report(1, "absent"), attempt=0)), {"watched": 0}, START, 0, {}),
    "runs": (ready(RUNS), {}, WAIT, 0, {"step": 5}),
    "a later attempt runs": (ready(status(report(0), report(1), attempt=2)), {}, WAIT, 0, {"watched": 2}),
    "runs, and a host does not answer": (ready(status(report(0, step=5))), {"silent": 9}, WAIT, 0, {
        "silent": 0}),
    "saved on all": (ready(ended(75, 75)), {"crashes": 1}, START, 0, {"preemptions": 1, "crashes": 1, "watched": 0}),
    "asked to end before it could save": (ready(status(report(0, "exited", None, by=15), report(1, "exited", 75))), {},
        START, 0, {"preemptions": 1, "crashes": 0}),
    "saved, counted already": (ready(ended(75, 75)), {"preemptions": 1, "watched": 0}, START, 0, {"preemptions": 1}),
    "saved on one, and crashed on the other": (ready(DIFFERENT), {}, START, 0, {"crashes": 1, "preemptions": 0}),
    "stopped by a person": (ready(ended(75, 75, stopped=True)), {}, GIVE_UP, 75, {"preemptions": 0}),
    "stopped before we came": (ready(ended(75, 75, stopped=True)), {"watched": 0}, START, 0, {"preemptions": 0}),
    "crashed": (ready(ended(1, 134)), {}, START, 0, {"crashes": 1, "watched": 0}),
    "crashed at the same place": (ready(ended(1, 1, step=7)), {"crashes": 1, "step": 7}, START, 0, {
        "crashes": 2}),
    "crashed too often": (ready(ended(1, 1, step=7)), {"crashes": 2, "step": 7}, GIVE_UP, 1, {"crashes": 0}),
    "crashed, but further on": (ready(ended(1, 1, step=8)), {"crashes": 2, "step": 7}, START, 0, {
        "crashes": 1, "step": 8}),
    "killed": (ready(KILLED), {"crashes": 2, "step": 7}, GIVE_UP, 137, {}),
    "bad config": (ready(ended(2, 134, kind="exception")), {}, GIVE_UP, 2, {"crashes": 0, "watched": 0}),
    "numerics": (ready(ended(3, 3, kind="exception")), {}, GIVE_UP, 3, {"crashes": 0}),
    "damage": (ready(ended(4, 134, kind="exception")), {}, GIVE_UP, 4, {"crashes": 0}),
    "ended before we came": (ready(ended(2, 2, attempt=3)), {"watched": 0}, START, 0, {
        "watched": 0, "crashes": 0}),
    "an end that nobody saw": (ready(status(report(0, "lost"), report(1, "exited", 134))), {}, START, 0, {
        "crashes": 1}),
    "one host is silent": (ready(ONE_SILENT), {"silent": 1}, WAIT, 0, {"silent": 2, "preemptions": 0}),
    "one host is dead": (ready(ONE_SILENT), {"silent": 2}, DELETE, 0, {"preemptions": 1, "crashes": 0}),
    "one host is silent, the other says why": (ready(ended(2, kind="exception")), {"silent": 2}, GIVE_UP, 2, {}),
    "all hosts are silent": (ready(status()), {"silent": 11}, WAIT, 0, {"silent": 12}),
    "all hosts are silent for long": (ready(status()), {"silent": 12}, GIVE_UP, 1, {"preemptions": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_is_decided(name):
    seen, memory, kind, code, then = TABLE[name]
    action, after = decide(seen, **memory)
    assert (action.kind, action.code) == (kind, code), action.why
    assert {key: getattr(after, key) for key in then} == then


def test_a_sentence_names_the_first_cause():
    action, _ = decide(ready(status(report(0, "exited", 134), report(1, "exited", 2, kind="exception"))))
    assert action.why.startswith("host 1 (w-1) failed at ")
    assert action.why.endswith("the config or its input is bad, which no restart can fix")


def test_a_pod_that_is_never_there_spends_the_budget():
    """A queued resource that is suspended before it was ready, again and again."""
    memory, states = Memory(), ["ABSENT", "ACCEPTED", "SUSPENDED", "SUSPENDED"] * 3
    kinds = [decision.decide(*at(state), 1.0, memory, FLAGS).kind for state in states]
    assert kinds == [CREATE, WAIT, DELETE, DELETE] * 2 + [CREATE, WAIT, GIVE_UP, DELETE]
    assert memory.preemptions == 0, "started again by a person, it has its budget back"


def test_a_strangers_pod_is_made_again_if_that_is_asked_for():
    flags = Namespace(**vars(FLAGS) | {"recreate": True})
    for seen, kind in [(at("PREEMPTED", ours=False), DELETE), (at("ABSENT"), CREATE)]:
        action, memory = decide(seen, flags, ours=False)
        assert action.kind == kind and not memory.ours
    action, _ = decide(at("PREEMPTED", ours=False))
    assert action.why.endswith("your `up` has not made it, so only --recreate deletes it and makes it again")
