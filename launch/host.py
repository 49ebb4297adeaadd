"""What the launcher runs on a host: starts a run's process once, keeps it, tells of it, stops it.

    python3 launch/host.py start|status|logs|stop|clean|unpack|install|preflight|ports ... (first: --root DIR)

Every command prints one line, `mlm-host ` and a JSON object, and ends with code 0; or with another code and
{"error": sentence}. Standard library of Python 3.10 and later. The launcher sends this text and the other host_*.py
through ssh with each command, so nothing has to be on the host, and both ends are always of one version.

A run lives in ROOT/runs/{quoted id}/{attempt}/: job.json, log, keeper.json, exit.json ({"code", "signal", "ended"}),
stopped.json, and what its process says there itself (mlm/pod/watch.py). Its keeper, a process in a session of its own,
outlives the ssh connection, holds the flock of `lock` for as long as the run's process lives, and writes down how it
ended.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable

import host_checks
import host_keeper
import host_setup
from host_setup import HostError

SECONDS_TO_START = 10.0  # between the folder of a run and its process


def folder_of(root: pathlib.Path, run: str, attempt: int | None = None) -> pathlib.Path:
    """Returns the folder of a run, or of one attempt of it. Raises HostError for an id that can't be one."""
    name = urllib.parse.quote(run, safe="")
    if not run or len(name) > 200:
        raise HostError(f"run id {run!r}: it must have 1 to 200 characters, those that a URL quotes counted as three")
    name = name.replace(".", "%2E") if not name.strip(".") else name  # "." and ".." are no names for a folder
    folder = root / "runs" / name
    return folder if attempt is None else folder / str(attempt)


def attempts(folder: pathlib.Path) -> list[int]:
    """Returns the attempts of a run, in order."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def start(root: pathlib.Path, text: str) -> dict:
    """Starts the process of a job, unless this attempt was started before.

    text: JSON, {"id", "attempt", "code": hash, "requirements": hash, "argv": after `python -m mlm`, "env": {name:
    value}, "process", "processes", "launch": whose start it is}. Raises HostError if it is not complete, or not synced.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a connection that drops must not leave half a start
    try:
        job = json.loads(text)
        run, code, requirements = texts = [job[name] for name in ("id", "code", "requirements")]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(texts)
        attempt, argv = int(job["attempt"]), [str(word) for word in job["argv"]]
        environment = {str(name): str(value) for name, value in job.get("env", {}).items()}
        kept = {**job, "env": sorted(environment)}  # the values are secrets: they go to the process, and nowhere else
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HostError(f"the job is not complete ({type(error).__name__}): nothing was started") from None
    if not 0 < attempt < 10**6:
        raise HostError(f"attempt {attempt} of the job can't be one: nothing was started")
    final = folder_of(root, run, attempt)
    if final.exists():
        return {"started": False, **_state(final), "job": host_setup.read(final / "job.json")}
    source = root / "code" / code
    if not host_setup.is_name(code) or not source.is_dir():
        raise HostError(f"code {code[:12]} is not here: sync first")
    python = host_setup.interpreter(root, requirements)
    final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = final.parent / f".{attempt}.{os.getpid()}"
    new.mkdir(mode=0o700)
    lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # taken before the folder has its name: a run that is seen is held
    host_setup.write(new / "job.json", kept)
    try:
        new.rename(final)
    except OSError as error:
        os.close(lock)
        shutil.rmtree(new)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another `start` was faster
            return {"started": False, **_state(final), "job": host_setup.read(final / "job.json")}
        raise
    environment = {**os.environ, **environment, "MLM_HOST_DIR": str(final), "PYTHONUNBUFFERED": "1"}
    try:
        process = host_keeper.launch(final, lock, [python, "-m", "mlm", *argv], str(source), environment)
    except HostError:
        shutil.rmtree(final, ignore_errors=True)  # nothing runs: it may be tried again
        raise
    return {"started": True, "process": process, "attempt": attempt, "state": "running", "job": kept}


def _state(folder: pathlib.Path) -> dict:
    """Returns {"state", "exit"} of an attempt. "lost": its keeper is gone and has not said how it ended."""
    if not folder.is_dir():
        return {"state": "absent", "exit": None}
    held = _held(folder)  # asked first: the keeper writes exit.json before it lets go
    end = host_setup.read(folder / "exit.json")
    return {"state": "exited" if end else "running" if held else "lost", "exit": end}


def _held(folder: pathlib.Path) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask do not take each other for the keeper
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def status(root: pathlib.Path, run: str, attempt: int | None) -> dict:
    """Returns what is known of an attempt (default: the last) of a run."""
    if attempt is None:
        attempt = max(attempts(folder_of(root, run)), default=0)
    folder = folder_of(root, run, attempt)
    answer = {"attempt": attempt, **_state(folder), "host": socket.gethostname(), "now": time.time()}
    for name in ("progress", "cause", "stopped", "job"):
        answer[name] = host_setup.read(folder / f"{name}.json")
    answer["orphan"] = answer["state"] == "lost" and host_keeper.alive(folder)
    return answer


def logs(root: pathlib.Path, run: str, attempt: int, offset: int, most: int) -> dict:
    """Returns at most `most` bytes of a log from `offset` on, with the run's state as it was before they were read."""
    folder = folder_of(root, run, attempt)
    answer = {**_state(folder), "offset": offset, "data": "", "size": 0}
    with contextlib.suppress(FileNotFoundError), open(folder / "log", "rb") as file:
        answer["size"] = os.fstat(file.fileno()).st_size
        file.seek(offset)
        data = file.read(most)
        answer.update(offset=offset + len(data), data=base64.b64encode(data).decode())
    return answer


