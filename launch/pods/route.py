"""How ssh itself reaches a host, so that not every question to a host starts a gcloud.

`gcloud compute tpus tpu-vm ssh --dry-run` prints the ssh command for each host. All that is asked of a host within ten
minutes goes over one connection.
"""

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Sequence

SHARED = ("ControlMaster=auto", "ControlPersist=600", "BatchMode=yes", "ServerAliveInterval=15")


def parse(line: str, flags: Sequence[str]) -> list[str] | None:
    """Returns the ssh command of a line that gcloud printed, unquoted, with our flags; None if it is no such line."""
    start, _, target = line.removesuffix(" -- true").rpartition(" ")
    ours = "".join(f" {flag}" for flag in flags)
    program, *options = re.split(" -o (?=[A-Z])", start.removesuffix(ours))
    match = re.fullmatch("(/.*/ssh) -T(?: -i (/.+))?", program)
    if not match or not start.endswith(ours) or not re.fullmatch("[^@ ]+@[^@ ]+", target):
        return None
    folder = pathlib.Path.home() / ".ssh"
    with contextlib.suppress(OSError):  # then ssh says why it fails
        folder.mkdir(mode=0o700, exist_ok=True)
    # one connection for all commands with the same route
    options += [*SHARED, f"ControlPath={folder}/mlm-{hashlib.sha256(line.encode()).hexdigest()[:16]}"]
    key = ["-i", match[2]] if match[2] else []
    return [match[1], "-T", *key, *(word for option in options for word in ("-o", option)), *flags, target, "--"]
