"""The keeper of a run's process: it outlives the ssh connection and writes down how the process ended.

For host.py, on a host: the standard library of Python 3.10 and later. Files in the run's folder:
keeper.json {"keeper", "process", "started", and what tells a process from a later one of the same number},
stopped.json {"time"} while the process is not scheduled (SIGSTOP), exit.json {"code", "signal", "ended"}.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import time

from host_setup import HostError, read, write

POLL = 0.1  # seconds between two looks at the process
STOPPED_AFTER = 3.0  # seconds in state T before it counts: a debugger's glance is no fault


def launch(folder: pathlib.Path, lock: int, argv: list[str], cwd: str, environment: dict[str, str]) -> int:
    """Starts argv under a detached keeper and returns its process id. Raises HostError if it can't be started.

    The environment never leaves memory. The keeper inherits `lock`, and with it the flock.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():  # the keeper is nobody's child, so nobody waits for it
            os._exit(0)
        _keep(folder, lock, writer, argv, cwd, environment)  # does not return
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    os.close(lock)
    if not said and (known := read(folder / "keeper.json")):  # the keeper was killed right after it had started it
        said = str(known["process"])
    if not said.isdigit():
        raise HostError(said or "the keeper of the run ended before it had started anything")
    return int(said)


def _keep(folder: pathlib.Path, lock: int, writer: int, argv: list, cwd: str, environment: dict) -> None:
    try:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)  # a host that shuts down asks everybody; the process is to save
        _close_all(lock, writer)
        os.chdir("/")
        try:
            process = _start(folder, argv, cwd, environment)
        except OSError as error:
            os.write(writer, f"{argv[0]} can't be started: {error.strerror}".encode())
            os._exit(1)
        started = time.time()
        known = {"keeper": os.getpid(), "process": process.pid, "started": started, "birth": _birth(process.pid)}
        write(folder / "keeper.json", known)
        os.write(writer, str(process.pid).encode())
        os.close(writer)
        _wait(folder, process.pid)
        with contextlib.suppress(OSError):  # what it started must not keep the accelerator
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        write(
            folder / "exit.json",
            {"code": code if code >= 0 else None, "signal": -code if code < 0 else None, "ended": time.time()},
        )
    finally:
        os._exit(0)


def _start(folder: pathlib.Path, argv: list[str], cwd: str, environment: dict[str, str]) -> subprocess.Popen:
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def default_signals() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)

    try:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # and so a process group of its own
            preexec_fn=default_signals,  # what is ignored would stay ignored; SIGINT would never reach Python
        )
    finally:
        os.close(log)


def _close_all(*but: int) -> None:
    """Closes every inherited descriptor: ssh waits for as long as anybody holds its pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    for number in [int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in but:
            with contextlib.suppress(OSError):  # the one that listed them is closed already
                os.close(number)


def _wait(folder: pathlib.Path, process: int) -> None:
    """Returns when the process has ended, and leaves it to be reaped, so that its number stays its own."""
    since = None
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if _stat(process)[:1] == ["T"]:
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


def _birth(process: int) -> str:
    """Returns what tells this process from a later one with its number: boot, and ticks since then."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *_stat(process)[19:20]])


def process_of(folder: pathlib.Path) -> int | None:
    """Returns the number of a run's process, None if it never started or is another's by now."""
    known = read(folder / "keeper.json") or {}
    process = known.get("process")
    return process if process and _birth(process) == known.get("birth") else None


def alive(folder: pathlib.Path) -> bool:
    """Returns whether the process of a run lives, kept or not; one that only waits to be reaped does not."""
    process = process_of(folder)
    return process is not None and _stat(process)[:1] not in ([], ["Z"], ["X"])


def stragglers(folder: pathlib.Path) -> list[int]:
    """Returns the processes that carry this run's MLM_HOST_DIR, whatever group they are in and whoever keeps them."""
    mark, found = b"MLM_HOST_DIR=" + os.fsencode(folder), []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def end_group(folder: pathlib.Path, signals: list[int], seconds: float) -> None:
    """Sends signals to the process group of a run, if it is still that run's, and waits for the process to end."""
    process = process_of(folder)
    if process is None or not alive(folder):
        return
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, number)
    limit = time.monotonic() + seconds
    while alive(folder) and time.monotonic() < limit:
        time.sleep(0.05)
