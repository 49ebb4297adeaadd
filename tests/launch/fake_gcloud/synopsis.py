"""What gcloud takes, as far as the launcher and launch/pod.toml.example use it, and what it says of anything else.

tests/launch/test_tpu_dry_run.py asks gcloud's own parser, too, about every call of the launcher.
"""

import argparse

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
        words = ["gcloud", self.track, "compute.tpus", *self.name.split(" ")]
        return RefusedError(".".join(filter(None, words)), what, code)


class Parser(argparse.ArgumentParser):
    """Of one command; gcloud's own is made of argparse, too, and says what that says."""

    def __init__(self, call: Call, words: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.call, self.required = call, []
        self.add_argument("target", nargs="?", default="")
        for word in words.split():
            flag, equals, kind = word.partition("=")
            actions = {"": "store_true"} if not equals else {"*": "append"}
            self.add_argument(flag, dest=flag, action=actions.get(kind, "store"))
            self.required += [flag] if kind == "!" else []

    def error(self, message: str) -> None:
        raise self.call.refuse(message, 2)


def parse(argv: list[str]) -> Call:
    """Reads a command line (without "gcloud"); raises RefusedError with gcloud's words for what it doesn't take."""
    track = argv[0] if argv[0] == "alpha" else ""
    argv = argv[1:] if track else argv
    name = " ".join(argv[2:4])
    if argv[:2] != ["compute", "tpus"] or name not in COMMANDS:
        raise RefusedError(".".join(["gcloud", *argv[:3]]), f"Invalid choice: {' '.join(argv[3:4])!r}.")
    words, _, alpha = f"{EVERYWHERE} {COMMANDS[name]}".partition(" alpha ")
    call = Call(name, track)
    parser = Parser(call, f"{words} {alpha}" if track else words)
    values, unknown = parser.parse_known_args(argv[4:])
    call.flags = vars(values)
    call.target = call.flags.pop("target")
    if unknown:
        raise call.refuse("unrecognized arguments:" + " ".join(["", *unknown]), 2)
    for flag in parser.required:
        if flag not in call.flags:
            raise call.refuse(f"argument {flag}: Must be specified.", 2)
    return call
