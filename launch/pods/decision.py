"""What a supervisor does next: it follows from what it sees, what it remembers, and its flags.

A run is started again for as long as that is of use. Two budgets, apart: a pod that is taken away (or hosts that were
asked to end, and saved) is nobody's fault and spends a preemption; a process that died by itself spends a crash, and
getting further than ever before gives the crashes back. What another start can't fix is not tried again. A process that
hangs ends by itself (config key pod.hang).
"""

import dataclasses
import signal
from argparse import Namespace

from pods.backend import ABSENT, CREATE, DELETE, DELETING, GONE, READY, STEPS, STOPPED, Pod
from pods.causes import Cause
from pods.runs import RunStatus

UNKNOWN = "UNKNOWN"  # the state of a pod that can't be asked
# kinds of actions, as a person reads them; beside those that make a pod READY
WAIT, START, DONE, GIVE_UP = "", "starting", "done", "giving up"
FINAL = {2: "the config or its input is bad", 3: "the numerics guard stopped it", 4: "data or a checkpoint is damaged"}
SAVED = 75
OFFLINE = 6  # times `silent`, after which a pod of which no host answers is left to a person


@dataclasses.dataclass
class Memory:
    """What is kept from one poll to the next, and over a restart of the supervisor. Times are unix seconds."""

    watched: int = 0  # the attempt that we have started, or seen alive; 0 once its end is counted
    crashes: int = 0  # spent
    preemptions: int = 0
    step: int = -1  # the furthest seen
    gone: bool = False  # the loss of this pod has been counted, and there is no other one yet
    ours: bool = True  # our `up` has made the pod, or the one before if there is none
    silent: int = 0  # polls in a row in which a host that matters did not answer
    paid: float = 0.0  # seconds in which pods were READY, until the last one ceased to be
    since: float = 0.0  # when that pod became READY; 0: it is not
    argv: list[str] = dataclasses.field(default_factory=list)  # of the run whose step it is


@dataclasses.dataclass(frozen=True)
class Action:
    """kind: what to do; why: one sentence without its full stop; code: of GIVE_UP and DONE."""

    kind: str
    why: str
    code: int = 0


def decide(pod: Pod, status: RunStatus | None, now: float, memory: Memory, flags: Namespace) -> Action:
    """Returns what to do, and remembers what has been seen.

    status: of the newest attempt on the pod's hosts, if it is READY; now: unix seconds; flags: of `supervise`.
    """
    _notice(pod, status, now, memory)
    action = _of_pod(pod, memory, flags) if status is None else _of_run(pod, status, memory, flags)
    if pod.permanent and action.kind == DELETE:
        why = f"{action.why}, and another one would fail too: change pod.toml, and launch/tpu.py clean deletes this one"
        action = Action(GIVE_UP, why, 1)
    elif action.kind in (DELETE, CREATE) and not memory.ours and not flags.recreate:
        why = f"{action.why}; your `up` has not made it, so only --recreate deletes it and makes it again"
        action = Action(GIVE_UP, why, SAVED)
    if action.kind == GIVE_UP:  # started by a person again, it has its budgets back
        memory.crashes = memory.preemptions = memory.silent = 0
    return action


def _notice(pod: Pod, status: RunStatus | None, now: float, memory: Memory) -> None:
    """Remembers what needs no decision: whose the pod is, since when it costs, and how far the run is."""
    memory.gone = memory.gone and pod.state in (*GONE, STOPPED, DELETING, ABSENT, UNKNOWN)
    if pod.state not in (ABSENT, UNKNOWN):
        memory.ours = pod.ours
    if pod.state == READY:
        memory.since = memory.since or now
    elif pod.state != UNKNOWN and memory.since:  # one that can't be asked is taken to be as it was
        memory.paid, memory.since = memory.paid + now - memory.since, 0.0
    if status and status.running:
        memory.watched = status.attempt
    if status and status.step > memory.step:
        memory.step, memory.crashes = status.step, 0


def _of_pod(pod: Pod, memory: Memory, flags: Namespace) -> Action:
    """The pod is not READY, or can't be asked."""
    if pod.state == UNKNOWN:
        return Action(WAIT, f"the pod can't be asked ({pod.reason}); nothing is concluded from that")
    action = Action(STEPS.get(pod.state, WAIT), f"the pod is {pod.condition}")
    is_lost = action.kind == DELETE or (action.kind and memory.watched)
    return _lost(action, memory, flags) if is_lost else action


