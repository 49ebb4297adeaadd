"""A run on all hosts: started once, polled, stopped. The hosts hold the truth about it, not here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import secrets
import shlex

import host_setup

from pods import code as codes
from pods import preflight
from pods.backend import Host, say
from pods.causes import Cause, HostReport, first_cause
from pods.code import Code
from pods.errors import PodError, SettingsError
from pods.hosts import Answer, Hosts, label, quoted

COMMANDS = (
    "run",
    "train",
    "verify",
    "shards",
    "classify",
    "evaluate",
    "export",
)  # of `python -m mlm`, that run on several hosts
PLACE = 3  # arguments at the end of a job's that say which process it is
STOPPED = "stopped.json"  # under runs/pods/{id}: the attempt that was ended by `stop`


@dataclasses.dataclass(frozen=True)
class Job:
    """What every host is to run: `python -m mlm`, or a program, with argv and its place among the processes."""

    id: str
    argv: tuple[str, ...]
    env: tuple[str, ...]  # names: the values are taken from our environment when the run starts, and from nowhere else
    code: Code
    program: str = ""  # a file in the code; "" for `-m mlm`


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """An attempt of a run (0: there is none) on all hosts; errors: of those that did not answer; job: its job.json."""

    attempt: int
    reports: tuple[HostReport, ...]
    errors: tuple[str, ...] = ()
    job: dict = dataclasses.field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether it is alive on any host."""
        return any(report.state == "running" for report in self.reports)

    @property
    def cause(self) -> Cause | None:
        """The end that brought the others with it; None if nothing has gone wrong."""
        return first_cause(report for report in self.reports if report.state != "absent")

    @property
    def code(self) -> int:
        """The exit code for all: 0 if every host is known to have ended with 0, else that of the first cause."""
        if self.cause:
            return self.cause.code
        ended = [report.exit and report.exit["code"] == 0 for report in self.reports]
        return 0 if ended and all(ended) and not self.errors else 1


def make_job(args: argparse.Namespace) -> Job:
    """Returns the job that the arguments of `run` describe. Raises SettingsError."""
    code, run = codes.pack(root := codes.repository()), args.id or pathlib.Path(args.config).stem
    config = codes.path_in(root, code, args.config)
    program = codes.path_in(root, code, args.program) if args.program else ""
    workdir, bucket = args.workdir, args.cloud.settings.bucket.rstrip("/")
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
            raise SettingsError(f"--env {name}: give the name of a variable that is set here, not its value.")
    argv = (args.mlm, f"--config={config}", f"--workdir={workdir}", *args.words)
    return Job(run, argv, tuple(args.env), code, program)


def records(run: str) -> pathlib.Path:
    """Returns the folder for a run's files under the folder we are in: logs, and what a supervisor has spent."""
    return pathlib.Path("runs/pods") / host_setup.folder_name(run)


def status(hosts: Hosts, run: str, attempt: int | None = None) -> RunStatus:
    """Returns an attempt (default: the newest) of a run on all hosts."""
    answers = hosts.ask(["status", "--", run, *([] if attempt is None else [str(attempt)])])
    attempt = max((answer.data.get("attempt", 0) for answer in answers), default=0)
    reports, job = [], {}
    for worker, data in ((answer.host.worker, answer.data) for answer in answers if "attempt" in answer.data):
        if data["attempt"] == attempt:
            files = data["exit"], data["progress"], data["cause"]
            reports.append(HostReport(worker, data["host"], data["state"], *files))
            job = job or data["job"] or {}
        else:
            reports.append(HostReport(worker, data["host"], "absent"))
    errors = tuple(f"{label(answer.host)}: {answer.error}" for answer in answers if answer.error)
    return RunStatus(attempt, tuple(reports), errors, job)


def status_of(hosts: Hosts, job: Job) -> RunStatus:
    """Returns `status`, but where another job has ended all hosts are "absent". Raises PodError if another is alive."""
    seen = status(hosts, job.id)
    if seen.running:
        _require_same(job, seen.job, seen.attempt)
    elif seen.job and not seen.errors and (difference(job, seen.job) or seen.job.get("code") != job.code.hash):
        absent = tuple(HostReport(report.process, report.host, "absent") for report in seen.reports)
        return dataclasses.replace(seen, reports=absent, job={})
    return seen


def difference(job: Job, other: dict) -> str:
    """Returns in what the arguments of a job.json differ from a job's, "" if they are the same."""
    there = [word for word in (other.get("program"), *other.get("argv", ())) if word][:-PLACE]
    here = [word for word in (job.program, *job.argv) if word]
    if there == here:
        return ""
    only_there, only_here = [word for word in there if word not in here], [word for word in here if word not in there]
    sides = {"only there": only_there, "only here": only_here}
    differences = [f"{side}: {shlex.join(words)}" for side, words in sides.items() if words]
    return "; ".join(differences) or "the same arguments in another order"


def _require_same(job: Job, other: dict, attempt: int) -> None:
    """Raises PodError if what is alive is another job; other: its job.json, {} if no host knows."""
    if other and (differs := difference(job, other)):
        raise PodError(
            f"run {job.id!r}, attempt {attempt}, is alive with other arguments ({differs}): choose another --id, or "
            f"end that one first: launch/tpu.py stop {quoted(job.id)}.",
            "settings",
        )


@dataclasses.dataclass(frozen=True)
class Started:
    """What `start` has done."""

    attempt: int
    fresh: bool  # started by this call
    ended: RunStatus | None = None  # how it had ended before, if nothing was started


