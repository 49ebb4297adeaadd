"""A run on all hosts: started once, polled, stopped. The hosts hold the truth about it, not here."""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import secrets
import shlex

from pods import code as codes
from pods import readiness
from pods.backend import PodError, SettingsError, say
from pods.causes import Cause, HostReport, first_cause
from pods.code import Code
from pods.hosts import Hosts

# of `python -m mlm`, that run on several hosts
COMMANDS = ("run", "train", "verify", "shards", "classify", "evaluate", "export")
GRACE = 300.0  # seconds for a run to save in, once it is asked to end


@dataclasses.dataclass(frozen=True)
class Job:
    """What every host is to run: `python -m mlm`, or a program, with argv and its place among the processes."""

    id: str
    argv: tuple[str, ...]
    env: dict[str, str]  # variables: the values are sent to the hosts, and written nowhere
    code: Code
    program: str = ""  # a file in the code; "" for `-m mlm`

    def refuse_another(self, there: dict | None) -> None:
        """Raises PodError if what is alive there, by its job.json, has other arguments."""
        if there and [there["program"], *there["argv"]] != [self.program, *self.argv]:
            raise PodError(
                f"run {self.id!r} is alive with other arguments: {shlex.join(there['argv'])}: choose another --id, or "
                f"end that one first: launch/tpu.py stop {self.id}.",
                "settings",
            )


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
            row = f"host {report.process} ({report.host}): {how_it_is(report.state, report.exit)}"
            if at := report.progress:
                step = "" if at.get("step") is None else f"step {at['step']}, "
                row += f", {step}{at.get('phase')}"
            rows.append(row)
        cause = [f"first cause: {self.cause.sentence}"] if self.cause else []
        return [*rows, *self.errors, *cause]


def how_it_is(state: str, end: dict | None) -> str:
    """Returns the state of a run on a host and what its exit.json says, for a person."""
    if not end:
        return state
    if end["signal"]:
        return f"{state}, signal {end['signal']}"
    # without a code, it was stopped before
    return "never started" if end["code"] is None else f"{state}, exit code {end['code']}"


def make_job(args: argparse.Namespace) -> Job:
    """Returns the job that the arguments of `run` describe. Raises SettingsError."""
    check_id(args.id)
    code = codes.pack()
    config = code.path_of(args.config)
    program = code.path_of(args.program) if args.program else ""
    bucket = args.cloud.settings.bucket.rstrip("/")
    workdir = args.workdir or (bucket and f"{bucket}/{args.id}")
    if not (workdir.startswith("/") or "://" in workdir):
        raise SettingsError(
            f"--workdir {workdir!r}: it must be absolute or gs://..., a folder that all hosts see; or set bucket in "
            "pod.toml."
        )
    for name in args.env:
        if name not in os.environ:
            name = name.partition("=")[0]
            raise SettingsError(
                f"--env {name}: give the name of a variable that is set here, not its value."
            )
    argv = (args.mlm, f"--config={config}", f"--workdir={workdir}", *args.words)
    return Job(args.id, argv, {name: os.environ[name] for name in args.env}, code, program)


def check_id(run: str) -> None:
    """Raises SettingsError for what can't be the name of a run's folder."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", run, re.ASCII):
        raise SettingsError(
            f"run id {run!r}: it must be letters, digits, '.', '_' and '-', 100 at most."
        )


def records(run: str) -> pathlib.Path:
    """Returns the folder for a run's files under the folder we are in: logs, and what a supervisor has spent."""
    return pathlib.Path("runs/pods") / run


def status(hosts: Hosts, run: str, attempt: int = 0) -> RunStatus:
    """Returns an attempt (0: the newest) of a run on all hosts."""
    answers = hosts.ask(["status", run, str(attempt)])
    errors = tuple(answer.error for answer in answers if answer.error)
    states = {answer.host.worker: answer.data for answer in answers if not answer.error}
    newest = max((data["attempt"] for data in states.values()), default=0)
    reports = []
    job = None
    stopped = False
    for worker, data in states.items():
        if data["attempt"] < newest:
            reports.append(HostReport(worker, data["host"], "absent"))
        else:
            files = (data[name] for name in ("exit", "progress", "cause"))
            reports.append(HostReport(worker, data["host"], data["state"], *files))
            job = job or data["job"]
            stopped = stopped or bool(data["stopped"])
    return RunStatus(newest, tuple(reports), errors, job, stopped)