def _of_run(pod: Pod, status: RunStatus, memory: Memory, flags: Namespace) -> Action:
    """The pod is READY."""
    hosts, missing = len(pod.hosts), len(pod.hosts) - len(status.reports)
    quiet = f"{missing} of {hosts} hosts do not answer" if missing else ""
    if quiet and not status.running:
        return _silence(quiet, status, memory, flags)
    memory.silent = 0
    if status.running:  # a host that does not answer is not missed: if it is dead, the others end, and if not, not
        why = f"attempt {status.attempt} runs{'; ' if quiet else ''}{quiet}"
        if ended := sum(report.state != "running" for report in status.reports):
            why += f", but {ended} of {hosts} hosts have ended; the others should follow"
        return Action(WAIT, why)
    if status.code == 0:
        return Action(DONE, f"attempt {status.attempt} ended with 0 on all {hosts} hosts")
    if status.absent:
        return Action(START, "nothing of this run is on the hosts")
    return _ended(status, memory, flags)


def _lost(action: Action, memory: Memory, flags: Namespace) -> Action:
    """The pod is lost, which is counted once: deleted, since it counts against the quota, or made, or started again."""
    is_counted, memory.gone = memory.gone, True
    memory.watched = memory.silent = 0
    return action if is_counted else _preempted(action, memory, flags)


def _preempted(action: Action, memory: Memory, flags: Namespace) -> Action:
    """Counts a preemption; returns the action, or the end if that was one too many."""
    memory.preemptions += 1
    why = f"{action.why}, preemption {memory.preemptions} of {flags.max_preemptions}"
    if memory.preemptions > flags.max_preemptions:
        return Action(GIVE_UP, f"{why}: the budget is used up; what is left of the pod: launch/tpu.py down", SAVED)
    return Action(action.kind, why)


def _silence(quiet: str, status: RunStatus, memory: Memory, flags: Namespace) -> Action:
    """Nobody who answers is running, and somebody does not answer: a lost connection, or a dead host."""
    memory.silent += 1
    what = f"{quiet} ({'; '.join(status.errors)}), poll {memory.silent}"
    # if no host answers it may well be us: a pod is not deleted because ssh is blocked here
    if memory.silent <= flags.silent * (1 if status.reports else OFFLINE):
        return Action(WAIT, what)
    if not status.reports:
        return Action(GIVE_UP, f"{what}: the pod is READY and was left as it is; can this machine reach it?", 1)
    # the end that we can see is the consequence of one that we can't, the machine's, unless no restart could fix it
    return _final(status.cause, memory) or _lost(Action(DELETE, f"{what}: taken for dead"), memory, flags)


def _ended(status: RunStatus, memory: Memory, flags: Namespace) -> Action:
    """All hosts have ended."""
    attempt, cause = status.attempt, status.cause
    if memory.watched != attempt:  # it is counted, or was a person's, and a person wants another one
        return Action(START, f"attempt {attempt} has ended")
    memory.watched = 0
    if status.stopped:
        return Action(GIVE_UP, f"attempt {attempt} was ended by launch/tpu.py stop", SAVED)
    if final := _final(cause, memory):
        return final
    # it saved, or had nothing to save yet
    ends = [report.exit or {} for report in status.reports]
    if all(end.get("code") == SAVED or end.get("signal") == signal.SIGTERM for end in ends):
        return _preempted(Action(START, f"attempt {attempt} was asked to end and did"), memory, flags)
    memory.crashes += 1
    words = cause.sentence if cause else f"attempt {attempt} ended"
    what = f"{words}: crash {memory.crashes} of {flags.max_crashes} without progress"
    if memory.crashes > flags.max_crashes:
        return Action(GIVE_UP, f"{what}: the budget is used up", cause.code if cause else 1)
    return Action(START, what)


def _final(cause: Cause | None, memory: Memory) -> Action | None:
    """Returns the end for a cause that no restart can fix, None for all others."""
    if cause is None or cause.code not in FINAL:
        return None
    memory.watched = 0
    return Action(GIVE_UP, f"{cause.sentence}: {FINAL[cause.code]}, which no restart can fix", cause.code)
