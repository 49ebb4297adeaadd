"""What each gcloud command takes, as its own --help says, and the refusals that gcloud gives for anything else.

Source: `gcloud [alpha] compute tpus ... --help` and the refusals of Google Cloud SDK 528.0.0 (2025-06-20), compared
with https://cloud.google.com/sdk/gcloud/reference/compute/tpus (last updated 2025-10-21), which adds --boot-disk alone.
"""

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
SSH = {
    "--command": VALUE, "--dry-run": SWITCH, "--force-key-file-overwrite": SWITCH, "--internal-ip": SWITCH,
    "--output-directory": VALUE, "--plain": SWITCH, "--ssh-flag": REPEATED, "--ssh-key-expiration": VALUE,
    "--ssh-key-expire-after": VALUE, "--ssh-key-file": VALUE, "--strict-host-key-checking": VALUE, "--worker": VALUE,
    "--zone": VALUE,
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
    "tpu-vm start": Command({"--async": SWITCH, "--zone": VALUE}, ("TPU",)),
    "tpu-vm delete": Command({"--async": SWITCH, "--zone": VALUE}, ("TPU",)),
    "tpu-vm list": Command(LIST, (), 0),
    "tpu-vm ssh": Command(SSH, ("[USER@]TPU",), remainder=True),
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


IAP_TEXT = "At most one of --internal-ip | --tunnel-through-iap can be specified."
IAP = ((IAP_TEXT, [("--internal-ip",), ("--tunnel-through-iap",)]),)
ALPHA = {  # what gcloud alpha adds to a command: (flags, groups)
    "tpu-vm create": (("--provisioning-model", "--reservation"), ()),
    "tpu-vm ssh": (("--batch-size",), IAP),
    "queued-resources create": (
        ("--max-run-duration", "--network-config", "--provisioning-model", "--reservation", "--workload-type"), (),
    ),
}  # fmt: skip
ALPHA_SWITCHES = {
    "tpu-vm create": ("--autocheckpoint-enabled",),
    "tpu-vm ssh": ("--tunnel-through-iap",),
    "queued-resources create": ("--autocheckpoint-enabled", "--best-effort"),
}
DICTS = ("--labels", "--data-disk", "--metadata", "--boot-disk")  # KEY=VALUE[,KEY=VALUE...]
CHOICES = {
    "tpu-vm create": ("standard", "spot", "reservation-bound"),
    "queued-resources create": ("standard", "spot", "reservation-bound", "flex-start"),
}


class RefusedError(Exception):
    """gcloud ends with this text on stderr and this exit code."""

    def __init__(self, where: str, what: str, code: int = 2) -> None:
        super().__init__(f"ERROR: ({where}) {what}")
        self.code = code


class Call:
    """A checked command line: `name` as in COMMANDS, flags (a switch is True), positionals, and what follows "--"."""

    def __init__(self, name: str, track: str = "") -> None:
        self.name, self.track, self.flags, self.positionals, self.remainder = name, track, {}, [], []

    @property
    def where(self) -> str:
        """The command as gcloud's error messages write it."""
        return f"gcloud.{self.track and self.track + '.'}compute.tpus." + self.name.replace(" ", ".")

    @property
    def verb(self) -> str:
        """The last word of the command, such as "create"."""
        return self.name.split(" ")[1]

    def refuse(self, what: str, code: int = 1) -> RefusedError:
        """Returns the error to raise: gcloud's line for this command."""
        return RefusedError(self.where, what, code)


def parse(argv: list[str]) -> Call:
    """Reads a command line (without "gcloud"); raises RefusedError with gcloud's words for what it doesn't take."""
    track = argv[0] if argv[0] in ("alpha", "beta") else ""
    given, argv = argv, argv[1:] if track else argv
    name = " ".join(argv[2:4])
    if track == "beta":
        raise RefusedError(
            "gcloud.beta.compute.tpus",
            f"Invalid choice: {argv[2]!r}.\nThis command is available in one or more alternate release tracks.  Try:\n"
            f"  gcloud compute tpus {argv[2]}\n  gcloud alpha compute tpus {argv[2]}",
        )
    if argv[:2] != ["compute", "tpus"] or name not in COMMANDS:
        raise RefusedError(".".join(["gcloud", *given[:3]]), f"Invalid choice: {' '.join(argv[3:4])!r}.")
    command, call = COMMANDS[name], Call(name, track)
    alpha = dict.fromkeys(ALPHA.get(name, ((),))[0], VALUE) | dict.fromkeys(ALPHA_SWITCHES.get(name, ()), SWITCH)
    if track:
        command = command._replace(flags=command.flags | alpha, groups=command.groups + ALPHA.get(name, ((), ()))[1])
    words = argv[4:]
    if command.remainder and "--" in words:
        at = words.index("--")
        words, call.remainder = words[:at], words[at + 1 :]
    unknown = []
    known = WIDE | command.flags
    if elsewhere := [] if track else [word.partition("=")[0] for word in words if word.partition("=")[0] in alpha]:
        lines = "".join(f"\n {flag} flag is available in one or more alternate release tracks. Try:\n\n"
                        f"  gcloud alpha compute tpus {name} {flag}\n" for flag in elsewhere)  # fmt: skip
        raise call.refuse(f"unrecognized arguments:\n  {lines}", 2)
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
            _check_value(call, flag, value)
            if known[flag] == REPEATED:
                call.flags.setdefault(flag, []).append(value)
            else:
                call.flags[flag] = value
    if command.most is not None:
        unknown += call.positionals[command.most :]
    _check(call, command, unknown)
    return call


def _check_value(call: Call, flag: str, value: str) -> None:
    if flag in DICTS and not all("=" in part for part in value.split(",")):
        part = next(part for part in value.split(",") if "=" not in part)
        raise call.refuse(
            f"argument {flag}: Bad syntax for dict arg: [{part}]. Please see `gcloud topic flags-file` or "
            "`gcloud topic escaping` for information on providing list or dictionary flag values with special "
            "characters.",
            2,
        )
    if flag == "--strict-host-key-checking" and value not in ("ask", "no", "yes"):
        raise call.refuse(f"argument {flag}: Invalid choice: '{value}'.\n\nValid choices are [ask, no, yes].", 2)
    if flag == "--provisioning-model" and value not in CHOICES[call.name]:
        choices = ", ".join(CHOICES[call.name])
        sentence = f"Invalid value for [{flag}]: {value} is not a valid provisioning model, must be one of [{choices}]"
        raise call.refuse(sentence, 1)


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
