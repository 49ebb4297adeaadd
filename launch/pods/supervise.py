"""Watches a run until it is done: what is seen, what is done about it, and when it is given up.

Where it stops wrongly, a night is lost; where it goes on wrongly, nothing is. So it goes on, with longer and longer
pauses, after everything but what no new try can change: the flags that gcloud does not take, billing, and a run's codes
2, 3 and 4. Trouble that lasts for --patience hours ends it. A process that hangs ends by itself (config key pod.hang).
runs/pods/{id}/supervise.json has what was spent, the hosts have the rest: end it and start it again at any time.
"""

import argparse
import contextlib
import dataclasses
import time
from typing import NamedTuple

import host_setup

from pods import lifetime, runs
from pods.backend import CREATE, DELETE, READY, STEPS, Pod, PodError, printable
from pods.gcloud import TpuVm
from pods.hosts import Hosts, connect
from pods.runs import RunStatus

EVERY = 30.0  # seconds between two polls
WAIT = ""
START = "starting"
DONE = "done"
GIVE_UP = "giving up"
FINAL = {
    2: "the config or its input is bad",
    3: "the numerics guard stopped it",
    4: "data or a checkpoint is damaged",
}
STOPPED = 75  # the code of a run that was asked to end, and saved
SILENT = 2  # polls without an answer, after which a host is taken for dead if a run has ended
LONGEST = 900.0  # seconds between two polls, at most
SAY_EVERY = 600.0  # seconds between two lines that say that all is well


class Action(NamedTuple):
    """kind: what to do; why: one sentence without its full stop; code: of GIVE_UP and DONE."""

    kind: str
    why: str
    code: int = 0
    is_trouble: bool = False  # counts against --patience


@dataclasses.dataclass
class Memory:
    """What is kept from one poll to the next."""

    # the attempt that we have started, or seen alive; 0 once its end is dealt with
    watched: int = 0
    step: int = -1  # the furthest seen
    silent: int = 0  # polls in a row in which a host that matters did not answer
    trouble: float = 0.0  # seconds of it since the run last came further


def decide(pod: Pod, status: RunStatus | None, memory: Memory) -> Action:
    """Returns what to do, and remembers what has been seen.

    status: of the newest attempt on the pod's hosts, if it is READY.
    """
    if status and status.running:
        memory.watched = status.attempt
    if status and status.step > memory.step:
        memory.step = status.step
        memory.trouble = 0.0
    if status:
        action = _of_run(pod, status, memory)
        if pod.reason:
            action = action._replace(
                why=f"{action.why}; Google Cloud says of the pod: {pod.reason}"
            )
    else:
        action = Action(STEPS.get(pod.state, WAIT), f"the pod is {pod.condition}")
    if action.kind == DELETE:
        memory.watched = memory.silent = 0
    return action


def _of_run(pod: Pod, status: RunStatus, memory: Memory) -> Action:
    """The pod is READY."""
    missing = len(pod.hosts) - len(status.reports)
    quiet = f"; {missing} of {len(pod.hosts)} hosts do not answer" if missing else ""
    attempt = f"attempt {status.attempt}"
    cause = status.cause
    final = None
    if cause and cause.code in FINAL:
        why = f"{cause.sentence}: {FINAL[cause.code]}, which no restart can fix"
        final = Action(GIVE_UP, why, cause.code)
    if quiet and not status.running:
        # nobody who answers is running: a lost connection, or a dead host
        memory.silent += 1
        what = f"{attempt}{quiet} ({'; '.join(status.errors)}), poll {memory.silent}"
        # if no host answers it may well be us; and one that Google moves or repairs comes back
        if memory.silent <= SILENT or not status.reports or "MAINTENANCE" in pod.reason:
            return Action(WAIT, what, is_trouble=True)
        # the end that we can see is the consequence of one that we can't, the machine's, but for these
        return final or Action(DELETE, f"{what}: taken for dead")
    memory.silent = 0
    # a host that does not answer is not missed: if it is dead, the others end, and if not, not
    if status.running:
        why = f"{attempt} runs{quiet}"
        if ended := sum(report.state != "running" for report in status.reports):
            why += f", but {ended} of {len(pod.hosts)} hosts have ended; the others should follow"
        return Action(WAIT, why)
    is_watched = memory.watched and memory.watched == status.attempt
    memory.watched = 0
    if not is_watched:  # a person's, and a person wants another one
        return Action(START, "nothing of this run is alive on the hosts")
    if status.code == 0:
        return Action(DONE, f"{attempt} ended with 0 on all {len(pod.hosts)} hosts")
    if status.stopped:
        return Action(GIVE_UP, f"{attempt} was ended by launch/tpu.py stop", STOPPED)
    why = cause.sentence if cause else f"{attempt} ended"
    is_trouble = not cause or cause.code != STOPPED
    return final or Action(START, why, is_trouble=is_trouble)


