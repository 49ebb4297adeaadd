"""What a command was started from: `python -m mlm`, or a researcher's file with a subclass of `Pretraining`.

A checkpoint records the class: its name, the methods that it overrides, and its source files, which are those of its
bases and all that they import, except for installed packages. A resumed run must compute the same, so it needs the same
class of the same source. What can't change a number may change: comments, docstrings and layout. Any other change is
refused, since nobody can know what it changes; a branch (train.branch_from) goes on with it, and says so.
"""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlm.errors import InputError

PACKAGE = Path(__file__).parent
INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
EXPECTED = "MLM_CLASS"  # variable of a run of a sweep: the class that it must have
STOCK = "mlm's own Pretraining"
# Methods that decide how parameters are trained, but not what a model with given parameters computes.
TRAINING = frozenset(
    re.findall(
        r"\w+",
        """make_masking loss metrics make_optimizer make_batch make_hooks init_params partition_rules initial_state
        inputs forward batch_shapes batches tokens_read flops_per_token useful_flops is_epoch_end minimized_metric
        words_per_row _warm_start""",
    )
)
Record = Mapping[str, Any]  # "name", "overrides", "files": [[name, SHA-256, that of the code alone]]; {} of mlm's own


class Program(NamedTuple):
    """How to start a command again, here or on another host."""

    command: tuple[str, ...] = ("-m", "mlm")  # after the interpreter
    file: str = ""  # of a researcher, that must be there
    folder: str = ""  # that the file's imports need on the path
    identity: str = ""  # of the class; "" of mlm's own


class Entry(NamedTuple):
    """What a command was started from."""

    pretraining: type | None = None  # a subclass of Pretraining; None: mlm's own
    record: Record = types.MappingProxyType({})
    started: Program | None = Program()  # None: nothing can start it again

    @property
    def identity(self) -> str:
        """The name of the class and the hash of its code; "" of mlm's own."""
        if not self.record:
            return ""
        codes = [(name, code) for name, _, code in self.record["files"]]
        digest = hashlib.sha256(json.dumps(codes).encode()).hexdigest()[:12]
        return f"{self.record['name']} ({', '.join(name for name, *_ in self.record['files'])}: {digest})"

    def fingerprint(self) -> dict[str, str]:
        """Returns {readable name: value} of what all hosts of a run must have in common."""
        files = [(f"code {name}", digest[:16]) for name, digest, _ in self.record.get("files", ())]
        return {"class": name_of(self.record)} | dict(files)

    def program(self, command: str) -> Program:
        """Returns what starts the runs of `command`; raises InputError if nothing can start them with the class."""
        if self.started is None:
            reason = f"its runs are processes of their own, which can't be started with {name_of(self.record)}"
            fix = "start it from a Python file that ends in main(pretraining=...), without other arguments"
            raise InputError(f"{command}: {reason}; {fix}.")
        return self.started

    def refuse(self, command: str) -> None:
        """Raises InputError for a command that trains, but not by `Pretraining`."""
        if self.record:
            reason = f"fine-tunes without {name_of(self.record)}, a class for pretraining"
            raise InputError(f"{command} {reason}; start it with python -m mlm {command}.")


MLM = Entry()


def open_entry(pretraining: Any, argv: list[str] | None) -> Entry:
    """Returns the entry of `main(argv, pretraining=...)`; raises InputError for what is no class for pretraining."""
    if pretraining is None:
        return MLM
    module = sys.modules.get("mlm.tasks.pretraining")
    base = getattr(module, "Pretraining", None)
    if not (isinstance(pretraining, type) and base and issubclass(pretraining, base)):
        what = f"a {type(pretraining).__name__}" if not isinstance(pretraining, type) else "no subclass of it"
        name = getattr(pretraining, "__qualname__", type(pretraining).__name__)
        raise InputError(
            f"main(pretraining=...) takes a subclass of mlm.tasks.pretraining.Pretraining; {name} is {what}."
        )
    entry = Entry(pretraining, describe(pretraining), None)
    script = sys.modules["__main__"]
    file, spec = Path(getattr(script, "__file__", None) or "").absolute(), getattr(script, "__spec__", None)
    if not file.is_file() or (argv is not None and argv != sys.argv[1:]):
        return entry
    program = Program((str(file),), str(file), "", entry.identity)
    if spec is not None:  # python -m NAME
        folder = str(file.parents[spec.name.count(".")])
        program = program._replace(command=("-m", spec.name.removesuffix(".__main__")), folder=folder)
    return entry._replace(started=program)


