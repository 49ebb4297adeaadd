"""What a supervisor does next: a pure function of what it sees, what it remembers, and its limits.

A run is started again for as long as that is of use. Two budgets, apart: a pod that is taken away (or hosts that were
asked to end, and saved) is nobody's fault and spends a preemption; a process that died by itself, or hung, spends a
crash, and getting further than ever before gives the crashes back. What another start can't fix is not tried again.
"""

from __future__ import annotations

import dataclasses
import signal

from pods.backend import ABSENT, GONE, READY, STOPPED
from pods.runs import RunStatus

UNKNOWN = "UNKNOWN"  # the cloud itself did not answer
# kinds of actions, as a person reads them
WAIT, DELETE, CREATE, RESUME = "", "deleting it, with force", "creating one", "starting it again"
START, STOP, DONE, GIVE_UP = "starting", "stopping it", "done", "giving up"
FINAL = {2: "the config or its input is bad", 3: "the numerics guard stopped it", 4: "data or a checkpoint is damaged"}
SAVED = 75
OFFLINE = 6  # times `silent`, after which a pod of which no host answers is left to a person


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is survived, and how long is waited: flags of `supervise`, which say what they are."""

    crashes: int = 3
    preemptions: int = 100
    silent: int = 5
    hang: float = 1800.0
    recreate: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one poll has found."""

    state: str  # of the pod
    now: float  # unix seconds
    detail: str = ""  # more of the state, for a person
    permanent: bool = False  # another pod would fail for the same reason
    status: RunStatus | None = None  # of the newest attempt on its hosts, None if there was nobody to ask
    hosts: int = 0  # how many there are
    stopped: int = 0  # the attempt that was ended by `stop`, 0 for none
    ours: bool = True  # our `up` has made the pod


@dataclasses.dataclass
class Memory:
    """What is kept from one poll to the next, and over a restart of the supervisor. Times are unix seconds."""

    attempt: int = 0  # that we have started, or seen alive
    judged: int = 0  # the last attempt whose end has been counted
    stopping: int = 0  # the attempt that we have ended because it hung
    crashes: int = 0  # spent
    preemptions: int = 0
    step: int = -1  # the furthest seen
    gone: bool = False  # the loss of this pod has been counted
    ours: bool = True  # as it was in Seen when the pod was last there
    deleted: float = 0.0  # when we deleted the last one; 0 once there is another one
    silent: int = 0  # polls in a row in which a host that matters did not answer
    mark: str = ""  # the last sign of progress
    moved: float = 0.0  # when it changed
    paid: float = 0.0  # seconds in which pods were READY, until the last one ceased to be
    since: float = 0.0  # when that pod became READY; 0: it is not


@dataclasses.dataclass(frozen=True)
class Action:
    """kind: what to do; why: one sentence without its full stop; code: of GIVE_UP and DONE."""

    kind: str
    why: str
    code: int = 0


def decide(seen: Seen, memory: Memory, limits: Limits) -> tuple[Action, Memory]:
    """Returns what to do, and what to remember."""
    memory = dataclasses.replace(memory)  # what follows changes it
    _notice(seen, memory)
    action = _decide(seen, memory, limits)
    if seen.permanent and action.kind == DELETE:
        why = f"{action.why}, and another one would fail too: change pod.toml, and launch/tpu.py clean deletes this one"
        action = Action(GIVE_UP, why, 1)
    elif action.kind in (DELETE, CREATE) and not memory.ours and not limits.recreate:
        why = f"{action.why}; your `up` has not made it, so only --recreate deletes it and makes it again"
        action = Action(GIVE_UP, why, SAVED)
    if action.kind == GIVE_UP:  # started by a person again, it has its budgets back
        memory.crashes = memory.preemptions = memory.silent = 0
    return action, memory


def _notice(seen: Seen, memory: Memory) -> None:
    """Remembers what needs no decision: whose the pod is, how far the run is, and when that changed."""
    memory.gone = memory.gone and seen.state in (*GONE, STOPPED, UNKNOWN)
    if seen.state not in (ABSENT, UNKNOWN):
        memory.ours = seen.ours
    if seen.state == READY:
        memory.deleted, memory.since = 0.0, memory.since or seen.now
    elif seen.state != UNKNOWN and memory.since:  # one that can't be asked is taken to be as it was
        memory.paid, memory.since = memory.paid + seen.now - memory.since, 0.0
    memory.moved = memory.moved or seen.now
    if status := seen.status:
        if status.running:
            memory.attempt = status.attempt
        places = [report.progress for report in status.reports if report.progress]
        mark = repr([status.attempt, *((place.get("step"), place.get("time")) for place in places)])
        if places and mark != memory.mark:
            memory.mark, memory.moved = mark, seen.now
        step = max((place["step"] for place in places if isinstance(place.get("step"), int)), default=-1)
        if step > memory.step:
            memory.step, memory.crashes = step, 0


