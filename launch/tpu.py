#!/usr/bin/env python3
"""Training pods, from a laptop: `python launch/tpu.py COMMAND`. Python 3.11's standard library, git and gcloud."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import host_setup
from pods import backend, gcloud, lifetime, notebook, preflight, runs, settings, supervise, sync
from pods import code as codes
from pods import follow as following
from pods.backend import say
from pods.errors import PodError, SettingsError
from pods.hosts import Hosts, connect, quoted

EPILOG = """launch/README.md has the way from nothing to a training pod. Ctrl-C while logs are followed leaves the run
alone. Exit codes: 0; 2 for a setting that can't be right; of `run`, `logs` and `supervise` that of the run (README,
"Exit codes"); 130 after Ctrl-C; 1 for everything else."""
PASS_ON = ("run", "supervise")  # commands that take --config.x=y, and what stands after --


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code."""
    host_setup.prepare_streams()
    argv, words = split(argv)
    args = parser().parse_args(argv)
    try:
        if words and args.name not in PASS_ON:
            raise SettingsError(f"{args.name} takes no {words[0]}.")
        args.words, args.cloud = words, gcloud.TpuVm(settings.from_arguments(args), backend.Runner(args.dry_run))
        if getattr(args, "id", None) is not None:
            host_setup.folder_name(args.id)
        return args.command(args) or 0
    except (PodError, host_setup.HostError) as error:
        print(f"tpu {args.name}: {error}", file=sys.stderr)
        return error.code if isinstance(error, PodError) else SettingsError.code  # a run's id, a folder without locks
    except KeyboardInterrupt:
        say(f"tpu {args.name}: interrupted; what was asked of the cloud or the hosts goes on there.")
        return 130
    except BrokenPipeError:  # as in `| head`
        sys.stderr.close()
        return 141  # as for whoever dies of SIGPIPE: a run that was followed is not done


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (arguments of this tool, those that go to `python -m mlm` as they are)."""
    arguments, words, rest = [], [], iter(argv)
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
    root = argparse.ArgumentParser(prog="python launch/tpu.py", description=text, epilog=EPILOG, allow_abbrev=False)
    table = root.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int | None], words: str) -> argparse.ArgumentParser:
        sub = table.add_parser(name, help=words, description=words, allow_abbrev=False)
        sub.add_argument("--dry-run", action="store_true", help="print what would be called, and change nothing")
        add_number(sub, "--timeout", 60.0, "for a host to answer")
        settings.add_flags(sub)
        sub.set_defaults(command=function, name=name)
        return sub

    sub = command("up", lambda a: lifetime.up(a.cloud, a.every, a.recreate), "create the pod, and wait for it")
    add_number(sub, "--every", 15.0, "between two polls")
    sub.add_argument("--recreate", action="store_true", help="delete one that won't come back, and create another one")
    sub = command("sync", _sync, "bring the code, uncommitted changes included, and its packages to all hosts")
    add_extra(sub)
    sub = command("preflight", _preflight, "is every host ready, and are they all alike?")
    sub.add_argument("--clear-lock", action="store_true", help="remove libtpu's lock file where nobody holds it")
    sub = command("run", _run, "start python -m mlm on all hosts, and follow its logs; --config.x=y sets a key")
    add_job(sub)
    sub.add_argument("--again", action="store_true", help="another attempt of a run that has ended")
    sub.add_argument("--detach", action="store_true", help="do not follow the logs")
    add_follow(sub)
    sub = command("status", _status, "how a run is doing on every host, and why it ended")
    sub.add_argument("id", nargs="?", help="of the run; default: the pod, and what is alive there")
    sub = command("logs", _logs, "bring a run's logs here, one file a host, and show them as they come")
    sub.add_argument("id")
    add_follow(sub)
    sub = command("stop", _stop, "end a run: SIGTERM, so that it saves; wait; SIGKILL")
    sub.add_argument("id")
    add_number(sub, "--grace", 300.0, "to save in")
    sub = command("supervise", supervise.command, "start a run and watch it until it is done")
    add_job(sub)
    add_extra(sub)
    add_number(sub, "--max-crashes", 3, "in a row without progress, after which it gives up")
    add_number(sub, "--max-preemptions", 100, "and ends after a save, after which it gives up")
    add_number(sub, "--silent", 5, "polls without an answer, after which a host is taken for dead if a run has ended")
    add_number(sub, "--hang", 1800.0, "without progress on any host, after which the run is stopped; 0: never")
    add_number(sub, "--every", 30.0, "between two polls")
    add_number(sub, "--grace", 300.0, "for a run that is stopped to save")
    recreate = "delete and create again even a pod that your `up` has not made"
    sub.add_argument("--recreate", action="store_true", help=recreate)
    sub = command("notebook", notebook.command, "JupyterLab on host 0, with its chips, and a tunnel to it")
    sub.add_argument("--port", type=int, default=8888, help="of this machine; default: 8888")
    add_number(sub, "--every", 2.0, "between two polls until it serves")
    sub = command("clean", _clean, "delete requests that only use up quota, and runs that have ended, on the hosts")
    sub.add_argument("--keep", action="append", default=[], metavar="ID", help="of a run to keep")
    command("down", lambda args: lifetime.down(args.cloud), "delete all that `up` has made")
    return root


def add_number(sub: argparse.ArgumentParser, flag: str, default: float, words: str) -> None:
    """Adds a flag that takes a number: of times if its default is whole, else of seconds."""
    unit, words = "N" if isinstance(default, int) else "SECONDS", f"{words}; default: {default:g}"
    sub.add_argument(flag, type=type(default), default=default, metavar=unit, help=words)


def add_extra(sub: argparse.ArgumentParser) -> None:
    """Adds --extra, of what installs the packages."""
    sub.add_argument("--extra", action="append", default=[], metavar="SPEC", help="a package beside requirements.txt")


def add_job(sub: argparse.ArgumentParser) -> None:
    """Adds what says which run."""
    sub.add_argument("config", metavar="CONFIG", help="such as configs/roberta_base.py")
    sub.add_argument("--id", help="of the run; the same one again attaches to it; default: the config's name")
    sub.add_argument("--workdir", default="", metavar="DIR", help="that all hosts see; default: {bucket}/{id}")
    sub.add_argument("--command", dest="mlm", default="run", choices=runs.COMMANDS, help="default: run")
    program = "Python file that calls mlm's main(pretraining=...), in the place of python -m mlm"
    sub.add_argument("--program", default="", metavar="FILE", help=program)
    sub.add_argument("--env", action="append", default=[], metavar="NAME", help="a variable to pass on; its name alone")


def add_follow(sub: argparse.ArgumentParser) -> None:
    """Adds what says how logs are followed."""
    sub.add_argument("--only", type=int, action="append", default=[], metavar="WORKER", help="show this host's lines")
    add_number(sub, "--every", 5.0, "between two polls")


def follow(args: argparse.Namespace, hosts: Hosts, run: str, attempt: int) -> int:
    """Follows a run; returns its exit code. Ctrl-C leaves it alone."""
    try:
        seen = following.follow(following.Follower(hosts, run, attempt, only=args.only), args.every)
    except KeyboardInterrupt:
        say(f"\ndetached; the run goes on. Come back: python launch/tpu.py logs {quoted(run)}")
        say(f"how it does: python launch/tpu.py status {quoted(run)}; end it: python launch/tpu.py stop {quoted(run)}")
        return 130  # not 0, which says that the run is done
    show(seen)
    return 0 if hosts.dry else seen.code


def show(seen: runs.RunStatus) -> None:
    """Prints how a run is; of a dry run there is nothing to print."""
    for line in runs.lines(seen):
        print(line)


def _sync(args: argparse.Namespace) -> None:
    sync.sync(connect(args.cloud, args.timeout), codes.pack(codes.repository()), args.extra)


def _preflight(args: argparse.Namespace) -> int:
    hosts, code = connect(args.cloud, args.timeout), codes.pack(codes.repository())
    report = preflight.check(hosts, code.hash, clear_lock=args.clear_lock)
    problems = report.problems or preflight.check_ports(hosts)  # a run that is alive holds them
    for line in [*report.lines, *report.remarks, *problems]:
        print(line)
    hosts.notify("not ready" if problems else f"ready: {len(hosts.all)} hosts, {code.label}")
    return 1 if problems else 0


def _run(args: argparse.Namespace) -> int:
    job = runs.make_job(args)
    started = runs.start(hosts := connect(args.cloud, args.timeout), job, again=args.again)
    if started.ended:
        show(started.ended)
        say(f"run {job.id!r} has ended (attempt {started.attempt}); --again makes another attempt.")
        return started.ended.code
    how = "started" if started.fresh else "is alive already, nothing was started"
    hosts.notify(f"run {job.id!r}, attempt {started.attempt}: {how} on {len(hosts.all)} hosts")
    return 0 if args.detach else follow(args, hosts, job.id, started.attempt)


def _status(args: argparse.Namespace) -> int:
    if not args.id:
        pod = args.cloud.describe()
        print(f"{pod.name}: {pod.condition}, {len(pod.hosts)} hosts", flush=True)
        hosts = connect(args.cloud, args.timeout, pod) if pod.state == "READY" else None
        answers = hosts.require(hosts.ask(["preflight"]), "status") if hosts else []
        alive = {(run["id"], run["attempt"]) for answer in answers for run in answer.get("runs", ())}
        for run, attempt in sorted(alive):
            print(f"run {run!r}, attempt {attempt}, is alive")
        return 0
    hosts = connect(args.cloud, args.timeout, partial=True)
    seen = runs.status(hosts, args.id)
    if not hosts.dry:
        print(f"run {args.id!r}, attempt {seen.attempt}" if seen.attempt else f"there is no run {args.id!r}")
        show(seen)
    return 1 if seen.errors else 0


def _logs(args: argparse.Namespace) -> int:
    hosts = connect(args.cloud, args.timeout, partial=True)
    seen = runs.status(hosts, args.id)
    if not seen.attempt and not hosts.dry:
        errors = "".join(f"; {error}" for error in seen.errors)
        raise PodError(f"no host has a run {args.id!r}{errors}.", "hosts" if errors else "absent")
    return follow(args, hosts, args.id, seen.attempt or 1)


def _stop(args: argparse.Namespace) -> int:
    hosts = connect(args.cloud, args.timeout, partial=True)
    seen = runs.stop(hosts, args.id, args.grace)
    show(seen)
    return 1 if seen.running or seen.errors else 0


def _clean(args: argparse.Namespace) -> None:
    lifetime.clean(args.cloud)
    pod = args.cloud.describe()
    if pod.state == "READY":
        hosts = connect(args.cloud, args.timeout, pod)
        answers = hosts.require(hosts.ask(["clean", *(f"--keep={run}" for run in args.keep)]), "clean")
        for removed in sorted({name for answer in answers for name in answer.get("removed", ())}):
            say(f"removed {removed}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
