#!/usr/bin/env python3
"""Training pods, from a laptop: `python launch/tpu.py COMMAND`. Python 3.11's standard library, git and gcloud."""

import argparse
import importlib.util
import signal
import sys

if not importlib.util.find_spec("tomllib"):  # before what an older one can't even read
    sys.exit(
        f"tpu: this is Python {sys.version.split()[0]}, and must be 3.11 or later: python3.12 launch/tpu.py ..."
    )

import host_setup
from pods import backend, gcloud, lifetime, readiness, runs, settings, supervise
from pods import code as codes
from pods import follow as following
from pods.backend import PodError, SettingsError, say
from pods.hosts import Hosts, connect, quoted

EPILOG = """launch/README.md has the way from nothing to a training pod. Ctrl-C while logs are followed leaves the run
alone. Exit codes: 0; 2 for a setting that can't be right; of `run`, `logs` and `supervise` that of the run (README,
"Exit codes"); 130 after Ctrl-C; 143 after SIGTERM; 1 for everything else."""
PASS_ON = ("run", "supervise")  # commands that take --config.x=y, and what stands after --
HELP = {
    "--again": "another attempt of a run that has ended",
    "--detach": "do not follow the logs",
    "--down": "delete the pod when the run is done or given up",
    "--dry-run": "print what would be called, and change nothing",
    "--env": "the name of a variable to pass on; repeatable",
    "--every": "seconds between two polls",
    "--grace": "seconds to save in",
    "--id": "of the run; the same one again attaches to it; default: the config's name",
    "--patience": "hours of trouble without a new step, after which it gives up",
    "--program": "Python file that calls mlm's main(pretraining=...), in the place of python -m mlm",
    "--recreate": "delete a pod that won't come back, whoever made it, and create another one",
    "--timeout": "seconds for a host to answer",
    "--workdir": "that all hosts see; default: {bucket}/{id}",
}
EVERYWHERE = {"--dry-run": False, "--timeout": 60.0}
JOB = {"--id": "", "--workdir": "", "--program": "", "--env": ()}
SUPERVISE = {"--patience": 12.0, "--every": 30.0, "--recreate": False, "--down": False}


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code."""
    host_setup.prepare_streams()
    argv, words = split(argv)
    args = parser().parse_args(argv)
    try:
        if words and args.name not in PASS_ON:
            raise SettingsError(f"{args.name} takes no {words[0]}.")
        args.words = words
        args.cloud = gcloud.TpuVm(settings.from_arguments(args), backend.Runner(args.dry_run))
        if getattr(args, "id", ""):
            host_setup.folder_name(args.id)
        return args.command(args) or 0
    except (PodError, host_setup.HostError) as error:
        print(f"tpu {args.name}: {error}", file=sys.stderr)
        # a run's id, a folder without locks
        return error.code if isinstance(error, PodError) else SettingsError.code
    except KeyboardInterrupt:
        say(
            f"tpu {args.name}: interrupted; what was asked of the cloud or the hosts goes on there."
        )
        return 130
    except BrokenPipeError:  # as in `| head`
        sys.stderr.close()
        return 141  # as for whoever dies of SIGPIPE: a run that was followed is not done
    except OSError as error:  # a file of this machine that is in the way, or may not be written
        where = error.filename or "a file on this machine"  # a full disk has no name
        print(f"tpu {args.name}: {where}: {error.strerror}", file=sys.stderr)
        return 1


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (arguments of this tool, those that go to `python -m mlm` as they are)."""
    arguments = []
    words = []
    rest = iter(argv)
    for word in rest:
        if word == "--" and argv[0] in PASS_ON:
            words += rest
        elif word.startswith("--config."):
            words.append(word if "=" in word else f"{word}={next(rest, '')}")
        else:
            arguments.append(word)
    return arguments, words


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    text = "Training pods, from a laptop."
    root = argparse.ArgumentParser(
        prog="python launch/tpu.py", description=text, epilog=EPILOG, allow_abbrev=False
    )
    table = root.add_subparsers(metavar="COMMAND", required=True)
    for name, (function, words, flags) in COMMANDS.items():
        sub = table.add_parser(name, help=words, description=words, allow_abbrev=False)
        sub.set_defaults(command=function, name=name)
        if name in PASS_ON:
            sub.add_argument("config", metavar="CONFIG", help="such as configs/roberta_base.py")
            sub.add_argument(
                "--command", dest="mlm", default="run", choices=runs.COMMANDS, help="default: run"
            )
        elif name in ("status", "logs", "stop"):
            sub.add_argument("id", nargs="?" if name == "status" else None, help="of the run")
        for flag, default in (EVERYWHERE | flags).items():
            add_flag(sub, flag, default)
        settings.add_flags(sub)
    return root


def add_flag(sub: argparse.ArgumentParser, flag: str, default: object) -> None:
    """Adds a flag; what it takes is what its default is: a number, a text, nothing (False), or several texts (())."""
    if default is False:
        sub.add_argument(flag, action="store_true", help=HELP[flag])
    elif default == ():
        sub.add_argument(flag, action="append", default=[], metavar="NAME", help=HELP[flag])
    else:
        shown = f"; default: {default:g}" if default else ""
        kind = seconds if type(default) is float else str
        sub.add_argument(flag, type=kind, default=default, metavar="VALUE", help=HELP[flag] + shown)


def seconds(text: str) -> float:
    """Returns a number of seconds that can be waited for. Raises ValueError."""
    if not 0 <= float(text) <= 1e6:
        raise ValueError
    return float(text)