def stop(root: pathlib.Path, run: str, attempt: int, grace: float) -> dict:
    """Sends SIGTERM to the process group of a run, waits up to `grace` seconds, then SIGKILL. Nobody else's process."""
    folder = folder_of(root, run, attempt)
    if not folder.exists():
        _forbid(folder)
    limit = time.monotonic() + SECONDS_TO_START
    while _state(folder)["state"] == "running" and not (folder / "keeper.json").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    host_keeper.end_group(folder, [signal.SIGTERM, signal.SIGCONT], grace)  # a stopped process must go on to save
    if host_keeper.alive(folder):
        host_keeper.end_group(folder, [signal.SIGKILL], 10.0)
    for process in host_keeper.stragglers(folder):  # what its children left, if no keeper is there to end it
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    limit = time.monotonic() + 5
    while _state(folder)["state"] == "running" and time.monotonic() < limit:  # the keeper is about to write it down
        time.sleep(0.05)
    if host_keeper.alive(folder):
        raise HostError(f"process {host_keeper.process_of(folder)} of the run does not end, not even by SIGKILL")
    return {"attempt": attempt, **_state(folder)}


def _forbid(folder: pathlib.Path) -> None:
    """Takes the place of an attempt that was never started: a start that is still on its way comes too late."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    new.mkdir(parents=True, mode=0o700)
    host_setup.write(new / "exit.json", {"code": None, "signal": None, "ended": time.time()})
    try:
        new.rename(folder)
    except OSError:  # it came in time after all
        shutil.rmtree(new)


def clean(root: pathlib.Path, keep: list[str]) -> dict:
    """Removes the folders of runs that have ended, but for `keep`, and the code that no run is left for."""
    removed, codes = [], set()
    for folder in (path for path in (root / "runs").glob("*") if path.is_dir()):
        run = urllib.parse.unquote(folder.name)
        for attempt in attempts(folder):
            place = folder / str(attempt)
            if run in keep or _state(place)["state"] == "running" or host_keeper.alive(place):
                codes.add((host_setup.read(place / "job.json") or {}).get("code"))
            else:
                shutil.rmtree(place)
                removed.append(f"run {run} attempt {attempt}")
        with contextlib.suppress(OSError):  # another attempt is left
            folder.rmdir()
    newest = max((root / "code").glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, default=None)
    for place in [*(root / "code").glob("[0-9a-f]*"), *(root / "archives").glob("*")]:
        code = place.name.partition(".")[0]
        if code in codes or (newest is not None and code == newest.name):  # the newest is what the next run is for
            continue
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        removed.append(f"code {code[:12]}")
    return {"removed": list(dict.fromkeys(removed))}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; the arguments' `answer` runs one of them in a folder."""
    root = argparse.ArgumentParser(prog="host.py", allow_abbrev=False)
    root.add_argument("--root", default=os.environ.get("MLM_POD_ROOT") or "~/.mlm-pod", help="~ is the home here")
    table = root.add_subparsers(required=True, metavar="COMMAND")

    def command(words: str, function: Callable[..., dict]) -> argparse.ArgumentParser:
        name, *others = words.split()
        sub = table.add_parser(name, allow_abbrev=False)
        for word in others:  # [word]: it may be left out
            sub.add_argument(word.strip("[]"), nargs="?" if word.startswith("[") else None)
        sub.set_defaults(answer=function)
        return sub

    command("unpack hash archive", lambda r, a: host_setup.unpack(r, a.hash, pathlib.Path(a.archive).expanduser()))
    install = command("install hash", lambda r, a: host_setup.install(r, a.hash, a.extra, a.python))
    install.add_argument("--extra", action="append", default=[], metavar="SPEC")
    install.add_argument("--python", default=os.environ.get("MLM_POD_PYTHON", ""))
    check = command("preflight", lambda r, a: host_checks.preflight(r, a.code, a.clear_lock, alive_runs(r)))
    check.add_argument("--code", default="")
    check.add_argument("--clear-lock", action="store_true")
    command("ports address worker workers", lambda r, a: host_checks.ports(a.address, int(a.worker), int(a.workers)))
    command("start", lambda r, a: start(r, sys.stdin.read()))  # the job
    command("status id [attempt]", lambda r, a: status(r, a.id, int(a.attempt) if a.attempt else None))
    command("logs id attempt offset most", lambda r, a: logs(r, a.id, int(a.attempt), int(a.offset), int(a.most)))
    command("stop id attempt grace", lambda r, a: stop(r, a.id, int(a.attempt), float(a.grace)))
    clean_ = command("clean", lambda r, a: clean(r, a.keep))
    clean_.add_argument("--keep", action="append", default=[], metavar="ID")
    return root


def alive_runs(root: pathlib.Path) -> list[dict]:
    """Returns [{"id", "attempt"}] of the runs that hold this host, orphans too."""
    found = []
    for folder in sorted((root / "runs").glob("*")):
        for attempt in attempts(folder):
            place = folder / str(attempt)
            if _state(place)["state"] == "running" or host_keeper.alive(place):
                found.append({"id": urllib.parse.unquote(folder.name), "attempt": attempt})
    return found


def main(argv: list[str]) -> int:
    """Runs one command; prints its line; returns 0, or 1 if the line says why not."""
    try:
        args = parser().parse_args(argv)
        line, code = args.answer(pathlib.Path(args.root).expanduser().absolute(), args), 0
    except (HostError, OSError, ValueError) as error:
        line, code = {"error": str(error) or type(error).__name__}, 1
        print(f"host.py: {line['error']}", file=sys.stderr)
    print("mlm-host " + json.dumps(line), flush=True)  # ASCII, so that no locale can break it
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