def check_expected(entry: Entry, host: str) -> None:
    """Raises InputError if this is a run of a sweep that has another class."""
    expected = os.environ.get(EXPECTED, "")
    if expected and expected != entry.identity:
        difference = f"has {entry.identity or STOCK} where the command that started this run has {expected}"
        fix = "make the files alike on all hosts, don't edit them while it runs, and start it again"
        raise InputError(f"{host} {difference}; {fix}.")


def describe(cls: type) -> dict[str, Any]:
    """Returns what a checkpoint records of a class; {} if it is mlm's own."""
    user_classes = [base for base in cls.__mro__ if not _is_known(base.__module__)]
    if not user_classes:
        return {}
    known_classes = [base for base in cls.__mro__ if base not in user_classes and base is not object]
    inherited = {name for base in known_classes for name in vars(base)}
    defined = {name for base in user_classes for name, value in vars(base).items() if hasattr(value, "__get__")}
    overrides = sorted(name for name in defined & inherited if name == "__init__" or not name.startswith("__"))
    files = sorted(_hashes(path) for path in source_files(dict.fromkeys(base.__module__ for base in user_classes)))
    return {"name": _name(cls), "overrides": overrides, "files": files}


def _is_known(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "mlm" or (top in sys.stdlib_module_names and top != "__main__")


def _name(cls: type) -> str:
    """Returns FILE.CLASS, whether the file was started or imported."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__ != "__main__" or file is None:
        return f"{cls.__module__.rpartition('.')[2]}.{cls.__qualname__}"
    path = Path(file).resolve()  # whatever link to it was started
    return f"{path.parent.name if path.stem == '__main__' else path.stem}.{cls.__qualname__}"


def source_files(modules: dict[str, None]) -> list[Path]:
    """Returns the files of some modules, and of all that they import, except for installed packages and mlm's own."""
    files: dict[Path, None] = {}
    todo = [(name, _file(name)) for name in modules]
    while todo:
        name, path = todo.pop()
        if path is None or path in files:
            continue
        files[path] = None
        todo += [(other, file) for other in _imports(name, path) if (file := _file(other)) and not _is_installed(file)]
    return list(files)


def _file(module: str) -> Path | None:
    """Returns the file of a module, imported or not; None if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    parent = module.rpartition(".")[0]
    if file is None and module not in sys.modules and (not parent or parent in sys.modules):
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            file = getattr(importlib.util.find_spec(module), "origin", None)
    path = Path(file).resolve() if file else None
    return path if path and path.is_file() else None


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in (PACKAGE.resolve(), *INSTALLED)) or bool(
        {"site-packages", "dist-packages"} & set(path.parts)
    )


def _imports(module: str, path: Path) -> Iterator[str]:
    """Yields the names of modules that a file imports, wherever in it."""
    package = getattr(sys.modules.get(module), "__package__", None) or module.rpartition(".")[0]
    for node in ast.walk(_parse(path) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parts, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names if not _is_known(base))]
        else:
            continue
        for name in names:
            yield from (name[:end] for end in (*(i for i, char in enumerate(name) if char == "."), len(name)))


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _hashes(path: Path) -> list[str]:
    """Returns [name, SHA-256 of a file, SHA-256 of its code without comments, docstrings and layout]."""
    content, tree = path.read_bytes(), _parse(path)
    digest = hashlib.sha256(content).hexdigest()
    if tree is None:
        return [path.name, digest, digest]
    for node in ast.walk(tree):
        first = getattr(node, "body", None)
        first = first[0] if isinstance(first, list) and first else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body[0] = ast.Pass()
    return [path.name, digest, hashlib.sha256(ast.unparse(tree).encode()).hexdigest()]


def name_of(record: Record) -> str:
    """Returns the name of a recorded class."""
    return record["name"] if record else STOCK


def changes_evaluation(record: Record) -> bool:
    """Returns whether a class may change what a model with given parameters computes."""
    return not TRAINING.issuperset(record.get("overrides", ()))


def _label(record: Record) -> str:
    files = (f"{name}, SHA-256 {digest[:12]}" for name, digest, _ in record.get("files", ()))
    return name_of(record) + (f" ({'; '.join(files)})" if record.get("files") else "")


def summary(record: Record) -> str:
    """Returns a class, its files and what it overrides, for the report and the card of a run; "" of mlm's own."""
    names = ", ".join(record.get("overrides", ())) or "nothing"
    return f"{_label(record)}, which overrides {names}" if record else ""


def _start(record: Record) -> str:
    """Returns how to start a command with a recorded class."""
    return "start the command from the file of that class" if record else "start it with python -m mlm"


def changed_files(saved: Record, now: Record) -> tuple[list[str], bool]:
    """Returns (the files of a class that are not the same, whether in their code)."""
    old, new = saved.get("files", ()), now.get("files", ())
    changed = {(name, digest) for name, digest, _ in old} ^ {(name, digest) for name, digest, _ in new}
    differ = {(name, code) for name, _, code in old} != {(name, code) for name, _, code in new}
    return sorted({name for name, _ in changed}), differ


def changes(saved: Record, now: Record) -> list[str]:
    """Returns a line if a branch has another class than the run that it starts from, or another code of it."""
    differ = name_of(saved) != name_of(now) or changed_files(saved, now)[1]
    return [f"class: {_label(saved)} -> {_label(now)}"] if differ else []


def check_resume(saved: Record, now: Record, where: str, branch: str) -> str:
    """Returns a remark, or ""; raises InputError if a run of the class `saved` can't be resumed by `now`."""
    if name_of(saved) != name_of(now):
        what = f"{where} was made by {_label(saved)}, and this command has {_label(now)}"
        raise InputError(f"{what}; {_start(saved)}, or use another --workdir.")
    files, code = changed_files(saved, now)
    if not files:
        return ""
    names = ", ".join(files)
    if not code:
        return f"{names}: changed since {where} was saved, but only in comments, docstrings or layout."
    what = f"{where} was made by {_label(saved)}, and the code of {names} has changed since: now {_label(now)}"
    fix = f"put the old code back, or go on with the new code in another --workdir: --config.train.branch_from={branch}"
    raise InputError(f"{what}; {fix}.")


def check_use(saved: Record, now: Record, where: str, *, command: str, stock_network: bool) -> str:
    """Returns a remark, or ""; raises InputError if a model of the class `saved` would compute something else here.

    With `stock_network` the command computes as mlm's own class does, whatever class it was started with.
    """
    differ = name_of(saved) != name_of(now) or changed_files(saved, now)[1]
    if not changes_evaluation(saved) and (stock_network or not changes_evaluation(now)):
        return f"{where} was trained by {name_of(saved)}, which changes nothing here." if saved and differ else ""
    if differ:
        what = f"{where} was trained by {_label(saved)}, and this command has {_label(now)}: {command} would compute"
        raise InputError(f"{what} something else; {_start(saved)}.")
    if not stock_network:
        return ""
    names = ", ".join(sorted(set(saved["overrides"]) - TRAINING - {"make_model"}))
    if not names:
        return ""
    return (
        f"{where}: {name_of(saved)} overrides {names}, which {command} does without: it computes as transformers does."
    )
