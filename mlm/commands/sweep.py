"""`sweep`: a command over a grid of config keys, seeds, starting points or flags, and its scores in one table."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import itertools
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mlm import config as configs
from mlm.commands import common
from mlm.errors import InputError, StopError
from mlm.paths import UPath
from mlm.pretrained import locate
from mlm.sweep import grid
from mlm.workdir import Workdir, lock

if TYPE_CHECKING:
    from mlm.sweep.runs import Outcome

COMMANDS = ("train", "run", "classify", "evaluate")
MOST = 100  # runs that start without --yes
OWN = ("workdir", "coordinator", "processes", "process_id")  # flags of the commands that can't be varied


class Planned(NamedTuple):
    """A run of the grid that has been checked."""

    values: dict[str, Any]  # of the varied keys
    arguments: tuple[str, ...]  # of the command, without its --workdir
    config: dict[str, Any]  # flattened


class _Flags(argparse.ArgumentParser):
    """The flags of a command; what they can't be is an InputError."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; see `python -m mlm {self.prog} --help`.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = "train, run, classify or evaluate; each run's folder is WORKDIR/NAME, which holds its output.txt, too"
    parser.add_argument("command", metavar="COMMAND", help=commands)
    common.add_config_flags(parser, required=False)
    vary = (
        "config keys, `config`, or flags of the command, each with its values, such as train.seed=0,1,2 "
        "train.init_from=A,B@1000 step=1000,2000; commas within brackets or quotes are of a value"
    )
    parser.add_argument("--vary", nargs="+", action="extend", required=True, metavar="KEY=V1,V2", help=vary)
    metric = "score of the table; default: accuracy of a classifier, otherwise loss"
    parser.add_argument("--metric", default="", metavar="NAME", help=metric)
    parser.add_argument("--yes", action="store_true", help=f"start more than {MOST} runs")
    common.add_engine_flags(parser, "What does the runs, one at a time each; by default this machine.")
    parser.epilog = "`sweep evaluate` scores models on the data of --workdir and writes to WORKDIR/sweep."


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.command not in COMMANDS:
        raise InputError(f"sweep {args.command}: can't be swept; name {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}.")
    evaluates = args.command == "evaluate"
    planned = _plan(args, overrides)
    root = Workdir(args.workdir, create=not evaluates).root
    if evaluates:
        root = Workdir(str(root / "sweep")).root
    with lock(root):
        outcomes = _run_all(args, planned, root)
        from mlm.sweep import table

        cases = [table.Case(each.values, each.config, outcome) for each, outcome in zip(planned, outcomes, strict=True)]
        table.write(root, args.command, cases, args.metric)
    _report_failures(outcomes)


def _plan(args: argparse.Namespace, overrides: list[str]) -> list[Planned]:
    """Returns the runs in the order of the grid, the config and the flags of each one checked; raises InputError."""
    varied = grid.read(args.vary)
    count = math.prod(map(len, varied.values()))
    if count > MOST and not args.yes:
        raise InputError(f"--vary: asks for {count:,} runs; add --yes to start more than {MOST}.")
    flags = _Flags(args.command, allow_abbrev=False)
    importlib.import_module(f"mlm.commands.{args.command}").add_arguments(flags)
    fixed = [f"--config={args.config}"] if args.config else []
    fixed += [f"--config.{each}" for each in overrides]
    _check_keys(varied, flags, {each.partition("=")[0] for each in fixed})
    planned, found = [], {key: {} for key in varied}
    for texts in itertools.product(*varied.values()):
        arguments = (*fixed, *(f"{_flag(key)}={text}" for key, text in zip(varied, texts, strict=True)))
        others, own = configs.split_overrides([*arguments, f"--workdir={args.workdir}"])
        parsed = flags.parse_args(others)
        config = configs.flatten(_read_config(parsed, own, args.command))
        values = {}
        for key, text in zip(varied, texts, strict=True):
            value = config[key] if "." in key else getattr(parsed, key.replace("-", "_"))
            values[key] = found[key][text] = text if isinstance(value, list) else value
        planned.append(Planned(values, arguments, config))
    for key, values in found.items():
        grid.check_distinct(key, list(values.values()))
    return planned


def _flag(key: str) -> str:
    return f"--config.{key}" if "." in key else f"--{key}"


def _check_keys(varied: dict[str, list[str]], flags: _Flags, fixed: set[str]) -> None:
    own = {action.dest for action in flags._actions if action.nargs != 0} - {*OWN}
    known = own | configs.flatten(configs.load(str(configs.BASE), [])).keys()
    for key in varied:
        if key.replace("-", "_") not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "configs/base.py lists the keys."
            raise InputError(f"--vary {key}: is no config key and no flag that {flags.prog} can vary; {hint}")
        if _flag(key) in fixed:
            raise InputError(f"--vary {key}: {_flag(key)} sets it for all runs; remove one of the two.")


def _read_config(args: argparse.Namespace, overrides: list[str], command: str) -> configs.ConfigDict:
    classifies = command == "classify"
    if command == "evaluate":
        classifies = locate.is_classifier(common.named_model(args) or Workdir(args.workdir, create=False))
    task = configs.CLASSIFICATION if classifies else configs.PRETRAINING
    return common.read_config(args, overrides, task=task)


def _run_all(args: argparse.Namespace, planned: list[Planned], root: UPath) -> list[Outcome]:
    from mlm.cluster import engine
    from mlm.sweep import runs

    names = grid.names([each.values for each in planned])
    folders = [str(root / name) for name in names]
    own = [args.workdir if args.command == "evaluate" else folder for folder in folders]
    todo = [
        runs.Run(name, folder, (args.command, *each.arguments, f"--workdir={workdir}"))
        for name, folder, workdir, each in zip(names, folders, own, planned, strict=True)
    ]
    opened = contextlib.nullcontext()
    if args.engine:
        certificates = args.engine_certificates or str(root / "hosts" / "certificates")
        flags = {"timeout": args.engine_timeout, "insecure": args.engine_insecure, "certificates": certificates}
        opened = engine.open_engine(args.engine, **flags)
    with opened as found:
        return runs.run_all(todo, root=root, engine=found)


def _report_failures(outcomes: list[Outcome]) -> None:
    """Names the runs that failed; raises StopError with the code of the first one."""
    failed = [outcome for outcome in outcomes if outcome.code]
    for each in failed:
        print(f"{each.run.name}: exit code {each.code}: {each.last_line}", file=sys.stderr)
    if failed:
        first = failed[0].run
        error = StopError(
            f"{len(failed)} of {len(outcomes)} runs failed, first {first.name}: see {first.folder}/output.txt, "
            "and run the same command to repeat them."
        )
        error.code = failed[0].code
        raise error
