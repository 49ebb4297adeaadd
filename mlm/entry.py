"""What a command was started from: `python -m mlm`, or a researcher's file with a subclass of `Pretraining`.

A checkpoint records the class: its name, the methods that it overrides, and hashes of its source files, which are those
of its bases and all that they import, except for installed packages. A resumed run must compute the same, so it needs
the same class of the same source. Comments, docstrings and layout may change: the hashes leave them out. Any other
change is refused, since nobody can know what it changes; a branch (train.branch_from) goes on with it, and says so.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlm.errors import InputError

PACKAGE = Path(__file__).parent
INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
EXPECTED = "MLM_CLASS"  # variable of a run of a sweep: the class that it must have
FINE_TUNING = {"classify", "glue"}  # commands
STOCK = "mlm's own Pretraining"
# Methods that decide what a model with given parameters computes, or how it is evaluated; all others only train it.
EVALUATION = {"__init__", "open", "make_model", "make_attention", "_attention", "make_eval_masking", "evaluate"}
SCOPES = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef  # that may have a docstring
Record = Mapping[str, Any]  # "name", "overrides", "files": [[name, SHA-256 of its code], ...]; {} of mlm's own


class Program(NamedTuple):
    """How to start a command again, here or on another host."""

    command: tuple[str, ...] = ("-m", "mlm")  # after the interpreter
    file: str = ""  # of a researcher, that must be there
    folder: str = ""  # that the file's imports need on the path
    identity: str = ""  # of the class; "" of mlm's own

    def environment(self) -> dict[str, str]:
        """Returns the environment to start it in."""
        imports = [self.folder, str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, imports)), EXPECTED: self.identity}


class Entry(NamedTuple):
    """What a command was started from."""

    pretraining: type | None = None  # a subclass of Pretraining; None: mlm's own
    record: Record = types.MappingProxyType({})
    started: Program | None = Program()  # None: nothing can start it again

    @property
    def identity(self) -> str:
        """The class with its files; "" of mlm's own."""
        return label(self.record) if self.record else ""

    def fingerprint(self) -> dict[str, str]:
        """Returns {readable name: value} of what all hosts of a run must have in common."""
        return {"class": name_of(self.record)} | {f"code {name}": code for name, code in self.record.get("files", ())}

    def program(self, command: str) -> Program:
        """Returns what starts the runs of `command`; raises InputError if nothing can start them with the class."""
        if self.started is None:
            raise InputError(
                f"{command}: its runs are processes of their own, which can't be started with {name_of(self.record)}; "
                "start it from a Python file that ends in main(pretraining=...), without other arguments."
            )
        return self.started

    def check_command(self, *commands: str) -> None:
        """Raises InputError for a command, or one that it runs, that trains, but not by `Pretraining`."""
        for command in FINE_TUNING.intersection(commands) if self.record else ():
            raise InputError(
                f"{command} fine-tunes without {name_of(self.record)}, a class for pretraining; start it with "
                f"python -m mlm {command}."
            )


MLM = Entry()
_parsed: dict[str, tuple[Any, tuple[str, list[str]]]] = {}  # of a module: what was loaded, what `_parse` returned


def open_entry(pretraining: Any, argv: list[str] | None) -> Entry:
    """Returns the entry of `main(argv, pretraining=...)`; raises InputError for what is no class for pretraining."""
    if pretraining is None:
        return MLM
    base = getattr(sys.modules.get("mlm.tasks.pretraining"), "Pretraining", None)
    if not (isinstance(pretraining, type) and base and issubclass(pretraining, base)):
        raise InputError(
            f"main(pretraining={pretraining!r:.100}): must be a subclass of mlm.tasks.pretraining.Pretraining."
        )
    if without := [cls for cls in _user_classes(pretraining) if not _file(cls.__module__)]:
        what = f"{without[0].__qualname__} stands in no file, so that no checkpoint could record its code"
        raise InputError(f"main(pretraining=...): {what}; write it to a file, and start that or import it from there.")
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
        raise InputError(
            f"{host} has {entry.identity or STOCK} where the command that started this run has {expected}; make the "
            "files alike on all hosts, don't edit them while it runs, and start it again."
        )


def _user_classes(cls: type) -> list[type]:
    """Returns a class and its bases, without mlm's and Python's own."""

    def is_known(base: type) -> bool:
        top = base.__module__.partition(".")[0]
        return top == "mlm" or (top in sys.stdlib_module_names and top != "__main__")

    return [base for base in cls.__mro__ if not is_known(base)]


def describe(cls: type) -> dict[str, Any]:
    """Returns what a checkpoint records of a class; {} if it is mlm's own."""
    user_classes = _user_classes(cls)
    if not user_classes:
        return {}
    known = [base for base in cls.__mro__ if base not in user_classes and base is not object]
    inherited = {name for base in known for name in vars(base)}
    defined = {name for base in user_classes for name, value in vars(base).items() if hasattr(value, "__get__")}
    overrides = sorted(name for name in defined & inherited if name == "__init__" or not name.startswith("__"))
    module = cls.__module__.rpartition(".")[2]
    if module == "__main__" and (path := _file("__main__")):  # named alike whether it was started or imported
        module = path.parent.name if path.stem == "__main__" else path.stem
    files = _hashes([base.__module__ for base in user_classes])
    return {"name": f"{module}.{cls.__qualname__}", "overrides": overrides, "files": files}


