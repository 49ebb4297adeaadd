"""A run on all hosts: started once, polled, stopped. The hosts hold the truth about it, not here."""

import argparse
import dataclasses
import json
import os
import pathlib
import secrets
import shlex

import host_setup

from pods import code as codes
from pods import readiness
from pods.backend import PodError, SettingsError, say
from pods.causes import Cause, HostReport, first_cause
from pods.code import Code
from pods.hosts import Hosts, quoted

# of `python -m mlm`, that run on several hosts
COMMANDS = ("run", "train", "verify", "shards", "classify", "evaluate", "export")


@dataclasses.dataclass(frozen=True)
class Job:
    """What every host is to run: `python -m mlm`, or a program, with argv and its place among the processes."""

    id: str
    argv: tuple[str, ...]
    env: dict[str, str]  # variables: the values are sent to the hosts, and written nowhere
    code: Code
    program: str = ""  # a file in the code; "" for `-m mlm`

    def difference(self, other: dict) -> str:
        """Returns in what the arguments of a job.json differ from ours, "" if they are the same."""
        there = [other["program"], *other["argv"]]
        here = [self.program, *self.argv]
        if there == here:
            return ""
        sides = {
            "only there": [word for word in there if word and word not in here],
            "only here": [word for word in here if word and word not in there],
        }
        differences = [f"{side}: {shlex.join(words)}" for side, words in sides.items() if words]
        return "; ".join(differences) or "the same arguments in another order"


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """An attempt of a run (0: there is none) on all hosts.

    errors: of those that did not answer; job: its job.json; stopped: by `stop`.
    """

    attempt: int
    reports: tuple[HostReport, ...]
    errors: tuple[str, ...] = ()
    job: dict | None = None
    stopped: bool = False

    @property
    def running(self) -> bool:
        """Whether it is alive on any host."""
        return any(report.state == "running" for report in self.reports)

    @property
    def absent(self) -> bool:
        """Whether no host that answers knows it."""
        return all(report.state == "absent" for report in self.reports)

    @property
    def step(self) -> int:
        """The furthest step of any host, -1 if none has said one."""
        steps = [(report.progress or {}).get("step") for report in self.reports]
        return max((step for step in steps if isinstance(step, int)), default=-1)

    @property
    def cause(self) -> Cause | None:
        """The end that brought the others with it; None if nothing has gone wrong."""
        return first_cause(self.reports)

    @property
    def code(self) -> int:
        """The exit code for all: 0 if every host is known to have ended with 0, else that of the first cause."""
        if self.cause:
            return self.cause.code
        ended = [report.exit and report.exit["code"] == 0 for report in self.reports]
        return 0 if ended and all(ended) and not self.errors else 1

    @property
    def lines(self) -> list[str]:
        """One line a host, for a person: its state, exit code and last step; and the first cause under them."""
        rows = []
        for report in self.reports:
            words = [
                f"host {report.process} ({report.host}): {how_it_is(report.state, report.exit)}"
            ]
            if report.progress:
                step = report.progress.get("step")
                phase = report.progress.get("phase")
                words.append(f"{phase}" if step is None else f"step {step} ({phase})")
            rows.append(", ".join(words))
        return [
            *rows,
            *self.errors,
            *([f"first cause: {self.cause.sentence}"] if self.cause else []),
        ]


def how_it_is(state: str, end: dict | None) -> str:
    """Returns the state of a run on a host and what its exit.json says, for a person."""
    if not end:
        return state
    if end.get("code") is None and not end.get("signal"):  # stopped before
        return "never started"
    return (
        f"{state}, signal {end['signal']}"
        if end.get("signal")
        else f"{state}, exit code {end['code']}"
    )


def make_job(args: argparse.Namespace) -> Job:
    """Returns the job that the arguments of `run` describe. Raises SettingsError."""
    code = codes.pack()
    run = args.id or pathlib.Path(args.config).stem
    config = code.path_of(args.config)
    program = code.path_of(args.program) if args.program else ""
    workdir = args.workdir
    bucket = args.cloud.settings.bucket.rstrip("/")
    if not workdir and not bucket:
        sentence = "there is no folder for the run that all hosts see: --workdir gs://..., or bucket in pod.toml."
        raise SettingsError(sentence)
    workdir = workdir or f"{bucket}/{host_setup.folder_name(run)}"
    if not (workdir.startswith("/") or "://" in workdir):
        sentence = f"--workdir {workdir!r} must be absolute or gs://...: on the hosts there is no folder we are in."
        raise SettingsError(sentence)
    for name in args.env:
        if name not in os.environ:
            name = name.partition("=")[0]
            raise SettingsError(
                f"--env {name}: give the name of a variable that is set here, not its value."
            )
    argv = (args.mlm, f"--config={config}", f"--workdir={workdir}", *args.words)
    return Job(run, argv, {name: os.environ[name] for name in args.env}, code, program)


def records(run: str) -> pathlib.Path:
    """Returns the folder for a run's files under the folder we are in: logs, and what a supervisor has spent."""
    return pathlib.Path("runs/pods") / host_setup.folder_name(run)


def status(hosts: Hosts, run: str, attempt: int = 0) -> RunStatus:
    """Returns an attempt (0: the newest) of a run on all hosts."""
    answers = hosts.ask(["status", run, str(attempt)])
    errors = tuple(answer.fault for answer in answers if answer.error)
    answered = {
        answer.host.worker: answer.data for answer in answers if answer.data and not answer.error
    }
    newest = max((data["attempt"] for data in answered.values()), default=0)
    reports = []
    job = None
    stopped = False
    for worker, data in answered.items():
        if data["attempt"] < newest:
            reports.append(HostReport(worker, data["host"], "absent"))
        else:
            files = (data[name] for name in ("exit", "progress", "cause"))
            reports.append(HostReport(worker, data["host"], data["state"], *files))
            job = job or data["job"]
            stopped = stopped or bool(data["stopped"])
    return RunStatus(newest, tuple(reports), errors, job, stopped)


