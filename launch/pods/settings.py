"""What pod.toml says, and the flags that override it. Nothing else of the launcher reads either."""

import argparse
import dataclasses
import functools
import pathlib
import re
import tomllib

import host_setup

from pods.backend import SettingsError

WORD = (r"[A-Za-z0-9][-A-Za-z0-9._:/]*", "be one plain word")  # can't be taken for a flag
RULES = {  # key: (what its value matches, and must, in words)
    **dict.fromkeys(("project", "zone", "runtime_version", "network", "user"), WORD),
    "name": (
        "[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
        "be small letters, digits and dashes, 63 at most, a letter first",
    ),
    "bucket": (r"gs://[a-z0-9][-a-z0-9._]+(/[^\0]*)?", "begin with gs:// and a bucket's name"),
    "track": ("alpha", 'be "alpha" or "": gcloud has no other track for TPU VMs'),
    "python": (r"/[^\0]*", "be an absolute path"),
    "root": (r"(?!-)(?!(.*/)?\.\.(/|$))[^\0]+", "be a folder, such as ~/.mlm-pod"),
}
RANGES = {"price": (0, 1e6), "hosts": (0, 4096)}
KINDS = {
    str: "be a text in quotes",
    bool: "be true or false",
    int: "be a whole number",
    float: "be a number",
}
FLAG = re.compile(r"--[a-z][-a-z0-9]*(=[^\0]*)?")
# what the launcher itself says to gcloud, or depends on
OWN_FLAGS = (
    "--project", "--zone", "--accelerator-type", "--version", "--runtime-version", "--node-id", "--spot", "--network",
    "--node-count", "--node-prefix", "--async", "--format", "--worker", "--command", "--dry-run", "--output-directory",
)  # fmt: skip
REQUIRED = ("name", "project", "zone", "accelerator_type")
# What the number of an accelerator type counts for one chip, the chips of its largest host, the default runtime. A host
# is a VM: 4 chips, but up to 8 where a v5e or v6e slice fits on one. Sources: "TPU v2" to "TPU v6e" and "TPU software
# versions" of cloud.google.com/tpu/docs.
GENERATIONS = {
    "v2": (2, 4, "tpu-ubuntu2204-base"),
    "v3": (2, 4, "tpu-ubuntu2204-base"),
    "v4": (2, 4, "tpu-ubuntu2204-base"),
    "v5litepod": (1, 8, "v2-alpha-tpuv5-lite"),
    "v5p": (2, 4, "v2-alpha-tpuv5"),
    "v6e": (1, 8, "v2-alpha-tpuv6e"),
}


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
    queued: bool = key(
        "wait in the queue for it (a queued resource) instead of creating it now", False
    )
    network: str = key("VPC network; default: the project's default", "")
    bucket: str = key(
        "gs://BUCKET[/FOLDER]: a run's workdir is {bucket}/{run id}, unless --workdir says so", ""
    )
    price: float = key("dollars for one chip and one hour, to say what a run has cost", 0.0)
    root: str = key("the launcher's folder on each host; ~ is the home there", "~/.mlm-pod")
    python: str = key(
        "interpreter on the hosts that has all packages; default: an environment is made there", ""
    )
    hosts: int = key("number of hosts; 0: as the accelerator type says", 0)
    user: str = key("name to log in with on the hosts; default: gcloud's choice", "")
    track: str = key('"alpha" for gcloud alpha, which has more flags; default: gcloud', "")
    create_flags: tuple[str, ...] = key(
        "a flag for gcloud's create, such as --reserved; repeatable", ()
    )
    ssh_flags: tuple[str, ...] = key(
        "a flag for gcloud's ssh, such as --internal-ip; repeatable", ()
    )

    @property
    def chips(self) -> int:
        """Chips of the whole pod."""
        prefix, _, number = self.accelerator_type.partition("-")
        return int(number) // GENERATIONS[prefix][0]

    @property
    def host_count(self) -> int:
        """Hosts that the pod must have."""
        largest = GENERATIONS[self.accelerator_type.partition("-")[0]][1]
        return self.hosts or (1 if self.chips <= largest else self.chips // 4)

    @property
    def runtime(self) -> str:
        """The runtime version, that of the generation if none is set."""
        return self.runtime_version or GENERATIONS[self.accelerator_type.partition("-")[0]][2]

    @property
    def dollars_per_hour(self) -> float:
        """Of the whole pod; 0 if no price was given."""
        return self.price * self.chips


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --pod FILE and a flag for every key."""
    group = parser.add_argument_group("pod.toml, and what overrides it")
    group.add_argument("--pod", default="", metavar="FILE", help="default: pod.toml in this folder")
    for name, field in FIELDS.items():
        flag = "--" + name.replace("_", "-")
        kind = type(field.default)
        add = functools.partial(
            group.add_argument, flag, dest=f"set_{name}", help=field.metadata["words"]
        )
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
            where = (
                f"{path} has no {name}" if path.exists() else f"there is no {path}, and no --{name}"
            )
            raise SettingsError(
                f"{where}: copy launch/pod.toml.example to pod.toml and fill it in."
            )
    checked = {name: _check(name, value, f"{path}: {name}") for name, value in values.items()}
    checked |= {
        name: _check(name, value, "--" + name.replace("_", "-")) for name, value in flags.items()
    }
    return Settings(**checked)


def _read(path: pathlib.Path) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path} can't be read: {error.strerror}.") from error
    # a number of 5,000 digits, a list in 1,000 others
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is no TOML: {error}.") from error
    for name in values:
        if name not in FIELDS:
            raise SettingsError(
                f"{path}: {name} is no key of it; the keys are {', '.join(FIELDS)}."
            )
    return values


def _check(name: str, value: object, where: str) -> object:
    """Returns the value of a key. Raises SettingsError, beginning with `where`, if it can't have this one."""
    kind = type(FIELDS[name].default)
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    rule = ""
    if kind is tuple:
        if not (isinstance(value, list) and all(FLAG.fullmatch(str(flag)) for flag in value)):
            rule = 'be a list of flags, such as ["--reserved"]'
        elif reserved := [flag for flag in value if flag.partition("=")[0] in OWN_FLAGS]:
            rule = f"not hold {reserved[0]}, which the launcher sets: use the keys of pod.toml"
    elif not is_kind:
        rule = KINDS[kind]
    elif name in RULES and (value or name == "root") and not re.fullmatch(RULES[name][0], value):
        rule = RULES[name][1]
    elif name in RANGES and not RANGES[name][0] <= value <= RANGES[name][1]:
        rule = f"be from {RANGES[name][0]} to {RANGES[name][1]:.0f}"
    elif name == "accelerator_type":
        rule = _rule_of_accelerator(value)
    if rule:
        raise SettingsError(f"{where} is {value!r}; it must {rule}.")
    return tuple(value) if kind is tuple else value


def _rule_of_accelerator(name: str) -> str:
    """Returns what an accelerator type has to be, "" if it is so."""
    prefix, _, number = name.partition("-")
    if prefix == "tpu7x":
        return (
            "be one that is offered as a TPU VM: on GKE, use launch/gke.yaml; on Compute Engine, start `python -m mlm "
            "run` on each host"
        )
    if prefix not in GENERATIONS or not re.fullmatch(r"[1-9][0-9]{0,5}", number):
        return f"be one of {', '.join(f'{prefix}-N' for prefix in GENERATIONS)}, such as v4-32 or v5litepod-16"
    cores, largest, _ = GENERATIONS[prefix]
    if int(number) % cores:
        return f"count TensorCores, {cores} a chip"
    chips = int(number) // cores
    return f"fill hosts of 4 chips, not {chips} chips" if chips > largest and chips % 4 else ""