class Supervisor:
    """One run, watched; flags: of `supervise`."""

    def __init__(self, cloud: TpuVm, job: runs.Job, flags: argparse.Namespace):
        self.cloud = cloud
        self.job = job
        self.flags = flags
        self.folder = runs.records(job.id)
        # what has ended while nobody watched does not end it: who supervises it now wants it to go on
        self.memory = Memory()
        spent = host_setup.read(self.folder / "supervise.json") or {}
        self.paid = spent.get("paid", 0.0)  # seconds in which pods were READY
        self.ready_at = spent.get("ready_at", 0.0)  # when the last poll found one; 0: it did not
        self.hosts: Hosts | None = None  # of the pod, where it is READY
        self.status: RunStatus | None = None
        self.said = ""
        self.said_at = 0.0

    def run(self) -> int:
        """Supervises until the run is done or given up; returns its exit code. Ctrl-C, 130, leaves all as it is."""
        refusal = PodError(f"run {self.job.id!r} is being supervised already.")
        with host_setup.alone(self.folder / ".supervise.lock", refusal):
            try:
                while (code := self.step()) is None:
                    time.sleep(self.pause())
            except KeyboardInterrupt:
                log("detached; the run goes on, unsupervised")
                print(
                    f"come back: the same command again, or python launch/tpu.py status {self.job.id}"
                )
                return 130
            except PodError:
                self._say_left()
                raise
            if self.flags.down:
                lifetime.down(self.cloud)
            else:
                self._say_left()
            return code

    def pause(self) -> float:
        """Returns the seconds until the next poll: as long as the trouble so far, so they double again and again."""
        return min(max(EVERY, self.memory.trouble), LONGEST)

    def step(self) -> int | None:
        """Polls, decides, acts; returns the exit code at the end. Raises PodError for what no new try can change."""
        try:
            pod = self.poll()
            action = decide(pod, self.status, self.memory)
            self._report(action)
            if action.kind in (DONE, GIVE_UP):
                return action.code
            self._act(action, pod)
        except PodError as error:
            if error.kind in ("settings", "billing"):
                raise
            log(f"{str(error).rstrip('.')}; again in {self.pause():.0f} s")
            return self._in_vain(str(error))
        if action.kind == CREATE:
            self.memory.trouble = 0.0
        return self._in_vain(action.why) if action.is_trouble else None

    def poll(self) -> Pod:
        """Returns how the pod is, counts what it costs, and asks how the run is."""
        self.hosts = self.status = None
        pod = self.cloud.describe()
        self._count(pod)
        self.cloud.refuse_stopped(pod)
        if pod.state == READY:
            self.hosts = connect(self.cloud, pod)
            self.status = runs.status(self.hosts, self.job.id)
            if self.status.running:
                self.job.refuse_another(self.status.job)
        return pod

    def _act(self, action: Action, pod: Pod) -> None:
        if action.kind in STEPS.values():
            lifetime.take(action.kind, self.cloud, pod)
        elif action.kind == START:
            attempt, _ = runs.start(self.hosts, self.job, self.status)
            self.memory.watched = attempt
            with contextlib.suppress(OSError):  # a full disk
                # its number is not given again
                (self.folder / str(attempt)).mkdir(parents=True, exist_ok=True)
            log(f"attempt {attempt} started on {len(self.hosts.all)} hosts")

    def _in_vain(self, why: str) -> int | None:
        """Counts trouble, which makes the pauses longer; returns a code once it is too much."""
        self.memory.trouble += self.pause()
        if self.memory.trouble > 3600 * self.flags.patience:
            log(f"giving up after {self.flags.patience:g} hours of trouble (--patience): {why}")
            return 1
        return None

    def _count(self, pod: Pod) -> None:
        """Counts what is paid for, and writes it down; over a clock that was set back not less than nothing."""
        now = time.time()
        if self.ready_at:
            self.paid += max(0.0, now - self.ready_at)
        self.ready_at = now if pod.state == READY else 0.0
        with contextlib.suppress(OSError):  # a disk that is full for a while ends nothing
            spent = {"paid": self.paid, "ready_at": self.ready_at}
            host_setup.write(self.folder / "supervise.json", spent)

    def _report(self, action: Action) -> None:
        """Says what is done, always, and that all is well, now and then."""
        now = time.monotonic()
        if action.kind == WAIT and action.why == self.said and now - self.said_at < SAY_EVERY:
            return
        self.said = action.why
        self.said_at = now
        step = f"step {self.memory.step}" if self.memory.step >= 0 else ""
        log("; ".join(filter(None, [action.why, step, action.kind, self.cost()])))

    def cost(self) -> str:
        """Returns what the pods have cost while they were READY, for a person."""
        settings = self.cloud.settings
        hours = self.paid / 3600
        dollars = f"{hours * settings.dollars_per_hour:.2f} dollars"
        price = dollars if settings.price else "price unknown"
        return f"{hours * settings.chips:.2f} chip-hours so far, {price}"

    def _say_left(self) -> None:
        """Says that the pod goes on costing, if there is one."""
        if self.ready_at:
            price = lifetime.price(self.cloud)
            log(f"the pod is left as it is, and costs{price}: launch/tpu.py down deletes it")


def log(text: str) -> None:
    """Prints a line, with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}", flush=True)
