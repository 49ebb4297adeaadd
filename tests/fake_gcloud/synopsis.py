"""What each gcloud command takes, as its own --help says, and the refusals that gcloud gives for anything else.

Source: `gcloud compute tpus ... --help` and the refusals of Google Cloud SDK 528.0.0 (2025-06-20), compared with
https://cloud.google.com/sdk/gcloud/reference/compute/tpus (last updated 2025-10-21), which adds --boot-disk alone.
"""

from __future__ import annotations

from collections import namedtuple

VALUE, SWITCH, REPEATED = "value", "switch", "repeated"

WIDE = {  # GCLOUD_WIDE_FLAG
    "--access-token-file": VALUE, "--account": VALUE, "--billing-project": VALUE, "--configuration": VALUE,
    "--flags-file": VALUE, "--flatten": VALUE, "--format": VALUE, "--help": SWITCH,
    "--impersonate-service-account": VALUE, "--log-http": SWITCH, "--project": VALUE, "--quiet": SWITCH,
    "--trace-token": VALUE, "--user-output-enabled": SWITCH, "--verbosity": VALUE,
}  # fmt: skip
NODE = {  # what both ways to create a TPU share
    "--accelerator-type": VALUE, "--async": SWITCH, "--boot-disk": VALUE, "--data-disk": REPEATED,
    "--description": VALUE, "--internal-ips": SWITCH, "--labels": VALUE, "--metadata": VALUE,
    "--metadata-from-file": VALUE, "--network": VALUE, "--range": VALUE, "--reserved": SWITCH, "--scopes": VALUE,
    "--service-account": VALUE, "--shielded-secure-boot": SWITCH, "--spot": SWITCH, "--subnetwork": VALUE,
    "--tags": VALUE, "--topology": VALUE, "--type": VALUE, "--zone": VALUE,
}  # fmt: skip
SSH = {  # what ssh and scp share
    "--dry-run": SWITCH, "--force-key-file-overwrite": SWITCH, "--internal-ip": SWITCH, "--plain": SWITCH,
    "--ssh-key-expiration": VALUE, "--ssh-key-expire-after": VALUE, "--ssh-key-file": VALUE,
    "--strict-host-key-checking": VALUE, "--worker": VALUE, "--zone": VALUE,
}  # fmt: skip
LIST = {
    "--filter": VALUE, "--limit": VALUE, "--page-size": VALUE, "--sort-by": VALUE, "--uri": SWITCH, "--zone": VALUE,
}  # fmt: skip
TIMES = ("--valid-after-duration", "--valid-after-time", "--valid-until-duration", "--valid-until-time")
HOSTS_OF = ("--reservation-host-folder", "--reservation-host-organization", "--reservation-host-project")
CHIPS = ("--accelerator-type", "--topology", "--type")
CHIPS_TEXT = "(--accelerator-type | --topology --type)"
NODES_TEXT = "(--node-id | [--node-count : --node-prefix])"


# One command: its own flags, the names of its positionals, and what must be or must not be together. `most` is the
# number of positionals at most (None: any); `required` flags; `groups` are (text, [[flags], ...]): of the alternatives
# exactly one (or at most one, if the text starts with "At most") may be used; `remainder`: words after "--".
# No dataclass: each test calls this program dozens of times, and they take long to import.
Command = namedtuple("Command", "flags positionals most required groups remainder", defaults=(1, (), (), False))


COMMANDS = {
    "tpu-vm create": Command(
        NODE | {"--preemptible": SWITCH, "--queue-count": VALUE, "--version": VALUE},
        ("TPU",),
        required=("--version",),
        groups=((f"At most one of {CHIPS_TEXT} can be specified.", [CHIPS[:1], CHIPS[1:]]),),
    ),
    "tpu-vm describe": Command({"--zone": VALUE}, ("TPU",)),
    "tpu-vm delete": Command({"--async": SWITCH, "--zone": VALUE}, ("TPU",)),
    "tpu-vm list": Command(LIST, (), 0),
    "tpu-vm ssh": Command(
        SSH | {"--command": VALUE, "--output-directory": VALUE, "--ssh-flag": REPEATED},
        ("[USER@]TPU",),
        remainder=True,
    ),
    "tpu-vm scp": Command(
        SSH | {"--compress": SWITCH, "--recurse": SWITCH, "--scp-flag": REPEATED},
        ("[[USER@]INSTANCE:]SRC", "[[USER@]INSTANCE:]DEST"),
        None,
    ),
    "queued-resources create": Command(
        NODE
        | {"--guaranteed": SWITCH, "--node-count": VALUE, "--node-id": VALUE, "--node-prefix": VALUE}
        | {"--runtime-version": VALUE}
        | dict.fromkeys((*TIMES, *HOSTS_OF), VALUE),
        ("QUEUED_RESOURCE",),
        required=("--runtime-version",),
        groups=(
            (f"Exactly one of {CHIPS_TEXT} must be specified.", [CHIPS[:1], CHIPS[1:]]),
            (f"Exactly one of {NODES_TEXT} must be specified.", [("--node-id",), ("--node-count", "--node-prefix")]),
        ),
    ),
    "queued-resources describe": Command({"--zone": VALUE}, ("QUEUED_RESOURCE",)),
    "queued-resources delete": Command({"--async": SWITCH, "--force": SWITCH, "--zone": VALUE}, ("QUEUED_RESOURCE",)),
    "queued-resources list": Command(LIST, (), 0),
}


