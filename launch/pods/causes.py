"""Which host's end came first, and why: from what each host left in its folder. Standard library only.

The processes of a run tell each other why it ends, and each writes it down (cause.json, see mlm/cluster/watch.py): its
own reason, or another's. One that is killed writes nothing; how it ended is in exit.json.
"""

import dataclasses
import re
import signal
import time
from collections.abc import Iterable
from typing import Any

ABORTED = 128 + signal.SIGABRT
PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
# Kinds of ends, the first that there is decides: for a reason of its own, for one that another process gave, without a
# reason (a full disk keeps it from its own process alone), and in the wake of one: jax aborts whoever lost the others.
OWN, TOLD, SILENT, FOLLOWED = range(4)


@dataclasses.dataclass(frozen=True)
class HostReport:
    """What is known of one process; the dicts are the files of its folder, None where there is none."""

    process: int
    host: str
    state: str  # "absent", "running", "exited" or "lost" (it is gone, and nobody saw how)
    # {"code": 0..255 or None, "signal": number or None, "ended": unix seconds}
    exit: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None  # {"step", "phase", "time", ...}: where it was last
    # {"process", "host", "kind", "time", "step", "phase", "code", "what"}: the reason it gave
    cause: dict[str, Any] | None = None
    ended_by_us: bool = False  # the launcher killed it, since others had ended
    last_line: str = ""  # that it printed, if known


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a run ended; None is what nobody knows."""

    process: int
    host: str
    # "exception", "signal", "hang", "exit" (a code alone) or "lost"
    kind: str
    time: float | None  # unix seconds
    step: int | None
    phase: str | None
    code: int  # the exit code that stands for it: 2, 3, 4, 75, ..., 128 + n for signal n
    what: str  # the end of a sentence that begins with the host

    @property
    def sentence(self) -> str:
        """The cause for a person."""
        name = f" ({self.host})" if self.host else ""
        clock = ""
        if self.time is not None:
            clock = f" at {time.strftime('%H:%M:%S', time.localtime(self.time))}"
        where = ""
        if self.phase is not None:
            step = "before its first step" if self.step is None else f"at step {self.step}"
            where = f", {step} ({self.phase})"
        what, colon, rest = self.what.partition(": ")
        return f"host {self.process}{name} {what}{clock}{where}{colon}{rest}"


def first_cause(hosts: Iterable[HostReport]) -> Cause | None:
    """Returns the end that brought the others with it; None while nothing has gone wrong.

    The earliest of those of the first kind; of several hangs, which all begin when one process stands still, the one
    that is furthest behind. Where jax has aborted the others, it is the one that fell silent.
    """
    hosts = list(hosts)
    ends = [end for end in map(_end, hosts) if end]
    best = min((rank for rank, _ in ends), default=OWN)
    causes = [cause for rank, cause in ends if rank == best]
    if best == FOLLOWED and any(cause.code == ABORTED for cause in causes):
        quiet = [host for host in hosts if host.ended_by_us or host.state == "running"]
        causes = [_silent(host) for host in quiet] or causes
    return min(causes, key=_order, default=None)


def _order(cause: Cause) -> tuple:
    """Returns what the causes of one kind are ordered by: their time; hangs after them, by how far they had come."""
    step = -1 if cause.step is None else cause.step
    phase = PHASES.index(cause.phase) if cause.phase in PHASES else 0
    position = (step, phase) if cause.kind == "hang" else ()
    return cause.kind == "hang", position, cause.time is None, cause.time or 0.0, cause.process


def _end(host: HostReport) -> tuple[int, Cause] | None:
    """Returns (what kind of end it is, why this process ended), None if it did not, or as it should."""
    end = host.exit or {}
    code = end.get("code") or 0
    number = end.get("signal") or max(0, code - 128)  # of a signal, through a shell too
    if reason := host.cause:
        verb = {"hang": "hung", "signal": "was asked to end"}.get(reason["kind"], "failed")
        rank = OWN if reason["process"] == host.process else TOLD
        values = [reason[field.name] for field in dataclasses.fields(Cause)]
        return rank, dataclasses.replace(Cause(*values), what=f"{verb}: {reason['what']}")

    if host.state == "lost":
        what = "was lost: it is gone, and nobody saw how"
        return TOLD, dataclasses.replace(_silent(host), what=what)
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        rank = FOLLOWED if host.ended_by_us or number == signal.SIGABRT else OWN
        return rank, _make_cause(
            host, "signal", end["ended"], 128 + number, f"was killed by {name}"
        )
    if code:
        reason = f": {host.last_line}" if host.last_line else " and gave no reason"
        # what another process has said, as mlm/cluster/termination.py words it
        is_told = re.search(rf": host (?!{host.process} )\d+ \(", host.last_line)
        what = f"ended with exit code {code}{reason}"
        return FOLLOWED if is_told else SILENT, _make_cause(host, "exit", end["ended"], code, what)
    return None


def _silent(host: HostReport) -> Cause:
    """Returns the end of a process that had none of its own when jax aborted the others, at its last sign of life."""
    when = (host.progress or {}).get("time")
    return _make_cause(host, "lost", when, 1, "is lost: the others had no sign of it")


def _make_cause(host: HostReport, kind: str, when: float | None, code: int, what: str) -> Cause:
    """Returns an end at the place where a process was last."""
    at = host.progress or {}
    return Cause(host.process, host.host, kind, when, at.get("step"), at.get("phase"), code, what)
