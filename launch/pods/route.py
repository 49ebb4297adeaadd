"""How ssh itself reaches a host, so that not every question to a host starts a gcloud.

`gcloud compute tpus tpu-vm ssh --dry-run` prints the ssh command for each host. It is kept in a file for each pod; all
that is asked of a host within ten minutes goes over one connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Sequence

import host_setup

FOLDER = pathlib.Path("runs/pods/ssh")  # under the folder we are in
SHARED = ("ControlMaster=auto", "ControlPersist=600", "BatchMode=yes", "ServerAliveInterval=15")


@dataclasses.dataclass(frozen=True)
class Route:
    """Parts of an ssh command line; target: USER@ADDRESS."""

    program: str
    options: tuple[str, ...]
    target: str

    @classmethod
    def parse(cls, line: str, flags: Sequence[str]) -> Route | None:
        """Returns the route of a line that gcloud printed, unquoted, with our flags; None if it is no such line."""
        start, _, target = line.removesuffix(" -- true").rpartition(" ")
        ours = "".join(f" {flag}" for flag in flags)
        program, *options = re.split(" -o (?=[A-Z])", start.removesuffix(ours))
        match = re.fullmatch("(/.*/ssh) -T(?: -i (/.+))?", program)
        if not match or not start.endswith(ours) or not re.fullmatch("[^@ ]+@[^@ ]+", target):
            return None
        key = ("-i", match[2]) if match[2] else ()
        return cls(match[1], (*key, *(word for option in options for word in ("-o", option)), *flags), target)

    def shared(self) -> list[str]:
        """Returns the options, with those that share a connection between all commands with the same route."""
        folder = pathlib.Path.home() / ".ssh"
        with contextlib.suppress(OSError):  # then ssh fails, and gcloud takes over
            folder.mkdir(mode=0o700, exist_ok=True)
        socket = folder / f"mlm-{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"
        return [*self.options, *(word for option in (*SHARED, f"ControlPath={socket}") for word in ("-o", option))]


def load(name: str, key: list[str]) -> list[str]:
    """Returns the lines that were saved for a pod, [] if there are none for this key."""
    saved = host_setup.read(FOLDER / f"{name}.json") or {}
    return saved.get("lines") or [] if saved.get("key") == key else []


def save(name: str, key: list[str], lines: list[str]) -> None:
    """Keeps the lines of a pod."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    host_setup.write(FOLDER / f"{name}.json", {"key": key, "lines": lines})


def forget(name: str) -> None:
    """Removes the lines of a pod."""
    (FOLDER / f"{name}.json").unlink(missing_ok=True)
