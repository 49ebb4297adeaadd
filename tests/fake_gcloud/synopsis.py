"""What gcloud takes, as far as the launcher and launch/pod.toml.example use it, and what it says of anything else.

tests/test_gcloud_parser.py asks the real parser, about this table and about every call of the launcher.
"""

# What a command takes: "=" with a value, "*" several times, "!" is required; after "alpha" what gcloud alpha adds.
EVERYWHERE = "--project=! --zone=! --format= --quiet"
NODE = (
    "--accelerator-type= --data-disk=* --internal-ips --labels= --metadata= --network= --reserved --scopes= "
    "--service-account= --spot --subnetwork= --tags="
)
COMMANDS = {
    "tpu-vm create": f"{NODE} --version=! --preemptible alpha --reservation= --provisioning-model=",
    "tpu-vm describe": "",
    "tpu-vm start": "",
    "tpu-vm delete": "",
    "tpu-vm list": "",
    "tpu-vm ssh": "--command= --dry-run --internal-ip --ssh-flag=* --ssh-key-file= --strict-host-key-checking= "
    "--worker= alpha --tunnel-through-iap --batch-size=",
    "queued-resources create": f"{NODE} --node-id=! --runtime-version=! --guaranteed --valid-until-duration= alpha "
    "--reservation= --provisioning-model= --max-run-duration= --network-config=* --best-effort",
    "queued-resources describe": "",
    "queued-resources delete": "--force",
    "queued-resources list": "",
}


class RefusedError(Exception):
    """gcloud ends with this text on stderr and this exit code."""

    def __init__(self, where: str, what: str, code: int = 2) -> None:
        super().__init__(f"ERROR: ({where}) {what}")
        self.code = code


class Call:
    """A command line that is taken: `name` as in COMMANDS, its positional, flags (a switch is True)."""

    def __init__(self, name: str, track: str = "") -> None:
        self.name, self.track, self.flags, self.target = name, track, {}, ""

    @property
    def verb(self) -> str:
        """The last word of the command, such as "create"."""
        return self.name.split(" ")[1]

    def refuse(self, what: str, code: int = 1) -> RefusedError:
        """Returns the error to raise: gcloud's line for this command."""
        track = f"{self.track}." * bool(self.track)
        return RefusedError(f"gcloud.{track}compute.tpus.{self.name.replace(' ', '.')}", what, code)


def flags_of(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the flags that a command takes, and those that only gcloud alpha takes: {flag: "=", "=*", "=!" or ""}."""
    usual, _, alpha = f"{EVERYWHERE} {COMMANDS[name]}".partition("alpha")
    parts = [[word.partition("=") for word in words.split()] for words in (usual, alpha)]
    return tuple({flag: equals + kind for flag, equals, kind in words} for words in parts)


def parse(argv: list[str]) -> Call:
    """Reads a command line (without "gcloud"); raises RefusedError with gcloud's words for what it doesn't take."""
    track = argv[0] if argv[0] == "alpha" else ""
    argv = argv[1:] if track else argv
    name = " ".join(argv[2:4])
    if argv[:2] != ["compute", "tpus"] or name not in COMMANDS:
        raise RefusedError(".".join(["gcloud", *argv[:3]]), f"Invalid choice: {' '.join(argv[3:4])!r}.")
    call, (known, alpha) = Call(name, track), flags_of(name)
    known |= alpha if track else {}
    targets, unknown = [], []
    for word in argv[4:]:
        flag, has_value, value = word.partition("=")
        if not word.startswith("--"):
            targets.append(word)
        elif flag not in known:
            unknown.append(word)
        elif has_value and not known[flag]:
            raise call.refuse(f"argument {flag}: ignored explicit argument '{value}'", 2)
        elif known[flag] and not has_value:
            raise call.refuse(f"argument {flag}: expected one argument", 2)
        elif known[flag] == "=*":
            call.flags.setdefault(flag, []).append(value)
        else:
            call.flags[flag] = value if has_value else True
    call.target = "".join(targets[:1])
    if unknown := [*unknown, *targets[call.verb != "list" :]]:
        begin = (
            "unrecognized arguments: "
            if len(unknown) == 1 and not {*unknown} & {*alpha}
            else "unrecognized arguments:\n  "
        )
        raise call.refuse(begin + "\n  ".join(_unknown(call, word, alpha) for word in unknown), 2)
    missing = [flag for flag in known if known[flag] == "=!" and flag not in call.flags]
    if missing:
        raise call.refuse(f"argument {missing[0]}: Must be specified.", 2)
    return call


def _unknown(call: Call, word: str, alpha: dict[str, str]) -> str:
    flag = word.partition("=")[0]
    if flag not in alpha:
        return word
    where = f"{flag} flag is available in one or more alternate release tracks. Try:"
    return f"\n {where}\n\n  gcloud alpha compute tpus {call.name} {flag}\n\n  {word}"
