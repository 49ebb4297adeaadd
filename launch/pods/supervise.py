"""Watches a run until it is done: what is seen, what is done about it, and when it is given up.

Where it stops wrongly, a night is lost; where it goes on wrongly, nothing is. So it goes on, with longer and longer
pauses, after everything but what no new try can change: the flags that gcloud does not take, billing, and a run's codes
2, 3 and 4. Trouble that lasts for --patience hours ends it. A process that hangs ends by itself (config key pod.hang).
runs/pods/{id}/supervise.json has what was spent, the hosts have the rest: end it and start it again at any time.
"""

import argparse
import contextlib
import dataclasses
import json
import time
from typing import NamedTuple

import host_setup

from pods import follow as following
from pods import lifetime, readiness, runs
from pods.backend import CREATE, DELETE, READY, RESUME, STEPS, Pod, PodError, SettingsError
from pods.gcloud import TpuVm
from pods.hosts import Hosts, connect, quoted
from pods.runs import RunStatus

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
SILENT = 5  # polls without an answer, after which a host is taken for dead if a run has ended
LOGS_EVERY = 20  # polls between two visits to the logs: those of a pod that is taken away are gone
SAY_EVERY = 600.0  # seconds between two lines that say that all is well
BEGIN = time.time() - time.monotonic()


class Action(NamedTuple):
    """kind: what to do; why: one sentence without its full stop; code: of GIVE_UP and DONE."""

    kind: str
    why: str
    code: int = 0
    is_trouble: bool = False  # counts against --patience


@dataclasses.dataclass
class Memory:
    """What is kept from one poll to the next, and over a restart of the supervisor."""

    # the attempt that we have started, or seen alive; 0 once its end is dealt with
    watched: int = 0
    step: int = -1  # the furthest seen
    silent: int = 0  # polls in a row in which a host that matters did not answer
    tries: int = 0  # in vain, since the run last came further
    trouble: float = 0.0  # seconds of that
    paid: float = 0.0  # seconds in which pods were READY
    ready_at: float = 0.0  # when the last poll found one; 0: it did not
    argv: list[str] = dataclasses.field(default_factory=list)  # of the run whose step it is


def decide(pod: Pod, status: RunStatus | None, memory: Memory, *, may_delete: bool) -> Action:
    """Returns what to do, and remembers what has been seen.

    status: of the newest attempt on the pod's hosts, if it is READY; may_delete: the pod is ours, or --recreate.
    """
    if status and status.running:
        memory.watched = status.attempt
    if status and status.step > memory.step:
        memory.step = status.step
        memory.tries = 0
        memory.trouble = 0.0
    action = (
        _of_run(pod, status, memory)
        if status
        else Action(STEPS.get(pod.state, WAIT), f"the pod is {pod.condition}")
    )
    if action.kind == DELETE:
        memory.watched = memory.silent = 0
        if not may_delete:
            why = f"{action.why}; your `up` has not made it, so only --recreate deletes it and makes it again"
            return Action(WAIT, why, is_trouble=True)
    return action


def _of_run(pod: Pod, status: RunStatus, memory: Memory) -> Action:
    """The pod is READY."""
    missing = len(pod.hosts) - len(status.reports)
    quiet = f"{missing} of {len(pod.hosts)} hosts do not answer" if missing else ""
    unwell = f"; Google Cloud says of the pod: {pod.reason}" if pod.reason else ""
    if quiet and not status.running:
        return _silence(quiet + unwell, pod, status, memory)
    memory.silent = 0
    # a host that does not answer is not missed: if it is dead, the others end, and if not, not
    if status.running:
        why = f"attempt {status.attempt} runs{'; ' if quiet else ''}{quiet}{unwell}"
        if ended := sum(report.state != "running" for report in status.reports):
            why += f", but {ended} of {len(pod.hosts)} hosts have ended; the others should follow"
        return Action(WAIT, why)
    if status.code == 0:
        return Action(DONE, f"attempt {status.attempt} ended with 0 on all {len(pod.hosts)} hosts")
    if status.absent:
        return Action(START, f"nothing of this run is on the hosts{unwell}")
    is_watched = memory.watched == status.attempt
    memory.watched = 0
    if not is_watched:  # a person's, and a person wants another one
        return Action(START, f"attempt {status.attempt} has ended{unwell}")
    if status.stopped:
        return Action(GIVE_UP, f"attempt {status.attempt} was ended by launch/tpu.py stop", STOPPED)
    cause = status.cause
    if cause and cause.code in FINAL:
        return Action(
            GIVE_UP, f"{cause.sentence}: {FINAL[cause.code]}, which no restart can fix", cause.code
        )
    why = cause.sentence if cause else f"attempt {status.attempt} ended"
    return Action(START, f"{why}{unwell}", is_trouble=not cause or cause.code != STOPPED)


