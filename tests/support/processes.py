"""Runs of `python -m mlm` in processes of their own: to kill them, and to give them other devices."""

import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from tests import QUICK_COMPILE, ROOT
from tests.support.tiny import TINY, command

DELAYED = "tests/programs/delayed_train.py"


def environment(devices: int) -> dict[str, str]:
    flags = f"{QUICK_COMPILE} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def seconds_of_children() -> float:
    """Processor time of the processes that have ended: what else the machine is doing does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train_arguments(workdir: pathlib.Path, shards: str, *overrides: str) -> list[str]:
    return command("train", workdir, *TINY, f"shards.dir={shards}", "data.lanes=4", *overrides)


def start(arguments: list[str], *, devices: int = 2, program: str = "-m mlm") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *program.split(), *arguments],
        cwd=ROOT,
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    arguments: list[str], *, devices: int = 2, program: str = "-m mlm", code: int = 0
) -> tuple[str, str]:
    """Returns what the command printed, and asserts its exit code."""
    return finish(start(arguments, devices=devices, program=program), code=code)


def finish(process: subprocess.Popen, *, code: int = 0) -> tuple[str, str]:
    """Returns what a process printed, and asserts its exit code."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{out}\n{err}"
    return out, err


def run_together(arguments: list[str], *, processes: int, devices: int) -> list[str]:
    """Runs `processes` processes of `devices` devices each as one; returns what each wrote to stderr."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [*arguments, f"--coordinator=127.0.0.1:{port}", f"--processes={processes}"]
    lines = ([*arguments, f"--process-id={index}"] for index in range(processes))
    started = [start(line, devices=devices) for line in lines]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(errors)
    return errors


def kill_when(process: subprocess.Popen, moment: Callable[[], bool]) -> None:
    """Kills the process with SIGKILL as soon as `moment()`; it must come before the process ends."""
    deadline = time.monotonic() + 200
    while not moment():
        assert process.poll() is None, (
            f"the run ended before it could be killed:\n{process.communicate()[1]}"
        )
        assert time.monotonic() < deadline, "the moment to kill at never came"
        time.sleep(0.01)
    process.kill()
    process.communicate()


def logged_step(workdir: pathlib.Path) -> int:
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
