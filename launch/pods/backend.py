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

# kinds of PodError that may pass by themselves; the second ones only so many times
PASSING = ("network", "absent", "exists", "stockout")
TRIED = ("hosts", "internal", "other")


class PodError(Exception):
    """A foreseen end of a command."""

    # kind: one of those above, "absent" being a pod that is not there; or "quota", "permission", "login", "api",
    # "billing", "missing" (no gcloud here) or "settings", which no new try can fix
    code, kind = 1, "other"

    def __init__(self, message: str, kind: str = ""):
        super().__init__(message)
        self.kind = kind or self.kind


class SettingsError(PodError):
    """A key of pod.toml, a flag or an argument that can't be right."""

    code, kind = 2, "settings"


# states of a pod: the cloud's own, or ABSENT
ABSENT, READY, FAILED, DELETING = "ABSENT", "READY", "FAILED", "DELETING"
STOPPED = "STOPPED"  # it keeps its disks, and is started again
# it won't come back: delete it with force, and create it again
GONE = ("PREEMPTED", "TERMINATED", "SUSPENDED", "SUSPENDING", FAILED)
# what makes a pod READY, in the words of a person; in all other states it is waited for
DELETE, CREATE, RESUME = "deleting it, with force", "creating one", "starting it again"
STEPS = {ABSENT: CREATE, STOPPED: RESUME, **dict.fromkeys(GONE, DELETE)}


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
    queued: bool = False  # made through the queue
    reason: str = ""  # why it failed, or what is wrong with it, "" for nothing
    permanent: bool = False  # it failed for a reason that another try can't change
    accelerator_type: str = ""
    ours: bool = False  # made by our `up`
    identity: str = ""  # the same as long as it is the same machines at the same addresses

    @property
    def condition(self) -> str:
        """The state for a person, with the reason."""
        return f"{self.state}{': ' if self.reason else ''}{self.reason.rstrip('.')}"


@dataclasses.dataclass(frozen=True)
class Result:
    """How a local program ended."""

    code: int | None  # None after a timeout, negative after a signal
    stdout: str = ""
    stderr: str = ""


class Runner:
    """Runs programs, or, if dry, prints the calls as a shell would take them and answers nothing."""

    def __init__(self, dry: bool = False):
        self.dry, self.over = dry, threading.Event()
        self._running: set[subprocess.Popen] = set()

    def run(self, argv: Sequence[str], timeout: float | None, stdin: bytes = b"") -> Result:
        """Returns how it ended, at the latest after `timeout` seconds. Raises PodError if it can't be started."""
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
            advice = "it has to be on this machine's PATH: https://cloud.google.com/sdk/docs/install"
            raise PodError(f"{argv[0]} can't be started ({error.strerror}): {advice}.", "missing") from error
        self._running.add(process)
        code, stdout, stderr = None, b"", b""
        try:
            if self.over.is_set():
                kill(process)
            stdout, stderr = process.communicate(stdin, timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            kill(process)
            with contextlib.suppress(subprocess.TimeoutExpired):  # something outside the group may still hold the pipe
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


def say(text: str) -> None:
    """Prints progress, on stderr: stdout is for answers."""
    print(text, file=sys.stderr, flush=True)