def status_of(hosts: Hosts, job: Job) -> RunStatus:
    """Returns `status`, but where another job (other arguments or code) has ended all hosts are "absent".

    Raises PodError if one with other arguments is alive.
    """
    seen = status(hosts, job.id)
    difference = job.difference(seen.job) if seen.job else ""
    if difference and seen.running:
        raise _other_arguments(job, difference, seen.attempt)
    is_other = seen.job and (difference or seen.job["code"] != job.code.hash)
    if is_other and not seen.running and not seen.errors:
        absent = tuple(HostReport(report.process, report.host, "absent") for report in seen.reports)
        return dataclasses.replace(seen, reports=absent)
    return seen


def _other_arguments(job: Job, difference: str, attempt: int) -> PodError:
    return PodError(
        f"run {job.id!r}, attempt {attempt}, is alive with other arguments ({difference}): choose another --id, or end "
        f"that one first: launch/tpu.py stop {quoted(job.id)}.",
        "settings",
    )


def start(hosts: Hosts, job: Job, seen: RunStatus) -> tuple[int, bool]:
    """Starts a job on all hosts or on none, unless it is alive; returns its attempt, and whether this call started it.

    seen: its `status_of`. Raises PodError if a host does not answer, is not ready, or differs from the others.
    """
    if seen.errors:
        raise PodError(f"nothing was started: {'; '.join(seen.errors)}.", "hosts")
    if seen.running:
        if seen.job and seen.job["code"] != job.code.hash:
            say(
                f"run {job.id!r} is alive with code {seen.job['code'][:12]}, not with {job.code.label}"
            )
        # Ctrl-C
        if absent := [
            f"host {report.process}" for report in seen.reports if report.state == "absent"
        ]:
            say(
                f"but it was not started on {', '.join(absent)}: if it stays so, launch/tpu.py stop {quoted(job.id)}"
            )
        return seen.attempt, False
    report = readiness.check(hosts, job.code)
    for remark in report.remarks:
        say(remark)
    if report.problems:
        if (seen := status_of(hosts, job)).running:  # somebody else started it just now
            return seen.attempt, False
        raise PodError(f"nothing was started: {'; '.join(report.problems)}.", "hosts")
    here = [int(path.name) for path in records(job.id).glob("*") if path.name.isdigit()]
    attempt = max([seen.attempt, *here]) + 1
    return attempt, _start(hosts, job, attempt, report.packages)


def _start(hosts: Hosts, job: Job, attempt: int, packages: str) -> bool:
    """Starts on the first host, which decides between two who start at once, and then on the others.

    Returns whether it was us. Raises PodError if a host did not start it; then it is stopped on all.
    """
    launch = "..." if hosts.dry else secrets.token_hex(8)
    # for the card of an export: the hosts have no git
    env = {"MLM_COMMIT": job.code.commit} | job.env
    text = {
        "id": job.id,
        "attempt": attempt,
        "code": job.code.hash,
        "packages": packages,
        "program": job.program,
        "argv": job.argv,
        "env": dict.fromkeys(env, "...") if hosts.dry else env,  # a dry run prints it
        "launch": launch,
    }
    place = [f"--coordinator={hosts.all[0].address}", f"--processes={len(hosts.all)}"]
    texts = {
        host: json.dumps(text | {"place": [*place, f"--process-id={host.worker}"]}).encode()
        for host in hosts.all
    }
    answers = hosts.ask({hosts.all[0]: ["start"]}, stdin=texts)
    there = answers[0].data.get("job")  # none where it was stopped before
    # somebody else's start came first; the other hosts are theirs too
    if there and there["launch"] != launch:
        if difference := job.difference(there):
            raise _other_arguments(job, difference, attempt)
        return False
    if not answers[0].error:
        answers += hosts.ask({host: ["start"] for host in hosts.all[1:]}, stdin=texts)
    failures = [
        answer.fault or f"{answer.host}: somebody else stopped or started it"
        for answer in answers
        if answer.error or (answer.data.get("job") or {}).get("launch") != launch
    ]
    if failures and not hosts.dry:
        # one that did not answer may start it yet
        stops = hosts.ask(["stop", job.id, str(attempt), "0"])
        left = ", ".join(str(stop.host) for stop in stops if stop.error)
        but = (
            f", but {left} did not confirm that: launch/tpu.py stop {quoted(job.id)}"
            if left
            else ""
        )
        why = f"the run could not be started on all hosts ({'; '.join(failures)})"
        raise PodError(
            f"{why}; it was stopped where it had started{but}. Then: run --again.", "hosts"
        )
    return True


def stop(hosts: Hosts, run: str, grace: float) -> RunStatus:
    """Ends a run: SIGTERM, so that it saves, at most `grace` seconds, SIGKILL. Raises PodError if a host fails to."""
    seen = status(hosts, run)
    if not seen.attempt and not seen.errors and not hosts.dry:
        raise PodError(f"there is no run {run!r} on these hosts.", "absent")
    attempt = seen.attempt or 1
    hosts.require(hosts.ask(["stop", run, str(attempt), f"{grace:g}"], timeout=grace + 90), "stop")
    return status(hosts, run, attempt)
