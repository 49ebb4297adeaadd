"""Pods and their hosts, what a command can fail with, and how a local program such as gcloud is run.

Nothing goes through a local shell; the command that ssh carries to a host's shell is quoted once.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence


class PodError(Exception):
    """A foreseen end of a command.

    kind: "absent" (there is no such thing), "network", "hosts" (some can't be reached, or refuse), "other";
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


# States of a pod: the cloud's own, or ABSENT. One that is GONE won't come back; in all others it is waited for.
ABSENT = "ABSENT"
READY = "READY"
# UNKNOWN: after a failed repair
GONE = ("PREEMPTED", "TERMINATED", "SUSPENDED", "SUSPENDING", "FAILED", "UNKNOWN")
DELETE = "deleting it"
CREATE = "creating one"
STEPS = {ABSENT: CREATE, **dict.fromkeys(GONE, DELETE)}  # what makes a pod READY


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


def run(argv: Sequence[str], timeout: float, stdin: bytes = b"") -> Result:
    """Returns how a program ended, at the latest after `timeout` seconds. Raises SettingsError for none."""
    # gcloud would ask its questions on the stdin that holds our data
    variables = {**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, timeout=timeout, env=variables, check=False
        )
    except subprocess.TimeoutExpired as error:
        return Result(None, "", (error.stderr or b"").decode(errors="replace"))
    except OSError as error:
        advice = "it has to be on this machine's PATH: https://cloud.google.com/sdk/docs/install"
        sentence = f"{argv[0]} can't be started ({error.strerror}): {advice}."
        raise SettingsError(sentence) from error
    texts = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return Result(done.returncode, *texts)


def printable(text: str) -> str:
    """Returns a text of which nothing can steer a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def say(text: str) -> None:
    """Prints progress, on stderr: stdout is for answers."""
    print(text, file=sys.stderr, flush=True)
