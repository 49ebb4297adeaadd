"""What pod.toml says. Nothing else of the launcher reads it."""

import dataclasses
import re
import tomllib

import host_setup

from pods.backend import SettingsError

RULES = {  # key: (what a text matches, and must, in words)
    "name": (
        "[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
        "be small letters, digits and dashes, 63 at most, a letter first",
    ),
    "bucket": (r"(gs://[a-z0-9][-a-z0-9._]+(/.*)?)?", "begin with gs:// and a bucket's name"),
    "track": ("(alpha)?", 'be "alpha" or "": gcloud has no other track for TPU VMs'),
    "python": ("(/.*)?", "be an absolute path"),
}
KINDS = {
    str: "be a text in quotes",
    bool: "be true or false",
    float: "be a number from 0 on",
    tuple: 'be a list of flags, such as ["--reserved"]',
}
# what the launcher itself says to gcloud, or depends on
OWN_FLAGS = (
    "--project", "--zone", "--accelerator-type", "--version", "--runtime-version", "--node-id", "--spot", "--labels",
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


@dataclasses.dataclass(frozen=True)
class Settings:
    """One pod, by the keys of pod.toml; launch/pod.toml.example says what each one is."""

    name: str = ""
    project: str = ""
    zone: str = ""
    accelerator_type: str = ""
    runtime_version: str = ""
    spot: bool = False
    queued: bool = False
    bucket: str = ""
    price: float = 0.0
    python: str = ""
    user: str = ""
    track: str = ""
    create_flags: tuple[str, ...] = ()
    ssh_flags: tuple[str, ...] = ()

    @property
    def generation(self) -> tuple[int, int, str]:
        """What GENERATIONS says of it."""
        return GENERATIONS[self.accelerator_type.partition("-")[0]]

    @property
    def chips(self) -> int:
        """Chips of the whole pod."""
        return int(self.accelerator_type.partition("-")[2]) // self.generation[0]

    @property
    def host_count(self) -> int:
        """Hosts that the pod must have."""
        return 1 if self.chips <= self.generation[1] else self.chips // 4

    @property
    def runtime(self) -> str:
        """The runtime version, that of the generation if none is set."""
        return self.runtime_version or self.generation[2]

    @property
    def dollars_per_hour(self) -> float:
        """Of the whole pod; 0 if no price was given."""
        return self.price * self.chips


def load(file: str) -> Settings:
    """Returns the settings of a file. Raises SettingsError, which names file and key."""
    path = host_setup.expand(file)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        advice = "copy launch/pod.toml.example to pod.toml and fill it in"
        raise SettingsError(f"{path}: {error.strerror}: {advice}.") from error
    except ValueError as error:
        raise SettingsError(f"{path} is no TOML: {error}.") from error
    keys = [field.name for field in dataclasses.fields(Settings)]
    for name in values.keys() - keys:
        raise SettingsError(f"{path}: {name} is no key of it; the keys are {', '.join(keys)}.")
    for name in REQUIRED:
        if not values.get(name):
            raise SettingsError(f"{path} has no {name}: launch/pod.toml.example says what it is.")
    for name, value in values.items():
        if rule := _rule(name, value):
            raise SettingsError(f"{path}: {name} is {value!r}; it must {rule}.")
    flags = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Settings(**values | flags)


def _rule(name: str, value: object) -> str:
    """Returns what the value of a key has to be, "" if it is so."""
    kind = type(getattr(Settings, name))
    if kind is tuple and isinstance(value, list) and all(isinstance(flag, str) for flag in value):
        reserved = [flag for flag in value if flag.partition("=")[0] in OWN_FLAGS]
        return f"not hold {reserved[0]}, which the launcher sets" if reserved else ""
    if kind is float and type(value) in (int, float) and value >= 0:
        return ""
    if type(value) is not kind or kind is float:
        return KINDS[kind]
    if name in RULES and not re.fullmatch(RULES[name][0], value):
        return RULES[name][1]
    return _rule_of_accelerator(value) if name == "accelerator_type" else ""


def _rule_of_accelerator(name: str) -> str:
    """Returns what an accelerator type has to be, "" if it is so."""
    prefix, _, number = name.partition("-")
    if prefix not in GENERATIONS or not re.fullmatch(r"[1-9][0-9]{0,5}", number):
        return (
            f"be one of {', '.join(f'{prefix}-N' for prefix in GENERATIONS)}, such as v4-32; TPU7x is no TPU VM: use "
            "launch/gke.yaml, or start `python -m mlm run` on each host"
        )
    cores, largest, _ = GENERATIONS[prefix]
    chips = int(number) / cores
    if (chips > largest and chips % 4) or chips % 1:
        return f"fill hosts of 4 chips; {prefix} counts {cores} for a chip"
    return ""
