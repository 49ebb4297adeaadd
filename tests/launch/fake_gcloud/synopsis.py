"""What gcloud takes, as far as the launcher and launch/pod.toml.example use it.

tests/launch/test_tpu_dry_run.py asks gcloud's own parser, too, about every call of the launcher.
"""

# What a command takes: flags with a value end in "="; after "alpha" what gcloud alpha adds.
EVERYWHERE = "--project= --zone= --format= --quiet"
NODE = (
    "--accelerator-type= --data-disk= --internal-ips --labels= --metadata= --network= --reserved --scopes= "
    "--service-account= --spot --subnetwork= --tags="
)
COMMANDS = {
    "tpu-vm create": f"{NODE} --version= --preemptible alpha --reservation= --provisioning-model=",
    "tpu-vm describe": "",
    "tpu-vm start": "",
    "tpu-vm delete": "",
    "tpu-vm ssh": "--command= --dry-run --internal-ip --ssh-flag= --ssh-key-file= --strict-host-key-checking= "
    "--worker= alpha --tunnel-through-iap --batch-size=",
    "queued-resources create": f"{NODE} --node-id= --runtime-version= --guaranteed --valid-until-duration= alpha "
    "--reservation= --provisioning-model= --max-run-duration= --network-config= --best-effort",
    "queued-resources describe": "",
    "queued-resources delete": "--force",
    "queued-resources list": "",
}


class RefusedError(Exception):
    """gcloud ends with this text on stderr and this exit code."""

    def __init__(self, name: str, what: str, code: int) -> None:
        super().__init__(f"ERROR: (gcloud.compute.tpus.{name.replace(' ', '.')}) {what}")
        self.code = code


class Call:
    """A command line: `name` as in COMMANDS, its positional, flags (of a flag that comes again the last one counts)."""

    def __init__(self, name: str, ssh_args: list[str]) -> None:
        self.name = name
        self.flags = {}
        self.ssh_flags = []
        self.target = ""
        self.ssh_args = ssh_args

    def refuse(self, what: str, code: int = 1) -> RefusedError:
        return RefusedError(self.name, what, code)


def parse(argv: list[str]) -> Call:
    """Reads a command line (without "gcloud"); raises RefusedError for what gcloud doesn't take."""
    alpha = argv[0] == "alpha"
    end = argv.index("--") if "--" in argv else len(argv)
    words = argv[3:end] if alpha else argv[2:end]
    call = Call(" ".join(words[:2]), argv[end + 1 :])  # what follows -- is ssh's
    known, _, more = f"{EVERYWHERE} {COMMANDS[call.name]}".partition(" alpha ")
    known = {*known.split(), *(more.split() if alpha else [])}
    for word in words[2:]:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            call.target = word
        elif flag + equals not in known:
            raise call.refuse(f"unrecognized arguments: {word}", 2)
        elif flag == "--ssh-flag":
            call.ssh_flags.append(value)
        else:
            call.flags[flag] = value
    return call
