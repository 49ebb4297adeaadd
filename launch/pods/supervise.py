"""Watches a run until it is done: decision.py decides; here pod and run are polled, and what was decided is done.

runs/pods/{id}/supervise.json has what was spent, the hosts have the rest: end it and start it again at any time.
"""

import argparse
import contextlib
import dataclasses
import json
import time

import host_setup

from pods import decision, lifetime, readiness, runs
from pods import follow as following
from pods.backend import CREATE, DELETE, PASSING, READY, STEPS, TRIED, Pod, PodError, SettingsError
from pods.decision import Action, Memory
from pods.gcloud import TpuVm
from pods.hosts import Hosts, connect, quoted
from pods.settings import Settings

LOGS_EVERY = 20  # polls between two visits to the logs: those of a pod that is taken away are gone
SAY_EVERY = 600.0  # seconds between two lines that say that all is well
WORST = 900.0  # seconds between two tries, at most
MOST_TRIES = 8  # of what may pass, about an hour; a stock-out or a lost network is waited for without end


class Supervisor:
    """One run, watched; flags: of `supervise`."""

    def __init__(self, cloud: TpuVm, job: runs.Job, flags: argparse.Namespace):
        self.cloud, self.job, self.flags = cloud, job, flags
        self.folder = runs.records(job.id)
        # what has ended while nobody watched is not counted: who supervises it now wants it to go on
        self.memory = dataclasses.replace(self._load(), silent=0, watched=0)
        if self.memory.argv != (argv := [job.program, *job.argv]):  # of this id, but another run
            self.memory = dataclasses.replace(self.memory, step=-1, crashes=0, argv=argv)
        self.pod: Pod | None = None  # as the last poll has found it
        self.hosts: Hosts | None = None  # where it is READY
        self.status: runs.RunStatus | None = None
        self.polls, self.was_seen, self.tries = 0, False, 0
        self.said, self.said_at = "", 0.0

    def run(self) -> int:
        """Supervises until the run is done or given up; returns its exit code. Ctrl-C, 130, leaves all as it is."""
        refusal = PodError(f"run {self.job.id!r} is being supervised already, by another process here.")
        with host_setup.alone(self.folder / ".supervise.lock", refusal):
            try:
                while (code := self.step()) is None:
                    time.sleep(self.pause())
                return code
            except KeyboardInterrupt:
                log("detached; the run goes on, unsupervised")
                print(f"come back: the same command again, or python launch/tpu.py status {quoted(self.job.id)}")
                return 130
            finally:
                self._save()

    def pause(self) -> float:
        """Returns the seconds until the next poll: longer and longer while something is tried in vain."""
        return min(self.flags.every * 2**self.tries, max(WORST, self.flags.every))

    def step(self) -> int | None:
        """Polls, decides, acts; returns the exit code at the end."""
        self.poll()
        action = decision.decide(self.pod, self.status, time.time(), self.memory, self.flags)
        self._save()
        self._report(action)
        self._fetch_logs(action)
        if action.kind in (decision.DONE, decision.GIVE_UP):
            return action.code
        try:
            self._act(action)
            self.tries = 0
        except PodError as error:
            self._wait_for(error)
        return None

    def poll(self) -> None:
        """Asks how pod and run are. Raises PodError for a mistake, and for what the first poll finds in the way."""
        self.hosts = self.status = None
        try:
            self.pod = self.cloud.describe()
            if self.pod.state == READY:
                self.hosts = connect(self.cloud, self.flags.timeout, self.pod, partial=True)
        except PodError as error:
            # a login that has run out after a week is no reason to stop watching; one that never was, is
            passes = error.kind in PASSING or (error.kind in TRIED and error.kind != "hosts")
            if error.kind == "settings" or not (passes or self.was_seen):
                raise
            self.pod = Pod(self.cloud.settings.name, decision.UNKNOWN, reason=str(error).rstrip("."))
            return
        self.polls, self.was_seen = self.polls + 1, True
        if self.hosts:
            once = dataclasses.replace(self.hosts, retry=False)  # the next poll is the next try
            self.status = runs.status_of(once, self.job)

    def _act(self, action: Action) -> None:
        if action.kind in STEPS.values():
            lifetime.take(action.kind, self.cloud, self.pod)
        elif action.kind == decision.START:
            readiness.sync(self.hosts, self.job.code)
            attempt, _ = runs.start(self.hosts, self.job, self.status)
            self.memory.watched = attempt
            with contextlib.suppress(OSError):  # a full disk
                (self.folder / str(attempt)).mkdir(parents=True, exist_ok=True)  # its number is not given again
            log(f"attempt {attempt} started on {len(self.hosts.all)} hosts")

    def _wait_for(self, error: PodError) -> None:
        """Says why an action failed, and waits longer; raises what waiting can't fix."""
        quota = error.kind == "quota" and self.memory.gone  # that of the pod that is lost comes back
        login = error.kind == "login" and self.was_seen  # as in `poll`
        may_pass = error.kind in TRIED or quota or login
        if error.kind not in PASSING and not (may_pass and self.tries + 1 < MOST_TRIES):
            raise error
        self.tries += 1
        why = f"{str(error).rstrip('.')}{'; what the deleted pod has used may come back' if quota else ''}"
        log(f"{why}; again in {self.pause():.0f} s")

    def _report(self, action: Action) -> None:
        """Says what is done, always, and that all is well, now and then."""
        now = time.time()
        if action.kind == decision.WAIT and action.why == self.said and now - self.said_at < SAY_EVERY:
            return
        self.said, self.said_at = action.why, now
        place = f", step {self.memory.step}" if self.memory.step >= 0 else ""
        place += f"; {action.kind}" if action.kind else ""
        log(f"{action.why}{place}; {cost(self.cloud.settings, self.memory, now)}")

    def _fetch_logs(self, action: Action) -> None:
        """Brings the logs here, now and then and when an attempt is over."""
        is_time = action.kind != decision.WAIT or self.polls % LOGS_EVERY == 0
        if is_time and self.status and not self.status.absent:
            follower = following.Follower(self.hosts, self.job.id, self.status.attempt, show=lambda line: None)
            with contextlib.suppress(PodError, OSError), follower.alone():  # a person may follow them as well
                follower.round()

    def _load(self) -> Memory:
        file = self.folder / "supervise.json"
        try:
            return Memory(**json.loads(file.read_text())) if file.exists() else Memory()
        except (ValueError, TypeError) as error:
            raise SettingsError(f"{file} is damaged ({error}): remove it; only what was spent is in it.") from error

    def _save(self) -> None:
        """Writes down what was spent; a disk that is full for a while ends nothing."""
        try:
            host_setup.write(self.folder / "supervise.json", dataclasses.asdict(self.memory))
        except OSError as error:
            log(f"{self.folder}/supervise.json can't be written ({error.strerror}): what was spent is known here alone")


def log(text: str) -> None:
    """Prints a line, with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def cost(settings: Settings, memory: Memory, now: float) -> str:
    """Returns what the pods have cost while they were READY, for a person."""
    hours = (memory.paid + (now - memory.since if memory.since else 0)) / 3600
    dollars = f"{hours * settings.dollars_per_hour:.2f} dollars" if settings.price else "price unknown"
    return f"{hours * settings.accelerator.chips:.2f} chip-hours so far, {dollars}"


def command(args: argparse.Namespace) -> int:
    """Does what the arguments say; returns the exit code. A dry run prints a poll, and what a lost pod costs."""
    cloud, job = args.cloud, runs.make_job(args)
    if not cloud.dry:
        return Supervisor(cloud, job, args).run()
    pod = cloud.describe()
    for step in (DELETE, CREATE):
        lifetime.take(step, cloud, pod)
    hosts = connect(cloud, args.timeout)
    readiness.sync(hosts, job.code)
    runs.start(hosts, job, runs.status_of(hosts, job))
    return 0