def _hashes(modules: list[str]) -> list[list[str]]:
    """Returns [file name, SHA-256 of its code] of modules and of all that they import but installed packages.

    Of a module that is imported, its code is that of its first time here: edited afterwards, the file is not what runs.
    """
    hashes: dict[Path, str] = {}
    todo = [(name, _file(name)) for name in modules]
    for name, path in todo:  # which grows
        if path and path not in hashes:
            module = sys.modules.get(name)
            loaded = getattr(module, "__spec__", None) or module  # another one once it is imported, or reloaded
            if loaded is None or name not in _parsed or _parsed[name][0] is not loaded:
                _parsed[name] = loaded, _parse(name, path.read_bytes())
            hashes[path], imported = _parsed[name][1]
            files = [(module, _file(module)) for module in imported]
            todo += [(module, file) for module, file in files if file and not _is_installed(file)]
    return sorted([path.name, digest] for path, digest in hashes.items())


def _is_installed(path: Path) -> bool:
    """Returns whether a file is mlm's or of an installed package."""
    folders = (PACKAGE.resolve(), *INSTALLED)
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(map(path.is_relative_to, folders))


@functools.cache
def _parse(module: str, code: bytes) -> tuple[str, list[str]]:
    """Returns the SHA-256 of a module's code without comments and docstrings, and the modules that it may import.

    Those are all that it imports, wherever in it, and the packages that hold them.
    """
    names = []
    package = getattr(sys.modules.get(module), "__package__", None) or module.rpartition(".")[0]
    with contextlib.suppress(SyntaxError, ValueError):  # an extension module is hashed as it is
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
            elif isinstance(node, SCOPES) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Pass()
        code = ast.unparse(tree).encode()
    parts = [name.split(".") for name in names]
    imported = [".".join(name[:end]) for name in parts for end in range(1, len(name) + 1)]
    return hashlib.sha256(code).hexdigest(), imported


def _file(module: str) -> Path | None:
    """Returns the file of a module, imported or not; None if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    parent = module.rpartition(".")[0]
    if file is None and module not in sys.modules and (not parent or parent in sys.modules):
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            file = getattr(importlib.util.find_spec(module), "origin", None)
    path = Path(file).resolve() if file else None
    return path if path and path.is_file() else None


def name_of(record: Record) -> str:
    """Returns the name of a recorded class."""
    return record["name"] if record else STOCK


def label(record: Record) -> str:
    """Returns the name of a recorded class, with its files."""
    files = "; ".join(f"{name}, code {code[:12]}" for name, code in record.get("files", ()))
    return f"{name_of(record)} ({files})" if files else name_of(record)


def changes_evaluation(record: Record) -> bool:
    """Returns whether a class may change what a model with given parameters computes."""
    return not EVALUATION.isdisjoint(record.get("overrides", ()))


def summary(record: Record) -> str:
    """Returns a class, its files and what it overrides, for the report and the card of a run; "" of mlm's own."""
    return f"{label(record)}, which overrides {', '.join(record['overrides']) or 'nothing'}" if record else ""


def is_same(saved: Record, now: Record) -> bool:
    """Returns whether two records are of the same class with the same code."""
    return name_of(saved) == name_of(now) and saved.get("files") == now.get("files")


def changes(saved: Record, now: Record) -> list[str]:
    """Returns a line if a branch has another class than the run that it starts from, or another code of it."""
    return [] if is_same(saved, now) else [f"class: {label(saved)} -> {label(now)}"]


def check_resume(saved: Record, now: Record, where: str, branch: str) -> None:
    """Raises InputError if a run of the class `saved` can't be resumed by `now`."""
    if not is_same(saved, now):
        raise InputError(
            f"{where} was made by {label(saved)}, and this command has {label(now)}; start it from that code, or go on "
            f"with this one in another --workdir: --config.train.branch_from={branch}."
        )


def check_use(saved: Record, now: Record, where: str, *, command: str, stock_network: bool) -> str:
    """Returns a remark, or ""; raises InputError if a model of the class `saved` would compute something else here.

    With `stock_network` the command computes as mlm's own class does, whatever class it was started with.
    """
    if not changes_evaluation(saved) and (stock_network or not changes_evaluation(now)):
        differs = saved and not is_same(saved, now)
        without = "metrics" in saved.get("overrides", ()) and not stock_network
        what = f"whose metrics {command} leaves out" if without else "which changes nothing here"
        return f"{where} was trained by {name_of(saved)}, {what}." if differs else ""
    if not is_same(saved, now):
        fix = "start the command from the file of that class" if saved else "start it with python -m mlm"
        raise InputError(
            f"{where} was trained by {label(saved)}, and this command has {label(now)}: {command} would compute "
            f"something else; {fix}."
        )
    left_out = ", ".join(sorted(EVALUATION.intersection(saved["overrides"]) - {"make_model"}))
    if not stock_network or not left_out:
        return ""
    network = "the network of its make_model" if "make_model" in saved["overrides"] else "mlm's own network"
    return f"{where}: {name_of(saved)} overrides {left_out}, which {command} does without; it computes {network}."
