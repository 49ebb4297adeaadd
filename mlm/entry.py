"""What a command was started from: `python -m mlm`, or a researcher's file with a subclass of `Pretraining`.

A checkpoint records the class: its name, the methods that it overrides, the hash of its file, and the commit. A run is
resumed by the class of that name alone. Other code of it is said and recorded: to edit one's file and to resume is what
researchers do.
"""

import functools
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlm.errors import InputError

PACKAGE = Path(__file__).parent
FINE_TUNING = {"classify", "glue"}  # commands
STOCK = "mlm's own Pretraining"
# Methods that decide what a model with given parameters computes, or how it is evaluated; all others only train it.
EVALUATION = {
    "__init__",
    "open",
    "make_model",
    "make_attention",
    "evaluate",
}
# "name", "overrides", "file", "code" (SHA-256 of the file), "commit"; {} of mlm's own
Record = Mapping[str, Any]


class Entry(NamedTuple):
    """What a command was started from, and how to start another, here or on another host."""

    pretraining: type | None = None  # a subclass of Pretraining; None: mlm's own
    record: Record = types.MappingProxyType({})
    command: tuple[str, ...] = ("-m", "mlm")  # after the interpreter; () if nothing starts it again
    folder: str = ""  # that the imports of a researcher's file need on the path

    @property
    def identity(self) -> str:
        """The class with its file; "" of mlm's own."""
        return label(self.record) if self.record else ""

    def environment(self) -> dict[str, str]:
        """Returns the environment to start a command in."""
        imports = [self.folder, str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, imports))}

    def fingerprint(self) -> dict[str, str]:
        """Returns {readable name: value} of what all hosts of a run must have in common."""
        if not self.record:
            return {"class": STOCK}
        return {"class": self.record["name"], f"code {self.record['file']}": self.record["code"]}

    def check_command(self, *commands: str) -> None:
        """Raises InputError for a command, or one that it runs, that can't train by the class."""
        for command in FINE_TUNING.intersection(commands) if self.record else ():
            raise InputError(
                f"{command} fine-tunes without {name_of(self.record)}, a class for pretraining; start it with "
                f"python -m mlm {command}."
            )
        if "sweep" in commands and not self.command:
            raise InputError(
                f"sweep: its runs are processes of their own, which can't be started with {name_of(self.record)}; "
                "start it from a Python file that ends in main(pretraining=...), without other arguments."
            )


MLM = Entry()


def open_entry(pretraining: Any, argv: list[str] | None) -> Entry:
    """Returns the entry of `main(argv, pretraining=...)`; raises InputError for what is no class for pretraining."""
    if pretraining is None:
        return MLM
    base = getattr(sys.modules.get("mlm.tasks.pretraining"), "Pretraining", None)
    if not (isinstance(pretraining, type) and base and issubclass(pretraining, base)):
        raise InputError(
            f"main(pretraining={pretraining!r:.100}): must be a subclass of mlm.tasks.pretraining.Pretraining."
        )
    script = sys.modules["__main__"]
    file = Path(getattr(script, "__file__", None) or "").absolute()
    spec = getattr(script, "__spec__", None)
    command = (str(file),)
    folder = ""
    if spec is not None:  # python -m NAME
        command = ("-m", spec.name.removesuffix(".__main__"))
        folder = str(file.parents[spec.name.count(".")])
    if not file.is_file() or (argv is not None and argv != sys.argv[1:]):
        command = ()
    return Entry(pretraining, describe(pretraining), command, folder)


