"""The keeper of a run's process: it outlives the ssh connection and writes down how the process ended.

For host.py, on a host: the standard library of Python 3.10 and later. The processes of a run are those that carry its
folder as $MLM_HOST_DIR, whatever group they are in and whoever keeps them.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

from host_setup import HostError, write


def launch(folder: pathlib.Path, lock: int, argv: list[str], cwd: str, environment: dict[str, str]) -> int:
    """Starts argv under a detached keeper, which inherits `lock`, and returns its process id. Raises HostError."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _keep(folder, writer, argv, cwd, environment)  # does not return
    os.close(writer)
    os.close(lock)
    with os.fdopen(reader, errors="replace") as pipe:
        answer = pipe.read()
    if not answer.isdecimal():
        raise HostError(answer or "the keeper of the run ended before it had started anything")
    return int(answer)


def _keep(folder: pathlib.Path, writer: int, argv: list[str], cwd: str, environment: dict[str, str]) -> None:
    try:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            # a host that shuts down asks everybody; the process is to save, and it starts with none of these handlers
            signal.signal(number, lambda *_: None)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # ssh waits for as long as anybody holds its pipes
            os.dup2(nothing, number)
        os.chdir("/")
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            process = subprocess.Popen(
                argv, cwd=cwd, env=environment, start_new_session=True, stdin=nothing, stdout=log, stderr=log
            )
        except OSError as error:
            os.write(writer, f"{argv[0]} can't be started: {error.strerror}".encode())
            os._exit(1)
        os.write(writer, str(process.pid).encode())
        os.close(log)
        os.close(writer)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its number stays its own
        with contextlib.suppress(OSError):  # what it started must not keep the accelerator
            os.killpg(process.pid, signal.SIGKILL)
        write(folder / "exit.json", how_it_ended(process.wait()))
    finally:
        os._exit(0)


def how_it_ended(returncode: int) -> dict:
    """Returns what exit.json says of a process that has ended just now."""
    code, signal_ = (returncode, None) if returncode >= 0 else (None, -returncode)
    return {"code": code, "signal": signal_, "ended": time.time()}


def processes(folder: pathlib.Path) -> list[int]:
    """Returns the processes of a run that are alive."""
    mark, numbers = b"MLM_HOST_DIR=" + os.fsencode(folder), []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's; or it has just ended
            if mark in (path / "environ").read_bytes().split(b"\0"):
                numbers.append(int(path.name))
    return numbers


def send(folder: pathlib.Path, *signals: int) -> list[int]:
    """Sends signals to the processes of a run, and returns them."""
    numbers = processes(folder)
    for process in numbers:
        with contextlib.suppress(ProcessLookupError):
            for number in signals:
                os.kill(process, number)
    return numbers
