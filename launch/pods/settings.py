"""What pod.toml says, and the flags that override it. Nothing else of the launcher reads either."""

import argparse
import dataclasses
import functools
import pathlib
import re
import tomllib

import host_setup

from pods import accelerators
from pods.backend import SettingsError

WORD = (r"[A-Za-z0-9][-A-Za-z0-9._:/]*", "be one plain word")  # can't be taken for a flag
RULES = {  # key: (what its value matches, and must, in words)
    **dict.fromkeys(("project", "zone", "runtime_version", "network", "user"), WORD),
    "name": ("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "be small letters, digits and dashes, 63 at most, a letter first"),
    "bucket": (r"gs://[a-z0-9][-a-z0-9._]+(/[^\0]*)?", "begin with gs:// and a bucket's name"),
    "track": ("alpha", 'be "alpha" or "": gcloud has no other track for TPU VMs'),
    "python": (r"/[^\0]*", "be an absolute path"),
    "root": (r"(?!-)(?!(.*/)?\.\.(/|$))[^\0]+", "be a folder, such as ~/.mlm-pod"),
}
RANGES = {"price": (0, 1e6), "hosts": (0, 4096)}
FLAG = re.compile(r"--[a-z][-a-z0-9]*(=[^\0]*)?")
# what the launcher itself says to gcloud, or depends on
OWN_FLAGS = (
    "--project", "--zone", "--accelerator-type", "--version", "--runtime-version", "--node-id", "--spot", "--network",
    "--node-count", "--node-prefix", "--async", "--format", "--worker", "--command", "--dry-run", "--output-directory",
)  # fmt: skip
# flags that gcloud takes elsewhere alone (Google Cloud SDK 528): with track = "alpha", and of requests in the queue
ALPHA = (
    "--autocheckpoint-enabled", "--batch-size", "--best-effort", "--max-run-duration", "--network-config",
    "--provisioning-model", "--reservation", "--tunnel-through-iap", "--workload-type",
)  # fmt: skip
QUEUED = (
    "--best-effort", "--guaranteed", "--max-run-duration", "--network-config", "--reservation-host-folder",
    "--reservation-host-organization", "--reservation-host-project", "--valid-after-duration", "--valid-after-time",
    "--valid-until-duration", "--valid-until-time", "--workload-type",
)  # fmt: skip
NOT_QUEUED = ("--preemptible", "--queue-count")
REQUIRED = ("name", "project", "zone", "accelerator_type")


def key(words: str, default: object) -> dataclasses.Field:
    """Returns a field that is a flag too, with its help."""
    return dataclasses.field(default=default, metadata={"words": words})


@dataclasses.dataclass(frozen=True)
class Settings:
    """One pod. Every field is a key of pod.toml and a flag."""

    name: str = key("of the TPU, and of its queued resource", "")
    project: str = key("Google Cloud project", "")
    zone: str = key("such as us-central2-b", "")
    accelerator_type: str = key("such as v4-32, v5litepod-16, v5p-64, v6e-8", "")
    runtime_version: str = key("of the TPU VM; default: that of the generation", "")
    spot: bool = key("cheaper, and may be taken away at any time", False)
    queued: bool = key("wait in the queue for it (a queued resource) instead of creating it now", False)
    network: str = key("VPC network; default: the project's default", "")
    bucket: str = key("gs://BUCKET[/FOLDER]: a run's workdir is {bucket}/{run id}, unless --workdir says so", "")
    price: float = key("dollars for one chip and one hour, to say what a run has cost", 0.0)
    root: str = key("the launcher's folder on each host; ~ is the home there", "~/.mlm-pod")
    python: str = key("interpreter on the hosts that has all packages; default: an environment is made there", "")
    hosts: int = key("number of hosts; 0: as the accelerator type says", 0)
    user: str = key("name to log in with on the hosts; default: gcloud's choice", "")
    track: str = key('"alpha" for gcloud alpha, which has more flags; default: gcloud', "")
    create_flags: tuple[str, ...] = key("a flag for gcloud's create, such as --reserved; repeatable", ())
    ssh_flags: tuple[str, ...] = key("a flag for gcloud's ssh, such as --internal-ip; repeatable", ())

    @property
    def accelerator(self) -> accelerators.Accelerator:
        """The accelerator type, taken apart."""
        return accelerators.parse(self.accelerator_type)

    @property
    def host_count(self) -> int:
        """Hosts that the pod must have."""
        return self.hosts or self.accelerator.hosts

    @property
    def dollars_per_hour(self) -> float:
        """Of the whole pod; 0 if no price was given."""
        return self.price * self.accelerator.chips


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --pod FILE and a flag for every key."""
    group = parser.add_argument_group("pod.toml, and what overrides it")
    group.add_argument("--pod", default="", metavar="FILE", help="default: pod.toml in this folder")
    for name, field in FIELDS.items():
        flag, kind = "--" + name.replace("_", "-"), type(field.default)
        add = functools.partial(group.add_argument, flag, dest=f"set_{name}", help=field.metadata["words"])
        if kind is bool:
            add(action=argparse.BooleanOptionalAction)
        elif kind is tuple:
            add(action="append", metavar="FLAG")
        else:
            add(type=kind, metavar="VALUE")


def from_arguments(args: argparse.Namespace) -> Settings:
    """Returns the settings of parsed flags and the file that they name. Raises SettingsError."""
    flags = {name: value for name in FIELDS if (value := getattr(args, f"set_{name}")) is not None}
    return load(args.pod, flags)


def load(file: str, flags: dict[str, object]) -> Settings:
    """Returns the settings of a file ("": pod.toml, if there is one) and flags over it. Raises SettingsError."""
    path = host_setup.expand(file or "pod.toml")
    values = _read(path) if file or path.exists() else {}
    for name in REQUIRED:
        if not (flags.get(name) or values.get(name)):
            where = f"{path} has no {name}" if path.exists() else f"there is no {path}, and no --{name}"
            raise SettingsError(f"{where}: copy launch/pod.toml.example to pod.toml and fill it in.")
    checked = {name: _check(name, value, f"{path}: {name}") for name, value in values.items()}
    checked |= {name: _check(name, value, "--" + name.replace("_", "-")) for name, value in flags.items()}
    settings = Settings(**checked)
    for name in ("create_flags", "ssh_flags"):
        for flag in getattr(settings, name):
            _check_flag(settings, flag.partition("=")[0], f"{path}: {name}")
    return settings


def _read(path: pathlib.Path) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list in 1,000 others
        raise SettingsError(f"{path} is no TOML: {error}.") from error
    for name in values:
        if name not in FIELDS:
            raise SettingsError(f"{path}: {name} is no key of it; the keys are {', '.join(FIELDS)}.")
    return values


def _check(name: str, value: object, where: str) -> object:
    """Returns the value of a key. Raises SettingsError, beginning with `where`, if it can't have this one."""
    kind, rule = type(FIELDS[name].default), ""
    if kind is tuple and not (isinstance(value, list) and all(FLAG.fullmatch(str(flag)) for flag in value)):
        rule = 'be a list of flags, such as ["--reserved"]'
    elif kind is not tuple and type(value) is not kind and not (kind is float and type(value) is int):
        rule = {str: "be a text in quotes", bool: "be true or false", int: "be a whole number", float: "be a number"}[
            kind
        ]
    elif name in RULES and (value or name == "root") and not re.fullmatch(RULES[name][0], value):
        rule = RULES[name][1]
    elif name in RANGES and not RANGES[name][0] <= value <= RANGES[name][1]:
        rule = f"be from {RANGES[name][0]} to {RANGES[name][1]:.0f}"
    if rule:
        raise SettingsError(f"{where} is {value!r}; it must {rule}.")
    if name == "accelerator_type":
        try:
            accelerators.parse(value)
        except ValueError as error:
            raise SettingsError(f"{where}: {error}.") from error
    for flag in value if kind is tuple else ():
        if flag.partition("=")[0] in OWN_FLAGS:
            raise SettingsError(f"{where}: {flag} is the launcher's to set: use the keys of pod.toml.")
    return tuple(value) if kind is tuple else value


def _check_flag(settings: Settings, flag: str, where: str) -> None:
    """Raises SettingsError for a flag that gcloud does not take on this track, or with or without the queue."""
    needs = {
        'track = "alpha"': flag in ALPHA and settings.track != "alpha",
        "queued = true": flag in QUEUED and not settings.queued,
        "queued = false": flag in NOT_QUEUED and settings.queued,
    }
    if missing := " and ".join(need for need, is_missing in needs.items() if is_missing):
        raise SettingsError(f"{where}: gcloud takes {flag} only with {missing}.")
