#!/usr/bin/env python3
"""Training pods, from a laptop: `python launch/tpu.py COMMAND`. Python 3.11's standard library, git and gcloud."""

import argparse
import importlib.util
import pathlib
import signal
import sys

if not importlib.util.find_spec("tomllib"):  # before what an older one can't even read
    sys.exit(
        f"tpu: this is Python {sys.version.split()[0]}, and must be 3.11 or later: python3.12 launch/tpu.py ..."
    )

import host_setup
from pods import backend, gcloud, lifetime, readiness, runs, settings, supervise
from pods import code as codes
from pods.backend import PodError, SettingsError, say
from pods.follow import follow
from pods.hosts import Hosts, connect

EPILOG = """launch/README.md has the way from nothing to a training pod. Ctrl-C while logs are followed leaves the run
alone. Exit codes: 0; 2 for a setting that can't be right; of `run`, `logs` and `supervise` that of the run (README,
"Exit codes"); 130 after Ctrl-C; 143 after SIGTERM; 1 for everything else."""


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code."""
    host_setup.prepare_streams()
    args, args.words = parser().parse_known_args(host_setup.join_overrides(argv))
    try:
        if args.words and "config" not in args:
            raise SettingsError(f"{args.name} takes no {args.words[0]}.")
        args.cloud = gcloud.TpuVm(settings.load(args.pod))
        if "config" in args:
            args.id = args.id or pathlib.Path(args.config).stem
        return args.command(args) or 0
    except (PodError, host_setup.HostError) as error:
        print(f"tpu {args.name}: {error}", file=sys.stderr)
        return getattr(error, "code", SettingsError.code)
    except KeyboardInterrupt:
        say(
            f"tpu {args.name}: interrupted; what was asked of the cloud or the hosts goes on there."
        )
        return 130


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. What `run` and `supervise` do not know goes to `python -m mlm`."""
    root = argparse.ArgumentParser(prog="python launch/tpu.py", epilog=EPILOG, allow_abbrev=False)
    table = root.add_subparsers(metavar="COMMAND", required=True)
    for name, (function, words, *flags) in COMMANDS.items():
        sub = table.add_parser(
            name, help=words, description=words, allow_abbrev=False, argument_default=""
        )
        sub.set_defaults(command=function, name=name)
        sub.add_argument(
            "--pod", default="pod.toml", metavar="FILE", help="default: pod.toml in this folder"
        )
        for flag in flags:
            sub.add_argument(flag, **FLAGS[flag])
    return root


def show(seen: runs.RunStatus) -> int:
    """Prints how a run is; returns its exit code."""
    for line in seen.lines:
        print(backend.printable(line))
    return seen.code


def _follow(hosts: Hosts, run: str, attempt: int) -> int:
    """Follows a run; returns its exit code. Ctrl-C leaves it alone."""
    try:
        return show(follow(hosts, run, attempt))
    except KeyboardInterrupt:
        say(f"\ndetached; the run goes on. Come back: python launch/tpu.py logs {run}")
        say(
            f"how it does: python launch/tpu.py status {run}; end it: python launch/tpu.py stop {run}"
        )
        return 130  # not 0, which says that the run is done


def _sync(args: argparse.Namespace) -> int:
    hosts = connect(args.cloud)
    problems, lines = readiness.sync(hosts, codes.pack())
    for line in [*lines, *problems]:
        print(backend.printable(line))
    say("not ready" if problems else f"ready: {len(hosts.all)} hosts")
    return 1 if problems else 0


def _run(args: argparse.Namespace) -> int:
    job = runs.make_job(args)
    hosts = connect(args.cloud)
    attempt, is_fresh = runs.start(hosts, job, runs.status(hosts, job.id))
    how = "started" if is_fresh else "is alive already, nothing was started"
    say(f"run {job.id!r}, attempt {attempt}: {how} on {len(hosts.all)} hosts")
    return 0 if args.detach else _follow(hosts, job.id, attempt)


def _status(args: argparse.Namespace) -> int:
    seen = runs.status(connect(args.cloud), args.id)
    show(seen)
    return 1 if seen.errors else 0


def _logs(args: argparse.Namespace) -> int:
    hosts = connect(args.cloud)
    seen = runs.status(hosts, args.id)
    if not seen.attempt:
        raise PodError(f"no host has a run {args.id!r}{'; '.join(('', *seen.errors))}.")
    return _follow(hosts, args.id, seen.attempt)


def _stop(args: argparse.Namespace) -> int:
    seen = runs.stop(connect(args.cloud), args.id)
    show(seen)
    return 1 if seen.running or seen.errors else 0


FLAGS = {  # what argparse is told of each
    "id": {"help": "of the run"},
    "config": {"metavar": "CONFIG", "help": "such as configs/roberta_base.py"},
    "--command": {
        "dest": "mlm",
        "default": "run",
        "choices": runs.COMMANDS,
        "help": "of python -m mlm; default: run",
    },
    "--id": {
        "help": "of the run; the same one again attaches to it; default: the config's name",
    },
    "--workdir": {"help": "that all hosts see; default: {bucket}/{id}"},
    "--program": {
        "metavar": "FILE",
        "help": "Python file that calls mlm's main(pretraining=...), in the place of python -m mlm",
    },
    "--env": {
        "action": "append",
        "default": [],
        "metavar": "NAME",
        "help": "the name of a variable to pass on; repeatable",
    },
    "--detach": {"action": "store_true", "help": "do not follow the logs"},
    "--patience": {
        "type": float,
        "default": 12.0,
        "metavar": "HOURS",
        "help": "of trouble without a new step, after which it gives up; default: 12",
    },
    "--down": {"action": "store_true", "help": "delete the pod when the run is done or given up"},
}
JOB = ("config", "--command", "--id", "--workdir", "--program", "--env")
COMMANDS = {  # name: (function of the parsed arguments, help, flags)
    "up": (
        lambda args: lifetime.up(args.cloud),
        "create the pod, in the place of one that won't come back, and wait for it",
    ),
    "sync": (
        _sync,
        "bring this code and its packages to all hosts; are they all ready, and alike?",
    ),
    "run": (
        _run,
        "start python -m mlm on all hosts, and follow its logs; --config.x=y sets a key",
        *JOB,
        "--detach",
    ),
    "status": (_status, "how a run is doing on every host, and why it ended", "id"),
    "logs": (_logs, "bring a run's logs here, one file a host, and show them as they come", "id"),
    "stop": (_stop, "end a run: SIGTERM, so that it saves; wait; SIGKILL", "id"),
    "supervise": (
        lambda args: supervise.Supervisor(args.cloud, runs.make_job(args), args).run(),
        "start a run and watch it until it is done",
        *JOB,
        "--patience",
        "--down",
    ),
    "down": (lambda args: lifetime.down(args.cloud), "delete the pod and its queued resource"),
}

if __name__ == "__main__":
    # what gcloud or ssh is asked would outlive us
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