# the file as it was when the class was first described: edited afterwards, it is not what runs
@functools.cache
def describe(cls: type) -> dict[str, Any]:
    """Returns what a checkpoint records of a class; {} if it is mlm's own."""
    user_classes = [base for base in cls.__mro__ if not _is_known(base)]
    if not user_classes:
        return {}
    known = [base for base in cls.__mro__ if base not in user_classes and base is not object]
    inherited = {name for base in known for name in vars(base)}
    overrides = {
        name
        for base in user_classes
        for name, value in vars(base).items()
        if hasattr(value, "__get__") and (name == "__init__" or not name.startswith("__"))
    }
    path = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    module = cls.__module__.rpartition(".")[2]
    if module == "__main__" and path.name:  # named alike whether it was started or imported
        module = path.parent.name if path.stem == "__main__" else path.stem
    return {
        "name": f"{module}.{cls.__qualname__}",
        "overrides": sorted(overrides & inherited),
        "file": path.name,  # "" of a class in a notebook
        "code": hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        "commit": commit(path.parent),
    }


def _is_known(cls: type) -> bool:
    """Returns whether a class is mlm's or Python's own."""
    package = cls.__module__.partition(".")[0]
    return package == "mlm" or (package in sys.stdlib_module_names and package != "__main__")


def commit(folder: Path) -> str:
    """Returns the commit that git has checked out in a folder, with "-dirty" if files differ from it, or ""."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return git.stdout.strip()


def name_of(record: Record) -> str:
    """Returns the name of a recorded class."""
    return record["name"] if record else STOCK


def label(record: Record) -> str:
    """Returns the name of a recorded class, with its file and commit."""
    if not record.get("code"):
        return name_of(record)
    commit = f", commit {record['commit']}" if record["commit"] else ""
    return f"{name_of(record)} ({record['file']}, code {record['code'][:12]}{commit})"


def changes_evaluation(record: Record) -> bool:
    """Returns whether a class may change what a model with given parameters computes."""
    return not EVALUATION.isdisjoint(record.get("overrides", ()))


def summary(record: Record) -> str:
    """Returns a class, its file and what it overrides, for the report and the card of a run; "" of mlm's own."""
    overrides = ", ".join(record.get("overrides", ())) or "nothing"
    return f"{label(record)}, which overrides {overrides}" if record else ""


def changes(saved: Record, now: Record) -> list[str]:
    """Returns a line if the class, or the code of its file, is another one than that of a checkpoint."""
    is_same = name_of(saved) == name_of(now) and saved.get("code") == now.get("code")
    return [] if is_same else [f"class: {label(saved)} -> {label(now)}"]


def check_resume(saved: Record, now: Record, where: str, branch: str) -> None:
    """Raises InputError if a run of the class `saved` can't be resumed by `now`, which has another name."""
    if name_of(saved) != name_of(now):
        raise InputError(
            f"{where} was made by {label(saved)}, and this command has {label(now)}; start it with that class, or go "
            f"on with this one in another --workdir: --config.train.branch_from={branch}."
        )


def check_use(
    saved: Record, now: Record, where: str, *, command: str, stock_network: bool
) -> list[str]:
    """Returns remarks; raises InputError if a model of the class `saved` would compute something else here.

    With `stock_network` the command computes as mlm's own class does, whatever class it was started with.
    """
    differs = changes_evaluation(saved) or (changes_evaluation(now) and not stock_network)
    if differs and name_of(saved) != name_of(now):
        raise InputError(
            f"{where} was trained by {label(saved)}, and this command has {label(now)}: {command} would compute "
            "something else; start it from the file of that class, or with python -m mlm if it was mlm's own."
        )
    if not differs:
        left_out = "metrics" in saved.get("overrides", ()) and not stock_network
        if left_out and name_of(saved) != name_of(now):
            return [f"{where} was trained by {name_of(saved)}, whose metrics {command} leaves out."]
        return []
    remarks = [f"{where}: {line}." for line in changes(saved, now)]
    left_out = ", ".join(sorted(EVALUATION.intersection(saved["overrides"]) - {"make_model"}))
    if stock_network and left_out:
        remarks.append(
            f"{where}: {name_of(saved)} overrides {left_out}, which {command} does without."
        )
    return remarks