class RefusedError(Exception):
    """gcloud ends with this text on stderr and this exit code."""

    def __init__(self, where: str, what: str, code: int = 2) -> None:
        super().__init__(f"ERROR: ({where}) {what}")
        self.code = code


class Call:
    """A checked command line: `name` as in COMMANDS, flags (a switch is True), positionals, and what follows "--"."""

    def __init__(self, name: str) -> None:
        self.name, self.flags, self.positionals, self.remainder = name, {}, [], []

    @property
    def where(self) -> str:
        """The command as gcloud's error messages write it."""
        return "gcloud.compute.tpus." + self.name.replace(" ", ".")

    @property
    def verb(self) -> str:
        """The last word of the command, such as "create"."""
        return self.name.split(" ")[1]

    def refuse(self, what: str, code: int = 1) -> RefusedError:
        """Returns the error to raise: gcloud's line for this command."""
        return RefusedError(self.where, what, code)


def parse(argv: list[str]) -> Call:
    """Reads a command line (without "gcloud"); raises RefusedError with gcloud's words for what it doesn't take."""
    name = " ".join(argv[2:4])
    if argv[:2] != ["compute", "tpus"] or name not in COMMANDS:
        raise RefusedError(".".join(["gcloud", *argv[:3]]), f"Invalid choice: {' '.join(argv[3:4])!r}.")
    command = COMMANDS[name]
    call = Call(name)
    words = argv[4:]
    if command.remainder and "--" in words:
        at = words.index("--")
        words, call.remainder = words[:at], words[at + 1 :]
    unknown = []
    known = WIDE | command.flags
    while words:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if not word.startswith("--"):
            call.positionals.append(word)
        elif flag not in known:
            unknown.append(word)
        elif known[flag] == SWITCH:
            if has_value:
                raise call.refuse(f"argument {flag}: ignored explicit argument '{value}'", 2)
            call.flags[flag] = True
        else:
            if not has_value:
                if not words or words[0].startswith("--"):
                    raise call.refuse(f"argument {flag}: expected one argument", 2)
                value = words.pop(0)
            if known[flag] == REPEATED:
                call.flags.setdefault(flag, []).append(value)
            else:
                call.flags[flag] = value
    if command.most is not None:
        unknown += call.positionals[command.most :]
    _check(call, command, unknown)
    return call


def _check(call: Call, command: Command, unknown: list[str]) -> None:
    if unknown:
        raise call.refuse("unrecognized arguments: " + "\n  ".join(unknown), 2)
    if len(call.positionals) < len(command.positionals):
        missing = command.positionals[len(call.positionals)]
        raise call.refuse(f"argument {missing}: Must be specified.", 2)
    for flag in command.required:
        if flag not in call.flags:
            raise call.refuse(f"argument {flag}: Must be specified.", 2)
    for text, alternatives in command.groups:
        used = [alternative for alternative in alternatives if any(flag in call.flags for flag in alternative)]
        if len(used) > 1 or (not used and text.startswith("Exactly")):
            first = next((flag for flag in used[0] if flag in call.flags), "") if used else ""
            raise call.refuse((f"argument {first}: " if first else "") + text, 2)
    # Without a project or a zone gcloud takes those of the user's settings, of which this machine has none.
    if "--project" not in call.flags:
        raise call.refuse("The required property [project] is not currently set.")
    if "--zone" not in call.flags:
        raise call.refuse("The required property [zone] is not currently set.")
