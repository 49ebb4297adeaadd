"""What the launcher runs on a host: starts a run's process once, keeps it, reports on it, stops it.

    python3 launch/host.py start|status|logs|stop|clean|unpack|install|preflight|ports ROOT ...

ROOT is the launcher's folder, where ~ is the home here. Every command prints one line, `mlm-host ` and a JSON object,
and ends with code 0; or with another code and {"error": sentence}. Standard library of Python 3.10 and later. The
launcher sends this text and the other host_*.py through ssh with each command, so nothing has to be on the host, and
both ends are always of one version.

A run lives in ROOT/runs/{quoted id}/{attempt}/: job.json, log, exit.json, stopped.json once it was asked to stop, and
what its process says there itself (mlm/cluster/watch.py). Its keeper, which outlives the connection, holds `lock` for
as long as it lives. The processes of a run are those that carry its folder as $MLM_HOST_DIR, whatever group they are in
and whoever keeps them.
"""

import base64
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator

import host_checks
import host_setup
from host_setup import HostError

RESERVED = "exit.json.new"
SECONDS_TO_START = 10.0  # between the folder of a run and its process


def folder_of(root: pathlib.Path, run: str, attempt: int) -> pathlib.Path:
    """Returns the folder of an attempt. Raises HostError for an id that can't be one."""
    return root / "runs" / host_setup.folder_name(run) / str(attempt)


def start(root: pathlib.Path, text: str) -> dict:
    """Starts the process of a job, unless this attempt was started before.

    text: JSON, {"id", "attempt", "code": hash, "packages": hash, "program": a file of the code in the place of `-m mlm`
    or "", "argv": its arguments, "place": those that say which process it is, "env": {name: value}, "launch": whose
    start it is}. Raises HostError if it was cut off on its way, or is not synced.
    """
    # a connection that drops must not leave half a start
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = json.loads(text)
        final = folder_of(root, job["id"], job["attempt"])
    except (ValueError, KeyError, TypeError) as error:
        raise HostError(
            f"the job is not complete ({type(error).__name__}): nothing was started"
        ) from None
    source = host_setup.source(root, job["code"])
    python = host_setup.interpreter(root, job["packages"])
    environment = {**os.environ, **job["env"], "MLM_HOST_DIR": str(final), "PYTHONUNBUFFERED": "1"}
    program = ["-m", "mlm"]
    if job["program"]:  # Python looks for modules in its folder, and not in that of the code
        program = [job["program"]]
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(source), environment.get("PYTHONPATH")])
        )
    with host_setup.hidden(final) as new:
        lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        # before the folder has its name: a run that is seen is held
        fcntl.flock(lock, fcntl.LOCK_EX)
        # the values of variables are secrets: they go to the process, and nowhere else
        host_setup.write(new / "job.json", {**job, "env": sorted(job["env"])})
        # the disk may be full when it ends
        host_setup.write(new / RESERVED, how_it_ended(None) | {"room": " " * 99})
        # not if it was started before, or another `start` was faster
        started = host_setup.rename(new, final)
    if started and os.fork() == 0:
        _keep(final, [python, *program, *job["argv"], *job["place"]], source, environment)
    os.close(lock)
    return {"started": started, **status(root, job["id"], job["attempt"])}


def _keep(
    folder: pathlib.Path, argv: list[str], cwd: pathlib.Path, environment: dict[str, str]
) -> None:
    """Runs argv as the keeper, which inherits the lock, and writes down how it ended; does not return."""
    try:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            # a host that shuts down asks everybody; the process is to save, and it starts with none of these handlers
            signal.signal(number, lambda *_: None)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # ssh waits for as long as anybody holds its pipes
            os.dup2(nothing, number)
        os.chdir("/")
        with open(
            os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "w"
        ) as log:
            try:
                process = subprocess.Popen(
                    argv, cwd=cwd, env=environment, start_new_session=True, stdout=log, stderr=log
                )
            except OSError as error:
                print(f"{argv[0]} can't be started: {error.strerror}", file=log)
                _write_exit(folder, 127)  # as of a shell
                return
        # not reaped: its number stays its own
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(OSError):  # what it started must not keep the accelerator
            os.killpg(process.pid, signal.SIGKILL)
        _write_exit(folder, process.wait())
    finally:
        os._exit(0)


def _write_exit(folder: pathlib.Path, returncode: int) -> None:
    """Writes exit.json over the bytes that `start` has reserved."""
    with open(folder / RESERVED, "r+") as file:
        file.write(json.dumps(how_it_ended(returncode)))
        file.truncate()
    (folder / RESERVED).rename(folder / "exit.json")


def how_it_ended(returncode: int | None) -> dict:
    """Returns what exit.json says of a process that has ended just now; None: it was never started."""
    by_signal = returncode is not None and returncode < 0
    return {
        "code": None if by_signal else returncode,
        "signal": -returncode if by_signal else None,
        "ended": time.time(),
    }


def processes(folder: pathlib.Path) -> list[int]:
    """Returns the processes of a run that are alive."""
    mark = b"MLM_HOST_DIR=" + os.fsencode(folder)
    numbers = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's; or it has just ended
            if mark in (path / "environ").read_bytes().split(b"\0"):
                numbers.append(int(path.name))
    return numbers


def _send(folder: pathlib.Path, *signals: int) -> list[int]:
    """Sends signals to the processes of a run, and returns them."""
    numbers = processes(folder)
    for process in numbers:
        with contextlib.suppress(ProcessLookupError):
            for number in signals:
                os.kill(process, number)
    return numbers


