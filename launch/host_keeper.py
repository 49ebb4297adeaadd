"""The keeper of a run's process: it outlives the ssh connection and writes down how the process ended.

For host.py, on a host: the standard library of Python 3.10 and later. Files in the run's folder:
keeper.json {"keeper", "process", and what tells a process from a later one of the same number},
stopped.json {"time"} while the process is not scheduled (SIGSTOP), exit.json {"code", "signal", "ended"}.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import time

from host_setup import HostError, read, wait_until, write

POLL = 0.1  # seconds between two polls of the process
STOPPED_AFTER = 3.0  # seconds in state T before it counts: a debugger's glance is no fault


def launch(folder: pathlib.Path, lock: int, argv: list[str], cwd: str, environment: dict[str, str]) -> int:
    """Starts argv under a detached keeper, which inherits `lock`, and returns its process id. Raises HostError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():  # the keeper is nobody's child, so nobody waits for it
            os._exit(0)
        os.close(reader)
        _keep(folder, lock, writer, argv, cwd, environment)  # does not return
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, errors="replace") as pipe:
        fault = pipe.read()
    os.close(lock)
    known = read(folder / "keeper.json")
    if not known:
        raise HostError(fault or "the keeper of the run ended before it had started anything")
    return known["process"]


def _keep(folder: pathlib.Path, lock: int, writer: int, argv: list, cwd: str, environment: dict) -> None:
    try:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            # a host that shuts down asks everybody; the process is to save, and it starts with none of these handlers
            signal.signal(number, lambda *_: None)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # ssh waits for as long as anybody holds its pipes
            os.dup2(nothing, number)
        os.chdir("/")
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:  # in a session, and so a process group, of its own
            process = subprocess.Popen(
                argv, cwd=cwd, env=environment, start_new_session=True, stdin=nothing, stdout=log, stderr=log
            )
        except OSError as error:
            os.write(writer, f"{argv[0]} can't be started: {error.strerror}".encode())
            os._exit(1)
        known = {"keeper": os.getpid(), "process": process.pid, "birth": _birth(process.pid)}
        write(folder / "keeper.json", known)
        os.close(log)
        os.close(writer)
        _wait(folder, process.pid)
        with contextlib.suppress(OSError):  # what it started must not keep the accelerator
            os.killpg(process.pid, signal.SIGKILL)
        write(folder / "exit.json", how_it_ended(process.wait()))
    finally:
        os._exit(0)


def how_it_ended(returncode: int) -> dict:
    """Returns what exit.json says of a process that has ended just now."""
    code, signal_ = (returncode, None) if returncode >= 0 else (None, -returncode)
    return {"code": code, "signal": signal_, "ended": time.time()}


def _wait(folder: pathlib.Path, process: int) -> None:
    """Returns when the process has ended, and leaves it to be reaped, so that its number stays its own."""
    since = None
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if is_stopped(process):
            since = since or time.time()
            if time.time() - since > STOPPED_AFTER and not (folder / "stopped.json").exists():
                write(folder / "stopped.json", {"time": since})
        elif since is not None:
            since = None
            (folder / "stopped.json").unlink(missing_ok=True)
        time.sleep(POLL)


def _stat(process: int) -> list[str]:
    """Returns /proc/PID/stat from the state on, [] if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(process: int) -> bool:
    """Returns whether a process is not scheduled, as by SIGSTOP."""
    return _stat(process)[:1] == ["T"]


def _birth(process: int) -> str:
    """Returns what tells this process from a later one with its number: boot, and ticks since then."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *_stat(process)[19:20]])


def alive(folder: pathlib.Path) -> int:
    """Returns the number of a run's process, kept or not; 0 if it has ended, or if the number is another's by now."""
    known = read(folder / "keeper.json") or {}
    process = known.get("process")
    same = process and _birth(process) == known.get("birth")
    return process if same and _stat(process)[:1] not in ([], ["Z"], ["X"]) else 0  # Z only waits to be reaped


def stragglers(folder: pathlib.Path) -> list[int]:
    """Returns the processes that carry this run's MLM_HOST_DIR, whatever group they are in and whoever keeps them."""
    mark, processes = b"MLM_HOST_DIR=" + os.fsencode(folder), []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                processes.append(int(path.name))
    return processes


def end_group(folder: pathlib.Path, signals: list[int], seconds: float) -> None:
    """Sends signals to the process group of a run, if it is still that run's, and waits for the process to end."""
    if process := alive(folder):
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, number)
        wait_until(lambda: not alive(folder), seconds)