def _silence(quiet: str, pod: Pod, status: RunStatus, memory: Memory) -> Action:
    """Nobody who answers is running, and somebody does not answer: a lost connection, or a dead host."""
    memory.silent += 1
    what = f"{quiet} ({'; '.join(status.errors)}), poll {memory.silent}"
    # if no host answers it may well be us; and one that Google moves or repairs comes back
    if memory.silent <= SILENT or not status.reports or "MAINTENANCE" in pod.reason:
        return Action(WAIT, what, is_trouble=True)
    # the end that we can see is the consequence of one that we can't, the machine's, unless no restart could fix it
    if (cause := status.cause) and cause.code in FINAL:
        return Action(
            GIVE_UP, f"{cause.sentence}: {FINAL[cause.code]}, which no restart can fix", cause.code
        )
    return Action(DELETE, f"{what}: taken for dead")


class Supervisor:
    """One run, watched; flags: of `supervise`."""

    def __init__(self, cloud: TpuVm, job: runs.Job, flags: argparse.Namespace):
        self.cloud = cloud
        self.job = job
        self.flags = flags
        self.folder = runs.records(job.id)
        # what has ended while nobody watched does not end it: who supervises it now wants it to go on
        self.memory = dataclasses.replace(self._load(), silent=0, watched=0, tries=0, trouble=0.0)
        argv = [job.program, *job.argv]
        if self.memory.argv != argv:  # of this id, but another run
            self.memory = dataclasses.replace(self.memory, step=-1, argv=argv)
        self.hosts: Hosts | None = None  # of the pod, where it is READY
        self.status: RunStatus | None = None
        self.polls = 0
        self.said = ""
        self.said_at = 0.0

    def run(self) -> int:
        """Supervises until the run is done or given up; returns its exit code. Ctrl-C, 130, leaves all as it is."""
        refusal = PodError(
            f"run {self.job.id!r} is being supervised already, by another process here."
        )
        with host_setup.alone(self.folder / ".supervise.lock", refusal):
            try:
                while (code := self.step()) is None:
                    time.sleep(self.pause())
            except KeyboardInterrupt:
                log("detached; the run goes on, unsupervised")
                print(
                    f"come back: the same command again, or python launch/tpu.py status {quoted(self.job.id)}"
                )
                return 130
            finally:
                self._save()
            self._end_pod()
            return code

    def pause(self) -> float:
        """Returns the seconds until the next poll: longer and longer while something is tried in vain."""
        return min(
            self.flags.every * 2 ** min(self.memory.tries, 9),
            max(lifetime.LONGEST, self.flags.every),
        )

    def step(self) -> int | None:
        """Polls, decides, acts; returns the exit code at the end. Raises PodError for what no new try can change."""
        self.polls += 1
        try:
            pod = self.poll()
            self._count(pod)
            may_delete = self.flags.recreate or pod.label == self.cloud.label
            action = decide(pod, self.status, self.memory, may_delete=may_delete)
            self._report(action)
            self._fetch_logs(action)
            if action.kind in (DONE, GIVE_UP):
                return action.code
            self._act(action, pod)
        except PodError as error:
            if error.kind in ("settings", "billing"):
                raise
            log(f"{str(error).rstrip('.')}; again in {self.pause():.0f} s")
            return self._in_vain(str(error), is_tried=True)
        if action.kind in (CREATE, RESUME):
            self.memory.tries = 0
        return (
            self._in_vain(action.why, is_tried=action.kind == START) if action.is_trouble else None
        )

    def poll(self) -> Pod:
        """Returns how the pod is, and asks how the run is."""
        self.hosts = self.status = None
        pod = self.cloud.describe()
        if pod.state == READY:
            self.hosts = connect(self.cloud, self.flags.timeout, pod, partial=True)
            once = dataclasses.replace(self.hosts, retry=False)  # the next poll is the next try
            self.status = runs.status_of(once, self.job)
        return pod

    def _act(self, action: Action, pod: Pod) -> None:
        if action.kind in STEPS.values():
            lifetime.take(action.kind, self.cloud, pod)
        elif action.kind == START:
            readiness.sync(self.hosts, self.job.code)
            attempt, _ = runs.start(self.hosts, self.job, self.status)
            self.memory.watched = attempt
            with contextlib.suppress(OSError):  # a full disk
                # its number is not given again
                (self.folder / str(attempt)).mkdir(parents=True, exist_ok=True)
            log(f"attempt {attempt} started on {len(self.hosts.all)} hosts")

    def _in_vain(self, why: str, *, is_tried: bool) -> int | None:
        """Counts trouble, which makes the pauses longer if something was tried; returns a code once it is too much."""
        self.memory.trouble += self.pause()
        self.memory.tries += is_tried
        if self.memory.trouble > 3600 * self.flags.patience:
            log(f"giving up after {self.flags.patience:g} hours of trouble (--patience): {why}")
            return 1
        return None

    def _count(self, pod: Pod) -> None:
        """Counts what is paid for: by a clock that nobody sets, and over a restart not less than nothing."""
        now = BEGIN + time.monotonic()
        if self.memory.ready_at:
            self.memory.paid += max(0.0, now - self.memory.ready_at)
        self.memory.ready_at = now if pod.state == READY else 0.0

    def _report(self, action: Action) -> None:
        """Says what is done, always, and that all is well, now and then."""
        self._save()
        now = time.monotonic()
        if action.kind == WAIT and action.why == self.said and now - self.said_at < SAY_EVERY:
            return
        self.said = action.why
        self.said_at = now
        place = f", step {self.memory.step}" if self.memory.step >= 0 else ""
        place += f"; {action.kind}" if action.kind else ""
        log(f"{action.why}{place}; {self.cost()}")

    def cost(self) -> str:
        """Returns what the pods have cost while they were READY, for a person."""
        settings = self.cloud.settings
        hours = self.memory.paid / 3600
        dollars = (
            f"{hours * settings.dollars_per_hour:.2f} dollars"
            if settings.price
            else "price unknown"
        )
        return f"{hours * settings.chips:.2f} chip-hours so far, {dollars}"

    def _end_pod(self) -> None:
        """Deletes the pod with --down; else says that it goes on costing, if there is one."""
        if self.flags.down:
            lifetime.down(self.cloud)
        elif self.memory.ready_at:
            log(
                f"the pod is left as it is, and costs{lifetime.price(self.cloud)}: launch/tpu.py down deletes it"
            )

    def _fetch_logs(self, action: Action) -> None:
        """Brings the logs here, now and then and when an attempt is over."""
        is_time = action.kind != WAIT or self.polls % LOGS_EVERY == 0
        if is_time and self.status and not self.status.absent:
            follower = following.Follower(
                self.hosts, self.job.id, self.status.attempt, show=lambda line: None
            )
            # a person may follow them as well
            with contextlib.suppress(PodError, OSError), follower.alone():
                follower.round()

    def _load(self) -> Memory:
        file = self.folder / "supervise.json"
        try:
            return Memory(**json.loads(file.read_text())) if file.exists() else Memory()
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"{file} is damaged ({error}): remove it; only what was spent is in it."
            ) from error

    def _save(self) -> None:
        """Writes down what was spent; a disk that is full for a while ends nothing."""
        try:
            host_setup.write(self.folder / "supervise.json", dataclasses.asdict(self.memory))
        except OSError as error:
            log(
                f"{self.folder}/supervise.json can't be written ({error.strerror}): what was spent is known here alone"
            )


def log(text: str) -> None:
    """Prints a line, with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def command(args: argparse.Namespace) -> int:
    """Does what the arguments say; returns the exit code. A dry run prints a poll, and what a lost pod costs."""
    cloud = args.cloud
    job = runs.make_job(args)
    if not cloud.dry:
        return Supervisor(cloud, job, args).run()
    pod = cloud.describe()
    for step in (DELETE, CREATE):
        lifetime.take(step, cloud, pod)
    hosts = connect(cloud, args.timeout)
    readiness.sync(hosts, job.code)
    runs.start(hosts, job, runs.status_of(hosts, job))
    return 0
