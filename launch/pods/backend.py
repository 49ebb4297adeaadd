"""The seam to a cloud: what the commands ask of it, and how a local program such as gcloud is run.

A backend knows argument lists and their answers, nothing of runs. Nothing goes through a local shell; the command that
ssh carries to a host's shell is quoted once, by `remote`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pods.errors import PodError

# states of a pod, whatever the cloud calls them
ABSENT, WAITING, CREATING, BUSY, READY = "ABSENT", "WAITING", "CREATING", "BUSY", "READY"
PREEMPTED, SUSPENDED, FAILED, DELETING = "PREEMPTED", "SUSPENDED", "FAILED", "DELETING"
STOPPED = "STOPPED"  # it keeps its disks, and is started again
GONE = (PREEMPTED, SUSPENDED, FAILED)  # it won't come back: delete it with force, and create it again


@dataclasses.dataclass(frozen=True)
class Host:
    """One worker. address: the internal one, where the other hosts find it."""

    worker: int
    address: str


@dataclasses.dataclass(frozen=True)
class Pod:
    """What the cloud says of a pod.

    kind: "tpu-vm" or "queued"; detail: the cloud's own name for the state; ours: made by our `up`; identity: the same
    as long as it is the same machines at the same addresses.
    """

    name: str
    state: str
    hosts: tuple[Host, ...] = ()
    kind: str = "tpu-vm"
    detail: str = ""
    accelerator_type: str = ""
    ours: bool = False
    identity: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A local program to run, and what it reads.

    note: of a dry run, what stdin holds; instead: gives the call that is made where ssh itself fails.
    """

    argv: tuple[str, ...]
    stdin: bytes = b""
    note: str = ""
    instead: Callable[[], Call] | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """How a call ended. code: None if it was ended by the time-out, negative if by a signal."""

    code: int | None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


class Backend(Protocol):
    """A cloud. Methods that ask it raise PodError, whose kind says why; `ssh` and `copy` only say how it is done."""

    dry: bool

    def create(self) -> None:
        """Asks for the pod; it need not be there when this returns. Raises PodError("exists") if it was there."""

    def start(self) -> None:
        """Starts the pod again, if it is STOPPED."""

    def delete(self, pod: Pod) -> None:
        """Deletes a pod, with force where it takes force; "absent" is no error."""

    def describe(self) -> Pod:
        """Returns the pod, in state ABSENT if there is none; hosts in the order of their workers once it is READY."""

    def requests(self) -> list[Pod]:
        """Returns all queued resources of the project and zone, without their hosts."""

    def connect(self, pod: Pod) -> None:
        """Prepares `ssh` and `copy` for the hosts of a pod that is READY. Raises nothing."""

    def ssh(self, worker: int, argv: Sequence[str], stdin: bytes = b"") -> Call:
        """Returns the call that runs argv on a worker."""

    def copy(self, worker: int, file: str, target: str) -> Call:
        """Returns the call that copies a local file to a path under the worker's home."""


class Runner:
    """Runs calls, or, if dry, prints them as a shell would take them and answers nothing."""

    def __init__(self, dry: bool = False):
        self.dry, self.over = dry, threading.Event()
        self._running: set[subprocess.Popen] = set()

    def run(self, call: Call, timeout: float) -> Result:
        """Returns how the call ended, at the latest after `timeout` seconds. Raises PodError if it can't be started."""
        if self.dry:
            print(shlex.join(call.argv), flush=True)
            if call.note:
                print(f"# stdin: {call.note}", flush=True)
            return Result(0)
        begin = time.monotonic()
        process = start(call)
        self._running.add(process)
        try:
            if self.over.is_set():
                kill(process)
            stdout, stderr = process.communicate(call.stdin, timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            kill(process)
            stdout, stderr = _rest(process)
            code = None
        except BaseException:  # Ctrl-C: take the call along
            kill(process)
            raise
        finally:
            self._running.discard(process)
        seconds = time.monotonic() - begin
        return Result(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"), seconds)

    def end(self) -> None:
        """Kills what runs, and what is still to be started: the command is over."""
        self.over.set()
        for process in list(self._running):
            kill(process)


def start(call: Call) -> subprocess.Popen:
    """Starts a call with pipes, in a session of its own, so that Ctrl-C reaches us alone. Raises PodError."""
    # gcloud would ask its questions on the stdin that holds our data
    environment = {**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    try:
        return subprocess.Popen(
            call.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        program = call.argv[0]
        raise PodError(
            f"{program} isn't on this machine's PATH: install it (https://cloud.google.com/sdk/docs/install).",
            "missing",
        ) from error
    except OSError as error:
        raise PodError(f"{call.argv[0]} can't be started: {error.strerror}.") from error


def kill(process: subprocess.Popen) -> None:
    """Kills a call and what it started (gcloud runs ssh as a child)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _rest(process: subprocess.Popen) -> tuple[bytes, bytes]:
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired:  # something outside the group still holds the pipe
        return b"", b""


def remote(argv: Sequence[str]) -> str:
    """Returns argv as the one word that a host's shell takes apart again into argv."""
    return shlex.join(argv)


def say(text: str) -> None:
    """Prints progress, on stderr: stdout is for answers."""
    print(text, file=sys.stderr, flush=True)