def follow(args: argparse.Namespace, hosts: Hosts, run: str, attempt: int) -> int:
    """Follows a run; returns its exit code. Ctrl-C leaves it alone."""
    try:
        seen = following.follow(following.Follower(hosts, run, attempt), args.every)
    except KeyboardInterrupt:
        say(f"\ndetached; the run goes on. Come back: python launch/tpu.py logs {quoted(run)}")
        say(
            f"how it does: python launch/tpu.py status {quoted(run)}; end it: python launch/tpu.py stop {quoted(run)}"
        )
        return 130  # not 0, which says that the run is done
    return show(seen, hosts)


def show(seen: runs.RunStatus, hosts: Hosts) -> int:
    """Prints how a run is; returns its exit code. Of a dry run there is nothing to print."""
    for line in seen.lines:
        print(line)
    return 0 if hosts.dry else seen.code


def _preflight(args: argparse.Namespace) -> int:
    hosts = connect(args.cloud, args.timeout)
    code = codes.pack()
    report = readiness.check(hosts, code)
    problems = report.problems or readiness.check_ports(hosts)  # a run that is alive holds them
    for line in [*report.lines, *report.remarks, *problems]:
        print(line)
    if not hosts.dry:
        say("not ready" if problems else f"ready: {len(hosts.all)} hosts, {code.label}")
    return 1 if problems else 0


def _run(args: argparse.Namespace) -> int:
    job = runs.make_job(args)
    hosts = connect(args.cloud, args.timeout)
    seen = runs.status_of(hosts, job)
    if not (args.again or seen.running or seen.absent or seen.errors):
        say(f"run {job.id!r} has ended (attempt {seen.attempt}); --again makes another attempt.")
        return show(seen, hosts)
    attempt, is_fresh = runs.start(hosts, job, seen)
    how = "started" if is_fresh else "is alive already, nothing was started"
    if not hosts.dry:
        say(f"run {job.id!r}, attempt {attempt}: {how} on {len(hosts.all)} hosts")
    return 0 if args.detach else follow(args, hosts, job.id, attempt)


def _status(args: argparse.Namespace) -> int:
    if args.id:
        hosts = connect(args.cloud, args.timeout, partial=True)
        seen = runs.status(hosts, args.id)
        if not hosts.dry:
            print(
                f"run {args.id!r}, attempt {seen.attempt}"
                if seen.attempt
                else f"there is no run {args.id!r}"
            )
        show(seen, hosts)
        return 1 if seen.errors else 0
    pod = args.cloud.describe()
    print(f"{pod.name}: {pod.condition}, {len(pod.hosts)} hosts", flush=True)
    if pod.state == backend.READY:
        hosts = connect(args.cloud, args.timeout, pod)
        answers = hosts.require(hosts.ask(["preflight", ""]), "status")
        alive = {
            (run["id"], run["attempt"]) for answer in answers for run in answer.get("runs", ())
        }
        for run, attempt in sorted(alive):
            print(f"run {run!r}, attempt {attempt}, is alive")
    return 0


def _logs(args: argparse.Namespace) -> int:
    hosts = connect(args.cloud, args.timeout, partial=True)
    seen = runs.status(hosts, args.id)
    if not seen.attempt and not hosts.dry:
        errors = "".join(f"; {error}" for error in seen.errors)
        raise PodError(f"no host has a run {args.id!r}{errors}.")
    return follow(args, hosts, args.id, seen.attempt or 1)


def _stop(args: argparse.Namespace) -> int:
    hosts = connect(args.cloud, args.timeout, partial=True)
    seen = runs.stop(hosts, args.id, args.grace)
    show(seen, hosts)
    return 1 if seen.running or seen.errors else 0


def _clean(args: argparse.Namespace) -> None:
    lifetime.clean(args.cloud)
    pod = args.cloud.describe()
    if pod.state == backend.READY:
        hosts = connect(args.cloud, args.timeout, pod)
        answers = hosts.require(hosts.ask(["clean"]), "clean")
        for removed in sorted({name for answer in answers for name in answer.get("removed", ())}):
            say(f"removed {removed}")


COMMANDS = {  # name: (function of the parsed arguments, help, {flag: default})
    "up": (
        lambda args: lifetime.up(args.cloud, args.every, args.recreate),
        "create the pod, and wait for it",
        {"--every": 15.0, "--recreate": False},
    ),
    "sync": (
        lambda args: readiness.sync(connect(args.cloud, args.timeout), codes.pack()),
        "bring the code, uncommitted changes included, and its packages to all hosts",
        {},
    ),
    "preflight": (_preflight, "is every host ready, and are they all alike?", {}),
    "run": (
        _run,
        "start python -m mlm on all hosts, and follow its logs; --config.x=y sets a key",
        JOB | {"--again": False, "--detach": False, "--every": 5.0},
    ),
    "status": (
        _status,
        "how a run is doing on every host, and why it ended; without an id, the pod",
        {},
    ),
    "logs": (
        _logs,
        "bring a run's logs here, one file a host, and show them as they come",
        {"--every": 5.0},
    ),
    "stop": (_stop, "end a run: SIGTERM, so that it saves; wait; SIGKILL", {"--grace": 300.0}),
    "supervise": (supervise.command, "start a run and watch it until it is done", JOB | SUPERVISE),
    "clean": (
        _clean,
        "delete requests that only use up quota, and runs that have ended, on the hosts",
        {},
    ),
    "down": (lambda args: lifetime.down(args.cloud), "delete all that `up` has made", {}),
}

if __name__ == "__main__":
    # what gcloud or ssh is asked runs in a session of its own, and would outlive us
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
