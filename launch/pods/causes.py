"""Which host's end came first, and why: from what each host left in its folder. Standard library only.

The processes of a run tell each other why it ends, and each writes it down (cause.json, see mlm/cluster/watch.py): its
own reason, or, of kind "peer", another's. One that is killed writes nothing; how it ended is in exit.json.
"""

import dataclasses
import signal
import time
from collections.abc import Iterable
from typing import Any

PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
OWN, TOLD, FOLLOWED = range(3)  # an end for its own reason, for one that another process gave, in the wake of one


@dataclasses.dataclass(frozen=True)
class HostReport:
    """What is known of one process; the dicts are the files of its folder, None where there is none."""

    process: int
    host: str
    state: str  # "absent", "running", "exited" or "lost" (it is gone, and nobody saw how)
    exit: dict[str, Any] | None = None  # {"code": 0..255 or None, "signal": number or None, "ended": unix seconds}
    progress: dict[str, Any] | None = None  # {"step", "phase", "time", ...}: where it was last
    cause: dict[str, Any] | None = None  # {"kind", "time", "step", "phase", "code", "what", ...}: the reason it gave
    ended_by_us: bool = False  # the launcher killed it, since others had ended


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a run ended; None is what nobody knows."""

    process: int
    host: str
    kind: str  # "exception", "signal", "hang", "exit" (a code alone), "lost" or "peer" (another's, who is not known)
    time: float | None  # unix seconds
    step: int | None
    phase: str | None
    code: int  # the exit code that stands for it: 2, 3, 4, 75, ..., 128 + n for signal n
    what: str  # the end of a sentence that begins with the host

    @property
    def sentence(self) -> str:
        """The cause for a person."""
        name = f" ({self.host})" if self.host else ""
        clock = "" if self.time is None else f" at {time.strftime('%H:%M:%S', time.localtime(self.time))}"
        where = "" if self.phase is None else f" ({self.phase})"
        if self.step is not None:
            where = f", at step {self.step}{where}"
        elif self.phase is not None:
            where = f", before its first step{where}"
        what, colon, rest = self.what.partition(": ")
        return f"host {self.process}{name} {what}{clock}{where}{colon}{rest}"


def first_cause(hosts: Iterable[HostReport]) -> Cause | None:
    """Returns the end that brought the others with it; None while nothing has gone wrong.

    The earliest of those with a reason of their own; of several hangs, which all begin when one process stands still,
    the one that is furthest behind. Where the others miss a host and can't tell which, it is the one that fell silent.
    """
    hosts = list(hosts)
    ends = [end for end in map(_end, hosts) if end]
    best = min((rank for rank, _ in ends), default=OWN)
    causes = [cause for rank, cause in ends if rank == best]
    if best == FOLLOWED and any(cause.kind == "peer" and cause.code == 1 for cause in causes):  # with 75 they agreed
        quiet = [host for host in hosts if not host.cause and (host.ended_by_us or host.state == "running")]
        causes = [_silent(host) for host in quiet] or causes
    hangs = sorted((cause for cause in causes if cause.kind == "hang"), key=_position)
    causes = [cause for cause in causes if cause.kind != "hang"] + hangs[:1]
    first = min(causes, key=lambda cause: (cause.time is None, cause.time or 0.0, cause.process), default=None)
    if first is None or first.kind != "lost":
        return first
    # whoever misses a host does not know how far it had come; its own file does
    progress = next((host.progress for host in hosts if host.process == first.process), None) or {}
    return dataclasses.replace(first, step=progress.get("step"), phase=progress.get("phase"))


def _end(host: HostReport) -> tuple[int, Cause] | None:
    """Returns (what kind of end it is, why this process ended), None if it did not, or as it should."""
    reason, end = host.cause or {}, host.exit or {}
    code, kind, position = end.get("code") or 0, reason.get("kind"), reason or host.progress or {}
    number = end.get("signal") or max(0, code - 128)  # of a signal, through a shell too

    def cause(kind: str, when: float | None, code: int, what: str) -> Cause:
        return Cause(host.process, host.host, kind, when, position.get("step"), position.get("phase"), code or 1, what)

    if of := reason.get("of"):
        where = reason.get("time"), of.get("step"), of.get("phase")
        return TOLD, Cause(of["process"], of["host"], of["kind"], *where, reason.get("code") or 1, of["what"])
    if reason:
        verb = {"hang": "hung", "signal": "was asked to end", "peer": "ended with another"}.get(kind, "failed")
        sentence = f"{verb}: {reason.get('what')}"
        return (FOLLOWED if kind == "peer" else OWN), cause(kind, reason.get("time"), reason.get("code"), sentence)
    if host.state == "lost":
        return TOLD, cause("lost", position.get("time"), 1, "was lost: it is gone, and nobody saw how")
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        rank = FOLLOWED if host.ended_by_us or number == signal.SIGABRT else OWN  # jax aborts who has lost the others
        return rank, cause("signal", end.get("ended"), 128 + number, f"was killed by {name}")
    if code:
        return OWN, cause("exit", end.get("ended"), code, f"ended with exit code {code} and gave no reason")
    return None


def _silent(host: HostReport) -> Cause:
    """Returns the end of a process that had none of its own when the others missed one, at its last sign of life."""
    when = (host.progress or {}).get("time")
    return Cause(host.process, host.host, "lost", when, None, None, 1, "is lost: the others had no sign of it")


def _position(hang: Cause) -> tuple[int, int, float]:
    phase = PHASES.index(hang.phase) if hang.phase in PHASES else 0
    return (-1 if hang.step is None else hang.step), phase, hang.time or 0.0
