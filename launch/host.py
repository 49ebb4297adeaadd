"""What the launcher runs on a host: starts a run's process once, keeps it, reports on it, stops it.

    python3 launch/host.py start|status|logs|stop|unpack|install|preflight ...

Every command prints one line, `mlm-host ` and a JSON object, and ends with code 0; or with another code and
{"error": sentence}. Standard library of Python 3.10 and later. The launcher sends this text and host_setup.py through
ssh with each command, so nothing has to be on the host, and both ends are always of one version.

A run lives in ~/.mlm-pod/runs/{id}/{attempt}/: job.json, log, exit.json, stopped.json once it was asked to stop, and
what its process says there itself (mlm/cluster/watch.py). Its keeper, which outlives the connection, and its process
hold `lock` for as long as they live: it is the one proof that a run is alive. The processes of a run are those that
carry its folder as $MLM_HOST_DIR, whatever group they are in and whoever keeps them.
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

import host_setup
from host_setup import HostError

SECONDS_TO_START = 10.0  # between the folder of a run and its process
DEVICES = pathlib.Path("/dev")
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def folder_of(root: pathlib.Path, run: str, attempt: int) -> pathlib.Path:
    """Returns the folder of an attempt."""
    return root / "runs" / run / str(attempt)


def start(root: pathlib.Path, text: str) -> dict:
    """Starts the process of a job, unless this attempt was started before.

    text: JSON, {"id", "attempt", "code": hash, "program": a file of the code in the place of `-m mlm` or "", "argv":
    its arguments, "place": those that say which process it is, "env": {name: value}, "launch": whose start it is}.
    Raises ValueError if it was cut off on its way.
    """
    # a connection that drops must not leave half a start
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = json.loads(text)
    final = folder_of(root, job["id"], job["attempt"])
    source = root / "code" / job["code"]
    python = host_setup.read(root / "code" / f"{job['code']}.json")["python"]
    environment = {**os.environ, **job["env"], "MLM_HOST_DIR": str(final), "PYTHONUNBUFFERED": "1"}
    program = ["-m", "mlm"]
    if job["program"]:  # Python looks for modules in its folder, and not in that of the code
        program = [job["program"]]
        environment["PYTHONPATH"] = str(source)
    with host_setup.new_folder(final) as new:
        lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        # before the folder has its name: a run that is seen is held
        fcntl.flock(lock, fcntl.LOCK_EX)
        # the values of variables are secrets: they go to the process, and nowhere else
        host_setup.write(new / "job.json", {**job, "env": sorted(job["env"])})
    # not if it was started before, or another `start` was faster
    name = final / "lock"
    started = name.exists() and os.path.samestat(name.stat(), os.fstat(lock))
    if started and os.fork() == 0:
        _keep(final, [python, *program, *job["argv"], *job["place"]], source, environment, lock)
    os.close(lock)
    return {"started": started, **status(root, job["id"], job["attempt"])}


def _keep(
    folder: pathlib.Path,
    argv: list[str],
    cwd: pathlib.Path,
    environment: dict[str, str],
    lock: int,
) -> None:
    """Runs argv as the keeper, and writes down how it ended; does not return."""
    try:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            # a host that shuts down asks everybody; the process is to save, and it starts with none of these handlers
            signal.signal(number, lambda *_: None)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # ssh waits for as long as anybody holds its pipes
            os.dup2(nothing, number)
        os.chdir("/")
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=environment,
                pass_fds=[lock],
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
        # not reaped: its number stays its own
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(OSError):  # what it started must not keep the accelerator
            os.killpg(process.pid, signal.SIGKILL)
        host_setup.write(folder / "exit.json", how_it_ended(process.wait()))
    finally:
        os._exit(0)


def how_it_ended(returncode: int) -> dict:
    """Returns what exit.json says of a process that has ended just now."""
    by_signal = returncode < 0
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
    state = "absent"
    if folder.is_dir():
        # asked before exit.json is read: the keeper writes that, and then ends
        state = "running" if _is_locked(folder) else "lost"
    end = host_setup.read(folder / "exit.json")
    return {"state": "exited" if end else state, "exit": end}


def _is_locked(folder: pathlib.Path) -> bool:
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


def logs(root: pathlib.Path, run: str, attempt: int, offset: int) -> dict:
    """Returns the next bytes of a log from `offset` on, with the run's state as it was before they were read."""
    folder = folder_of(root, run, attempt)
    answer = {**_state(folder), "data": "", "size": 0}
    with contextlib.suppress(FileNotFoundError), open(folder / "log", "rb") as file:
        answer["size"] = os.fstat(file.fileno()).st_size
        file.seek(offset)
        answer["data"] = base64.b64encode(file.read(1 << 20)).decode()
    return answer


def stop(root: pathlib.Path, run: str, attempt: int, grace: float) -> dict:
    """Sends SIGTERM to the processes of a run, waits up to `grace` seconds, then SIGKILL. Nobody else's process."""
    folder = folder_of(root, run, attempt)
    # it was never started: a start that is still on its way is to find the name taken
    if not folder.exists():
        with host_setup.new_folder(folder) as new:
            host_setup.write(new / "exit.json", {"code": None, "signal": None})
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


def preflight(root: pathlib.Path, code: str) -> dict:
    """Returns what this host has, and what keeps a run from starting."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    # not vfio/vfio, which is of no device
    accelerators = [*DEVICES.glob("accel*"), *DEVICES.glob("vfio/[0-9]*")]
    if accelerators:  # jax wants huge pages from v5e on, and says so where it has none
        line = f"grep -qF '[always]' {HUGE_PAGES} || echo always | sudo -n tee {HUGE_PAGES}"
        subprocess.run(["sh", "-c", line], capture_output=True, check=False)
    problems = [
        f"run {folder.parent.name!r} (attempt {folder.name}) is alive there: launch/tpu.py stop"
        for folder in sorted((root / "runs").glob("*/[0-9]*"))
        if _state(folder)["state"] == "running"
    ]
    return {
        "has_code": (root / "code" / code).is_dir(),
        "accelerators": len(accelerators),
        "free": f"{shutil.disk_usage(root).free / 1e9:.0f} GB of disk",
        "problems": problems,
    }


COMMANDS = {  # name: (function of the launcher's folder and the arguments, the types of these)
    # the archive
    "unpack": (lambda root, code: host_setup.unpack(root, code, sys.stdin.buffer.read()), str),
    "install": (host_setup.install, str, str),
    "preflight": (preflight, str),
    "start": (lambda root: start(root, sys.stdin.read()),),  # the job
    "status": (status, str, int),
    "logs": (logs, str, int, int),
    "stop": (stop, str, int, float),
}


def main(argv: list[str]) -> int:
    """Runs one command; prints its line; returns 0, or 1 if the line says why not."""
    name, *words = argv
    function, *kinds = COMMANDS[name]
    try:
        arguments = [kind(word) for kind, word in zip(kinds, words, strict=True)]
        report = function(pathlib.Path.home() / ".mlm-pod", *arguments)
        code = 0
    except (HostError, OSError, ValueError) as error:
        report = {"error": str(error)}
        code = 1
    print("mlm-host " + json.dumps(report), flush=True)  # ASCII, so that no locale can break it
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
