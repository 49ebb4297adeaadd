"""Which host's end came first, and why: from what each host left in its folder. Standard library only.

When one process of a run dies, jax ends all others: a run that died has as many ends as hosts, of which one matters.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterable
from typing import Any

PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
OWN, LOST, CONSEQUENCE = range(3)  # how good a reason an end is for the end of the others: the best wins
ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)  # how jax ends a process when another one is gone


@dataclasses.dataclass(frozen=True)
class HostReport:
    """What is known of one process; the dicts are the files of its folder, None where there is none."""

    process: int
    host: str
    state: str  # "absent", "running", "exited" or "lost" (it is gone, and nobody saw how)
    exit: dict[str, Any] | None = None  # {"code": 0..255 or None, "signal": number or None, "ended": unix seconds}
    progress: dict[str, Any] | None = None  # {"step", "phase", "time", ...}: where it was last
    cause: dict[str, Any] | None = None  # {"kind", "time", "step", "phase", "code", "what", ...}: the reason it gave
    stopped: dict[str, Any] | None = None  # {"time"}: since when it has not been scheduled
    ended_by_us: bool = False  # the launcher killed it, since others had ended

    @classmethod
    def from_status(cls, process: int, answer: dict[str, Any]) -> HostReport:
        """Returns the report of the answer to `host.py status`."""
        files = [answer.get(name) or None for name in ("exit", "progress", "cause", "stopped")]
        return cls(process, answer.get("host") or "", answer["state"], *files)


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a run ended; None is what nobody knows."""

    process: int
    host: str
    # "exception", "signal", "hang", "stopped", "exit" (a code alone), "lost", "peer" (another's, which left no trace)
    kind: str
    time: float | None  # unix seconds
    step: int | None
    phase: str | None
    code: int  # the exit code that stands for it: 2, 3, 4, 75, ..., 128 + n for signal n
    what: str  # the end of a sentence that begins with the host
    others: int = 0  # processes that failed as well

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
        after = {0: "", 1: "; 1 other ended after it"}.get(self.others, f"; {self.others} others ended after it")
        what, colon, rest = self.what.partition(": ")
        return f"host {self.process}{name} {what}{clock}{where}{colon}{rest}{after}"


def first_cause(hosts: Iterable[HostReport]) -> Cause | None:
    """Returns the end that brought the others with it; None while nothing has gone wrong.

    Ends that are the consequence of another one never win while there is a better reason. Among the own ends of
    processes, the earliest wins; of several hangs, which all begin when one process stands still, the one that is
    furthest behind counts. A stopped process counts from when it was stopped.
    """
    hosts = list(hosts)
    ends = [(rank, cause) for rank, cause in map(_end, hosts) if cause is not None]
    if not ends:
        return None
    best = min(rank for rank, _ in ends)
    causes = [cause for rank, cause in ends if rank == best]
    hangs = sorted((cause for cause in causes if cause.kind == "hang"), key=_behind)
    causes = [cause for cause in causes if cause.kind != "hang"] + hangs[:1]
    first = min(causes, key=lambda cause: (cause.time is None, cause.time or 0.0, cause.process))
    others = sum(host.process != first.process and _failed(host) for host in hosts)
    return dataclasses.replace(first, others=others)


def _failed(host: HostReport) -> bool:
    return host.state == "lost" or (host.exit or {"code": 0}).get("code") != 0  # None of one that was killed


def _end(host: HostReport) -> tuple[int, Cause | None]:
    """Returns (how good a reason it is, why this process ended, None if it did not, or as it should)."""
    reason, end, signal_ = host.cause or {}, host.exit or {}, _signal(host.exit or {})
    at = reason if "phase" in reason else host.progress or {}
    code = end.get("code") if signal_ is None else 128 + signal_

    def cause(kind: str, when: float | None, code: int, what: str) -> Cause:
        return Cause(host.process, host.host, kind, when, at.get("step"), at.get("phase"), code or 1, what)

    if host.stopped and reason.get("kind") in (None, "peer", "hang"):
        return OWN, cause("stopped", host.stopped.get("time"), code or 0, "was stopped, as by SIGSTOP,")
    if reason.get("kind") == "peer" and (of := reason.get("of")):  # another's, which may have given no reason
        place = of["process"], of["host"], str(of.get("kind")), reason.get("time"), of.get("step"), of.get("phase")
        return LOST, Cause(*place, reason.get("code") or 1, of["what"])
    if reason:
        kind = str(reason.get("kind"))
        reported = reason.get("code")
        what = {"hang": "hung", "signal": "was asked to end", "peer": "ended with another"}.get(kind, "failed")
        rank = CONSEQUENCE if kind == "peer" else OWN
        return rank, cause(
            kind, reason.get("time"), code if reported is None else reported, f"{what}: {reason.get('what')}"
        )
    if host.state == "lost":
        return LOST, cause("lost", (host.progress or {}).get("time"), 1, "was lost: it is gone, and nobody saw how")
    if signal_ is not None:
        name = signal.Signals(signal_).name if signal_ in set(signal.Signals) else f"signal {signal_}"
        consequence = host.ended_by_us or signal_ == signal.SIGABRT
        what = f"was killed by {name}"
        return (CONSEQUENCE if consequence else OWN), cause("signal", end.get("ended"), code, what)
    if code:
        return OWN, cause("exit", end.get("ended"), code, f"ended with exit code {code} and gave no reason")
    return OWN, None


def _signal(end: dict[str, Any]) -> int | None:
    """Returns the signal that killed a process; a shell's 134 and the like are taken for one too."""
    code = end.get("code")
    if end.get("signal"):
        return int(end["signal"])
    if code in ABORTED:
        return signal.SIGABRT
    return signal.SIGKILL if code == 128 + signal.SIGKILL else None


def _behind(cause: Cause) -> tuple[int, int, float]:
    phase = PHASES.index(cause.phase) if cause.phase in PHASES else 0
    return (-1 if cause.step is None else cause.step), phase, cause.time or 0.0
