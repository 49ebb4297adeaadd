"""Which host's end came first, and why: from what each host left in its folder. Standard library only.

The processes of a run tell each other why it ends, and each writes it down (cause.json, see mlm/cluster/watch.py): its
own reason, or, of kind "peer", another's. One that is killed writes nothing; how it ended is in exit.json.
"""

import dataclasses
import signal
import time
from collections.abc import Iterable
from typing import Any

ABORTED = 128 + signal.SIGABRT
PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
# Kinds of ends, the first that there is decides: for a reason of its own, for one that another process gave, and in the
# wake of one: jax aborts whoever has lost the others.
OWN, TOLD, FOLLOWED = range(3)


@dataclasses.dataclass(frozen=True)
class HostReport:
    """What is known of one process; the dicts are the files of its folder, None where there is none."""

    process: int
    host: str
    state: str  # "absent", "running", "exited" or "lost" (it is gone, and nobody saw how)
    # {"code": 0..255 or None, "signal": number or None, "ended": unix seconds}
    exit: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None  # {"step", "phase", "time", ...}: where it was last
    # {"kind", "time", "step", "phase", "code", "what", ...}: the reason it gave
    cause: dict[str, Any] | None = None
    ended_by_us: bool = False  # the launcher killed it, since others had ended
    last_line: str = ""  # that it printed, if known


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a run ended; None is what nobody knows."""

    process: int
    host: str
    # "exception", "signal", "hang", "exit" (a code alone), "lost" or "peer" (another's, who is not known)
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
        clock = (
            ""
            if self.time is None
            else f" at {time.strftime('%H:%M:%S', time.localtime(self.time))}"
        )
        where = "" if self.phase is None else f" ({self.phase})"
        if self.step is not None:
            where = f", at step {self.step}{where}"
        elif self.phase is not None:
            where = f", before its first step{where}"
        what, colon, rest = self.what.partition(": ")
        return f"host {self.process}{name} {what}{clock}{where}{colon}{rest}"


def first_cause(hosts: Iterable[HostReport]) -> Cause | None:
    """Returns the end that brought the others with it; None while nothing has gone wrong.

    The earliest of those of the first kind; of several hangs, which all begin when one process stands still, the one
    that is furthest behind. Where jax has aborted the others, it is the one that fell silent.
    """
    hosts = list(hosts)
    ends = [end for end in map(_end, hosts) if end]
    # a full disk keeps a reason from its own process alone
    told = {cause.process for rank, cause in ends if rank == TOLD}
    ends = [
        (rank, cause) for rank, cause in ends if cause.kind != "exit" or cause.process not in told
    ]
    best = min((rank for rank, _ in ends), default=OWN)
    causes = [cause for rank, cause in ends if rank == best]
    if best == FOLLOWED and any(cause.code == ABORTED for cause in causes):
        quiet = [host for host in hosts if host.ended_by_us or host.state == "running"]
        causes = [_silent(host) for host in quiet] or causes
    hangs = sorted((cause for cause in causes if cause.kind == "hang"), key=_position)
    causes = [cause for cause in causes if cause.kind != "hang"] + hangs[:1]
    return min(
        causes,
        key=lambda cause: (cause.time is None, cause.time or 0.0, cause.process),
        default=None,
    )


def _end(host: HostReport) -> tuple[int, Cause] | None:
    """Returns (what kind of end it is, why this process ended), None if it did not, or as it should."""
    reason = host.cause or {}
    end = host.exit or {}
    position = reason or host.progress or {}
    code = end.get("code") or 0
    number = end.get("signal") or max(0, code - 128)  # of a signal, through a shell too

    def cause(kind: str, when: float | None, code: int, what: str) -> Cause:
        return Cause(
            host.process,
            host.host,
            kind,
            when,
            position.get("step"),
            position.get("phase"),
            code or 1,
            what,
        )

    if of := reason.get("of"):
        where = reason.get("time"), of.get("step"), of.get("phase")
        return TOLD, Cause(
            of["process"], of["host"], of["kind"], *where, reason.get("code") or 1, of["what"]
        )
    if reason:
        kind = reason.get("kind")
        verb = {"hang": "hung", "signal": "was asked to end", "peer": "ended with another"}.get(
            kind, "failed"
        )
        rank = FOLLOWED if kind == "peer" else OWN
        return rank, cause(
            kind, reason.get("time"), reason.get("code"), f"{verb}: {reason.get('what')}"
        )
    if host.state == "lost":
        return TOLD, cause(
            "lost", position.get("time"), 1, "was lost: it is gone, and nobody saw how"
        )
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        rank = FOLLOWED if host.ended_by_us or number == signal.SIGABRT else OWN
        return rank, cause("signal", end.get("ended"), 128 + number, f"was killed by {name}")
    if code:
        what = f"ended with exit code {code}{': ' if host.last_line else ' and gave no reason'}{host.last_line}"
        return OWN, cause("exit", end.get("ended"), code, what)
    return None


def _silent(host: HostReport) -> Cause:
    """Returns the end of a process that had none of its own when jax aborted the others, at its last sign of life."""
    at = host.progress or {}
    what = "is lost: the others had no sign of it"
    return Cause(
        host.process, host.host, "lost", at.get("time"), at.get("step"), at.get("phase"), 1, what
    )


def _position(hang: Cause) -> tuple[int, int, float]:
    phase = PHASES.index(hang.phase) if hang.phase in PHASES else 0
    return (-1 if hang.step is None else hang.step), phase, hang.time or 0.0
