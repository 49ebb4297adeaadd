"""Pods and their hosts, what a command can fail with, and how a local program such as gcloud is run.

Nothing goes through a local shell; the command that ssh carries to a host's shell is quoted once.
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from subprocess import PIPE


class PodError(Exception):
    """A foreseen end of a command.

    kind: "absent" (there is no such thing), "exists", "network", "hosts" (some can't be reached, or refuse), "other";
    or what no new try can change: "settings" and "billing".
    """

    code = 1

    def __init__(self, message: str, kind: str = "other"):
        super().__init__(printable(message))
        self.kind = kind


class SettingsError(PodError):
    """A key of pod.toml, a flag or an argument that can't be right."""

    code = 2

    def __init__(self, message: str):
        super().__init__(message, "settings")


# States of a pod: the cloud's own, or ABSENT. One that is STOPPED keeps its disks, and is started again; one that is
# GONE won't come back. In all other states it is waited for.
ABSENT = "ABSENT"
READY = "READY"
STOPPED = "STOPPED"
# UNKNOWN: after a failed repair
GONE = ("PREEMPTED", "TERMINATED", "SUSPENDED", "SUSPENDING", "FAILED", "UNKNOWN")
DELETE = "deleting it"
CREATE = "creating one"
RESUME = "starting it again"
STEPS = {ABSENT: CREATE, STOPPED: RESUME, **dict.fromkeys(GONE, DELETE)}  # what makes a pod READY


@dataclasses.dataclass(frozen=True)
class Host:
    """One worker. address: the internal one, where the other hosts find it."""

    worker: int
    address: str

    def __str__(self) -> str:
        return f"host {self.worker} ({self.address})"


@dataclasses.dataclass(frozen=True)
class Pod:
    """What the cloud says of a pod."""

    name: str
    state: str
    hosts: tuple[Host, ...] = ()
    request: str = ""  # the queued resource that it came by
    reason: str = ""  # why it failed, or what is wrong with it, "" for nothing
    accelerator_type: str = ""
    label: str = ""  # of whoever made it
    identity: str = ""  # the same as long as it is the same machines at the same addresses

    @property
    def condition(self) -> str:
        """The state for a person, with the reason."""
        return printable(f"{self.state}{': ' if self.reason else ''}{self.reason.rstrip('.')}")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a local program ended."""

    code: int | None  # None after a timeout, negative after a signal
    stdout: str = ""
    stderr: str = ""


class Runner:
    """Runs programs, or, if dry, prints the calls as a shell would take them and answers nothing."""

    def __init__(self, dry: bool = False):
        self.dry = dry
        self.over = threading.Event()
        self._running: set[subprocess.Popen] = set()

    def run(self, argv: Sequence[str], timeout: float, stdin: bytes = b"") -> Result:
        """Returns how it ended, at the latest after `timeout` seconds. Raises SettingsError if it can't be started."""
        if self.dry:
            print(shlex.join(argv), flush=True)
            if text := stdin.partition(b"\n")[2].decode():  # the first line is host.py
                print(f"# stdin: {text}", flush=True)
            return Result(0)
        # gcloud would ask its questions on the stdin that holds our data; a session of its own: Ctrl-C reaches us alone
        variables = {**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
        try:
            process = subprocess.Popen(
                argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True
            )
        except OSError as error:
            advice = (
                "it has to be on this machine's PATH: https://cloud.google.com/sdk/docs/install"
            )
            raise SettingsError(
                f"{argv[0]} can't be started ({error.strerror}): {advice}."
            ) from error
        self._running.add(process)
        code = None
        stdout = stderr = b""
        try:
            if self.over.is_set():
                kill(process)
            stdout, stderr = process.communicate(stdin, timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            kill(process)
            # something outside the group may still hold the pipe
            with contextlib.suppress(subprocess.TimeoutExpired):
                stdout, stderr = process.communicate(timeout=5)
        except BaseException:  # Ctrl-C: take the call along
            kill(process)
            raise
        finally:
            self._running.discard(process)
        return Result(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    def end(self) -> None:
        """Kills what runs, and what is still to be started: the command is over."""
        self.over.set()
        for process in list(self._running):
            kill(process)


def kill(process: subprocess.Popen) -> None:
    """Kills a call and what it started (gcloud runs ssh as a child)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def printable(text: str) -> str:
    """Returns a text of which nothing can steer a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def say(text: str) -> None:
    """Prints progress, on stderr: stdout is for answers."""
    print(text, file=sys.stderr, flush=True)