def _state(folder: pathlib.Path) -> dict:
    """Returns {"state", "exit"} of an attempt. "lost": it is gone, and its keeper has not said how it ended."""
    if not folder.is_dir():
        return {"state": "absent", "exit": None}
    file = folder / "exit.json"
    # asked before it is read: the keeper writes it, and then ends
    is_alive = not file.exists() and (_has_keeper(folder) or bool(processes(folder)))
    if end := host_setup.read(file):
        return {"state": "exited", "exit": end}
    return {"state": "running" if is_alive else "lost", "exit": None}


def _has_keeper(folder: pathlib.Path) -> bool:
    try:
        with open(folder / "lock") as lock:
            # two who ask do not take each other for the keeper
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def status(root: pathlib.Path, run: str, attempt: int) -> dict:
    """Returns what is known of an attempt (0: the last) of a run."""
    if not attempt:
        folders = folder_of(root, run, 0).parent.glob("[0-9]*")
        attempt = max((int(folder.name) for folder in folders), default=0)
    folder = folder_of(root, run, attempt)
    files = {
        name: host_setup.read(folder / f"{name}.json")
        for name in ("progress", "cause", "job", "stopped")
    }
    return {"attempt": attempt, **_state(folder), "host": socket.gethostname(), **files}


def logs(root: pathlib.Path, run: str, attempt: int, offset: int, limit: int) -> dict:
    """Returns at most `limit` bytes of a log from `offset` on, with the run's state as it was before they were read."""
    folder = folder_of(root, run, attempt)
    answer = {**_state(folder), "offset": offset, "data": "", "size": 0}
    with contextlib.suppress(FileNotFoundError), open(folder / "log", "rb") as file:
        answer["size"] = os.fstat(file.fileno()).st_size
        file.seek(offset)
        text = file.read(limit)
        answer.update(offset=offset + len(text), data=base64.b64encode(text).decode())
    return answer


def stop(root: pathlib.Path, run: str, attempt: int, grace: float) -> dict:
    """Sends SIGTERM to the processes of a run, waits up to `grace` seconds, then SIGKILL. Nobody else's process."""
    folder = folder_of(root, run, attempt)
    # it was never started: a start that is still on its way is to find the name taken
    if not folder.exists():
        with host_setup.hidden(folder) as new:
            host_setup.write(new / "exit.json", how_it_ended(None))
            host_setup.rename(new, folder)
    with contextlib.suppress(OSError):  # of a full disk; the other hosts say it too
        # a supervisor is not to start it again
        host_setup.write(folder / "stopped.json", {"time": time.time()})

    def ended() -> bool:
        return _state(folder)["state"] != "running"

    host_setup.wait_until(lambda: ended() or processes(folder), SECONDS_TO_START)
    _send(folder, signal.SIGTERM, signal.SIGCONT)  # a stopped process must go on to save
    host_setup.wait_until(lambda: not processes(folder), grace)
    host_setup.wait_until(lambda: not _send(folder, signal.SIGKILL), 10.0)
    host_setup.wait_until(ended, 5.0)  # the keeper is about to write it down
    if left := processes(folder):
        raise HostError(f"process {left[0]} of the run does not end, not even by SIGKILL")
    return status(root, run, attempt)


def _all_attempts(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict, bool]]:
    """Yields (folder, {"id", "attempt"}, whether it is running) of every run here."""
    for folder in sorted((root / "runs").glob("*/[0-9]*")):
        attempt = {"id": urllib.parse.unquote(folder.parent.name), "attempt": int(folder.name)}
        yield folder, attempt, _state(folder)["state"] == "running"


def preflight(root: pathlib.Path, code: str) -> dict:
    """Returns what this host has for a code, and the runs that hold it."""
    return host_checks.preflight(
        root, code, [run for _, run, running in _all_attempts(root) if running]
    )


def clean(root: pathlib.Path) -> dict:
    """Removes the folders of runs that have ended. Raises HostError, when it is through, for those that it can't."""
    removed = []
    left = []
    for folder, run, running in _all_attempts(root):
        if not running:
            try:
                shutil.rmtree(folder)
            except OSError as error:  # which has the name without its folder
                left.append(f"{folder} can't be removed ({error.filename}: {error.strerror})")
                continue
            removed.append(f"run {run['id']} attempt {run['attempt']}")
            with contextlib.suppress(OSError):  # another attempt is left
                folder.parent.rmdir()
    if left:
        raise HostError("; ".join(left))
    return {"removed": removed}


COMMANDS = {  # name: (function of the launcher's folder and the arguments, the types of these)
    # the archive
    "unpack": (lambda root, code: host_setup.unpack(root, code, sys.stdin.buffer.read()), str),
    "install": (host_setup.install, str, str),
    "preflight": (preflight, str),
    "ports": (host_checks.ports, str, int, int),
    "start": (lambda root: start(root, sys.stdin.read()),),  # the job
    "status": (status, str, int),
    "logs": (logs, str, int, int, int),
    "stop": (stop, str, int, float),
    "clean": (clean,),
}


def main(argv: list[str]) -> int:
    """Runs one command; prints its line; returns 0, or 1 if the line says why not."""
    name, root, *words = argv
    function, *kinds = COMMANDS[name]
    try:
        arguments = [kind(word) for kind, word in zip(kinds, words, strict=True)]
        report = function(host_setup.expand(root).absolute(), *arguments)
        code = 0
    except (HostError, OSError, ValueError) as error:
        report = {"error": str(error) or type(error).__name__}
        code = 1
        print(f"host.py: {report['error']}", file=sys.stderr)
    print("mlm-host " + json.dumps(report), flush=True)  # ASCII, so that no locale can break it
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
