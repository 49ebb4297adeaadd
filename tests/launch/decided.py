"""Pods and runs that a decision is about."""

from pods.causes import HostReport  # isort: skip
from pods.decision import Limits  # isort: skip
from pods.runs import RunStatus  # isort: skip


LIMITS = Limits(crashes=2, preemptions=2, silent=2)


def report(process, state="running", code=None, step=None, kind=None, by=None):
    ended = {"code": code, "signal": by, "ended": 50.0 + process} if state == "exited" else None
    progress = None if step is None else {"step": step, "phase": "step", "time": 0.0}
    cause = kind and {"kind": kind, "time": 40.0 + process, "step": step, "phase": "step", "code": code, "what": "it"}
    return HostReport(process, f"w-{process}", state, ended, progress, cause or None)


def ended(*codes, attempt=1, **more):
    return status(*(report(i, "exited", code, **more) for i, code in enumerate(codes)), attempt=attempt)


def status(*reports, attempt=1, errors=()):
    return RunStatus(attempt, reports, tuple(errors))