def start(hosts: Hosts, job: Job, seen: RunStatus) -> tuple[int, bool]:
    """Starts a job on all hosts or on none, unless it is alive; returns its attempt, and whether this call started it.

    seen: its `status`. Raises PodError if a host does not answer, is not ready, or differs from the others, or if
    another job of this id is alive.
    """
    if seen.errors:
        raise PodError(f"nothing was started: {'; '.join(seen.errors)}.", "hosts")
    if not seen.running:
        problems, _ = readiness.sync(hosts, job.code)
        if not problems:
            here = [int(path.name) for path in records(job.id).glob("*") if path.name.isdigit()]
            attempt = max([seen.attempt, *here]) + 1
            return attempt, _start(hosts, job, attempt)
        seen = status(hosts, job.id)
        if not seen.running:  # nor has somebody else started it just now
            raise PodError(f"nothing was started: {'; '.join(problems)}.", "hosts")
    job.refuse_another(seen.job)
    if seen.job and seen.job["code"] != job.code.hash:
        say(f"run {job.id!r} is alive with code {seen.job['code'][:12]}, not with {job.code.label}")
    if absent := [f"host {one.process}" for one in seen.reports if one.state == "absent"]:  # Ctrl-C
        say(
            f"but it was not started on {', '.join(absent)}: if it stays so, launch/tpu.py stop {job.id}"
        )
    return seen.attempt, False


def _start(hosts: Hosts, job: Job, attempt: int) -> bool:
    """Starts on the first host, which decides between two who start at once, and then on the others.

    Returns whether it was us. Raises PodError if a host did not start it; then it is stopped on all.
    """
    launch = secrets.token_hex(8)
    text = {
        "id": job.id,
        "attempt": attempt,
        "code": job.code.hash,
        "program": job.program,
        "argv": job.argv,
        # for the card of an export: the hosts have no git
        "env": {"MLM_COMMIT": job.code.commit} | job.env,
        "launch": launch,
    }
    place = [f"--coordinator={hosts.all[0].address}", f"--processes={len(hosts.all)}"]
    texts = {
        host: json.dumps(text | {"place": [*place, f"--process-id={host.worker}"]}).encode()
        for host in hosts.all
    }
    first, *others = hosts.all
    answers = hosts.ask({first: ["start"]}, stdin=texts)
    there = answers[0].data.get("job")  # none where it was stopped before
    # somebody else's start came first; the other hosts are theirs too
    if there and there["launch"] != launch:
        job.refuse_another(there)
        return False
    if not answers[0].error:
        answers += hosts.ask({host: ["start"] for host in others}, stdin=texts)
    failures = [
        answer.error or f"{answer.host}: somebody else stopped or started it"
        for answer in answers
        if answer.error or (answer.data["job"] or {}).get("launch") != launch
    ]
    if failures:
        # one that did not answer may start it yet
        stops = hosts.ask(["stop", job.id, str(attempt), "0"])
        failures += [f"not stopped: {stop.error}" for stop in stops if stop.error]
        raise PodError(
            f"the run could not be started on all hosts ({'; '.join(failures)}); it was stopped where it had started. "
            "Then: run it again.",
            "hosts",
        )
    return True


def stop(hosts: Hosts, run: str) -> RunStatus:
    """Ends a run: SIGTERM, so that it saves; GRACE; SIGKILL. Raises PodError if a host fails to."""
    seen = status(hosts, run)
    if not seen.attempt:
        raise PodError(f"no host has a run {run!r}{'; '.join(('', *seen.errors))}.", "absent")
    words = ["stop", run, str(seen.attempt), str(GRACE)]
    hosts.require(hosts.ask(words, timeout=GRACE + 90), "stop")
    return status(hosts, run, seen.attempt)