def start(hosts: Hosts, job: Job, *, again: bool = False) -> Started:
    """Starts a job on all hosts or on none; if it is alive it is left alone, and if it has ended it needs `again`.

    Another job's attempt (other arguments or code) with this id does not count once it has ended. Raises PodError if
    one is alive, or a host does not answer, is not ready, or differs from the others.
    """
    seen = status_of(hosts, job)
    if seen.errors:
        raise PodError(f"nothing was started: {'; '.join(seen.errors)}.", "hosts")
    if seen.running:
        if (code := seen.job.get("code")) and code != job.code.hash:
            say(f"run {job.id!r} is alive with code {code[:12]}, not with {job.code.label}")
        return Started(seen.attempt, False)
    if not again and any(report.state != "absent" for report in seen.reports):
        return Started(seen.attempt, False, seen)
    report = preflight.check(hosts, job.code.hash, clear_lock=True)
    for remark in report.remarks:
        say(remark)
    if report.problems:
        if (seen := status_of(hosts, job)).running:  # somebody else started it just now
            return Started(seen.attempt, False)
        raise PodError(f"nothing was started: {'; '.join(report.problems)}.", "hosts")
    here = [int(path.name) for path in records(job.id).glob("*") if path.name.isdigit()]
    return _start(hosts, job, max([seen.attempt, *here]) + 1, report.requirements)


def _start(hosts: Hosts, job: Job, attempt: int, requirements: str) -> Started:
    """Starts on the first host, which decides between two who start at once, and then on the others."""
    launch = "..." if hosts.dry else secrets.token_hex(8)
    texts = {host: _text(hosts, job, host, attempt, requirements, launch) for host in hosts.all}
    for group in (hosts.all[:1], hosts.all[1:]):
        answers = hosts.ask({host: ["start"] for host in group}, stdin=texts)
        if hosts.dry:
            continue
        errors = [f"{label(answer.host)}: {answer.error}" for answer in answers if answer.error]
        strangers = [answer for answer in answers if not answer.error and _launch(answer) != launch]
        if strangers and group == hosts.all[:1]:  # somebody else's start came first; the other hosts are theirs too
            _require_same(job, strangers[0].data["job"] or {}, attempt)
            return Started(attempt, False)
        errors += [f"{label(answer.host)}: somebody else stopped or started it" for answer in strangers]
        if errors:
            _take_back(hosts, job, attempt, "; ".join(errors))
    return Started(attempt, True)


def _launch(answer: Answer) -> str:
    """Returns whose start it was that a host's attempt came from."""
    return (answer.data["job"] or {}).get("launch", "")


def _text(hosts: Hosts, job: Job, host: Host, attempt: int, requirements: str, launch: str) -> bytes:
    count, process = len(hosts.all), host.worker
    place = [f"--coordinator={hosts.all[0].address}", f"--processes={count}", f"--process-id={process}"]
    words = {
        "id": job.id,
        "attempt": attempt,
        "code": job.code.hash,
        "requirements": requirements,
        "argv": [*job.argv, *place],
        "program": job.program,
        "env": {name: "..." if hosts.dry else os.environ[name] for name in job.env},
        "process": process,
        "processes": count,
        "launch": launch,
    }
    return json.dumps(words).encode()


def _take_back(hosts: Hosts, job: Job, attempt: int, why: str) -> None:
    """Stops this attempt on all hosts, and raises PodError: one that did not answer may start it yet."""
    answers = hosts.ask(["stop", "--", job.id, str(attempt), "0"])
    left = ", ".join(label(answer.host) for answer in answers if answer.error)
    but = f", but {left} did not confirm that: launch/tpu.py stop {quoted(job.id)}" if left else ""
    sentence = f"the run could not be started on all hosts ({why}); it was stopped where it had started"
    raise PodError(f"{sentence}{but}. Then: run --again.", "hosts")


def stop(hosts: Hosts, run: str, grace: float) -> RunStatus:
    """Ends a run: SIGTERM, so that it saves, at most `grace` seconds, SIGKILL. Raises PodError if a host fails to.

    It is noted here, so that its supervisor does not start it again.
    """
    seen = status(hosts, run)
    if not seen.attempt and not seen.errors and not hosts.dry:
        raise PodError(f"there is no run {run!r} on these hosts.", "absent")
    attempt, folder = seen.attempt or 1, records(run)
    if not hosts.dry:
        folder.mkdir(parents=True, exist_ok=True)
        host_setup.write(folder / STOPPED, {"attempt": attempt})
    hosts.require(hosts.ask(["stop", "--", run, str(attempt), f"{grace:g}"], timeout=grace + 90), "stop")
    return status(hosts, run, attempt)


def lines(seen: RunStatus) -> list[str]:
    """Returns one line a host: its state, exit code, last step, and the first cause under them."""
    rows = []
    for report in seen.reports:
        words = [f"host {report.process} ({report.host}): {report.state}", *how_it_ended(report.exit)]
        if report.progress:
            step, phase = report.progress.get("step"), report.progress.get("phase")
            words.append(f"{phase}" if step is None else f"step {step} ({phase})")
        rows.append(", ".join(words))
    causes = [f"first cause: {seen.cause.sentence}"] if seen.cause else []
    return [*rows, *seen.errors, *causes]


def how_it_ended(end: dict | None) -> list[str]:
    """Returns what exit.json says, for a person; nothing if it is not there."""
    if not end:
        return []
    return [f"signal {end['signal']}" if end.get("signal") else f"exit code {end.get('code')}"]