def _decide(seen: Seen, memory: Memory, limits: Limits) -> Action:
    if seen.status and seen.status.code == 0 and len(seen.status.reports) == seen.hosts:
        return Action(DONE, f"attempt {seen.status.attempt} ended with 0 on all {seen.hosts} hosts")
    if seen.state == UNKNOWN:
        return Action(WAIT, f"the pod can't be asked ({seen.detail}); nothing is concluded from that")
    if seen.state in GONE or (seen.state in (ABSENT, STOPPED) and memory.attempt > memory.judged):
        return _lost(seen, memory, limits)
    if seen.state == ABSENT:
        return Action(CREATE, "there is no pod")
    if seen.state == STOPPED:
        return Action(RESUME, "the pod is STOPPED")
    if seen.state != READY:
        return Action(WAIT, f"the pod is {seen.detail or seen.state}")
    status, quiet = seen.status, seen.hosts - len(seen.status.reports)
    if not quiet or status.running:
        memory.silent = 0
    if status.running:
        return _running(seen, status, quiet, memory, limits)
    if quiet:
        return _silence(seen, status, quiet, memory, limits)
    if all(report.state == "absent" for report in status.reports):
        return Action(START, "nothing of this run is on the hosts")
    return _ended(seen, status, memory, limits)


def _preempted(action: Action, memory: Memory, limits: Limits) -> Action:
    """Counts a preemption; returns the action, or the end if that was one too many."""
    memory.preemptions += 1
    why = f"{action.why}, preemption {memory.preemptions} of {limits.preemptions}"
    if memory.preemptions > limits.preemptions:
        return Action(GIVE_UP, f"{why}: the budget is used up; what is left of the pod: launch/tpu.py down", SAVED)
    return dataclasses.replace(action, why=why)


def _lost(seen: Seen, memory: Memory, limits: Limits) -> Action:
    """The pod is gone: it is counted once, and deleted (it counts against the quota), or started if it is stopped."""
    action = Action(
        {ABSENT: CREATE, STOPPED: RESUME}.get(seen.state, DELETE), f"the pod is {seen.detail or seen.state}"
    )
    memory.judged = max(memory.judged, memory.attempt)
    if memory.gone:
        return action
    memory.gone, memory.silent = True, 0
    return _preempted(action, memory, limits)


def _running(seen: Seen, status: RunStatus, quiet: int, memory: Memory, limits: Limits) -> Action:
    """Alive somewhere. A host that does not answer is not missed: if it is dead, the others end, and if not, not."""
    why, ended = f"attempt {status.attempt} runs", sum(report.state != "running" for report in status.reports)
    if limits.hang and seen.now - memory.moved > limits.hang:
        memory.stopping = status.attempt
        return Action(STOP, f"{why}, but no host has made progress for {limits.hang:g} s")
    if ended:
        why += f", but {ended} of {seen.hosts} hosts have ended; the others should follow"
    elif quiet:
        why += f"; {quiet} of {seen.hosts} hosts do not answer"
    return Action(WAIT, why)


def _silence(seen: Seen, status: RunStatus, quiet: int, memory: Memory, limits: Limits) -> Action:
    """Nobody who answers is running, and somebody does not answer: a lost connection, or a dead host."""
    memory.silent += 1
    what = f"{quiet} of {seen.hosts} hosts do not answer ({'; '.join(status.errors)}), poll {memory.silent}"
    # if no host answers it may well be us: a pod is not deleted because ssh is blocked here
    if memory.silent <= limits.silent * (1 if status.reports else OFFLINE):
        return Action(WAIT, what)
    if not status.reports:
        return Action(GIVE_UP, f"{what}: the pod is READY and was left as it is; can this machine reach it?", 1)
    if status.cause and status.cause.code in FINAL:
        return _final(status, memory)
    # the end that we can see is the consequence of one that we can't: the machine's
    memory.gone, memory.silent, memory.judged = True, 0, status.attempt
    return _preempted(Action(DELETE, f"{what}: taken for dead"), memory, limits)


def _ended(seen: Seen, status: RunStatus, memory: Memory, limits: Limits) -> Action:
    """All hosts have ended."""
    attempt = status.attempt
    if memory.judged >= attempt:
        return Action(START, f"attempt {attempt} has ended")
    memory.judged = attempt
    if memory.attempt != attempt:  # a person's attempt, and a person wants another one
        return Action(START, f"attempt {attempt} had ended before")
    cause, hung = status.cause, memory.stopping == attempt
    if seen.stopped == attempt and not hung:
        return Action(GIVE_UP, f"attempt {attempt} was ended by launch/tpu.py stop", SAVED)
    if cause and cause.code in FINAL and not hung:
        return _final(status, memory)
    # it saved, or had nothing to save yet
    ends = [report.exit or {} for report in status.reports]
    if not hung and all(end.get("code") == SAVED or end.get("signal") == signal.SIGTERM for end in ends):
        return _preempted(Action(START, f"attempt {attempt} was asked to end and did"), memory, limits)
    memory.crashes += 1
    words = cause.sentence if cause else f"attempt {attempt} ended"
    what = f"{words}: crash {memory.crashes} of {limits.crashes} without progress"
    if memory.crashes > limits.crashes:
        return Action(GIVE_UP, f"{what}: the budget is used up", (cause.code if cause else 0) or 1)
    return Action(START, what)


def _final(status: RunStatus, memory: Memory) -> Action:
    memory.judged, cause = status.attempt, status.cause
    return Action(GIVE_UP, f"{cause.sentence}: {FINAL[cause.code]}, which no restart can fix", cause.code)
