"""`sweep`: a command over a grid of config keys, seeds, starting points or flags, and its scores in one table."""

import argparse
import importlib
import itertools
from typing import NoReturn

from mlm import config as configs
from mlm.commands import common
from mlm.doctor import preflight
from mlm.errors import InputError, StopError
from mlm.paths import canonical
from mlm.pretrained import locate
from mlm.sweep import grid, runs
from mlm.text import say
from mlm.workdir import Workdir, lock

COMMANDS = ("train", "run", "classify", "evaluate")
# of the commands, that can't be varied
FIXED_FLAGS = {
    "workdir",
    "coordinator",
    "processes",
    "process_id",
}


class _Flags(argparse.ArgumentParser):
    """The flags of a command; a mistake is an InputError."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; see `python -m mlm {self.prog} --help`.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A run and its output.txt are in WORKDIR/NAME; those of `sweep evaluate`, which scores on the data of "
        "--workdir, in WORKDIR/sweep/NAME."
    )
    parser.add_argument("command", metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    common.add_config_flags(parser, required=False)
    vary = (
        "config keys, `config`, or flags of COMMAND, each with values: train.seed=0,1,2 train.init_from=A,B@1000 "
        "step=1000,2000; a comma within brackets or quotes belongs to a value"
    )
    parser.add_argument(
        "--vary", nargs="+", action="extend", required=True, metavar="KEY=V1,V2", help=vary
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="score of the table; default: the one that chooses the best checkpoint",
    )


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.command not in COMMANDS:
        raise InputError(
            f"{args.command}: can't be swept; the commands that can are {', '.join(COMMANDS)}."
        )
    folder = args.workdir
    if args.command == "evaluate":
        folder = str(Workdir(args.workdir, create=False).root / "sweep")
    trials = _plan(args, overrides, canonical(folder))
    workdir = Workdir(folder)
    with lock(workdir.root):
        from mlm.sweep import table  # the report, and numpy

        outcomes = runs.run_all(trials, workdir.root)
        table.write(workdir.root, outcomes, args.metric)
    failed = [outcome for outcome in outcomes if outcome.code]
    for outcome in failed:
        say(f"{outcome.trial.name}: exit code {outcome.code}: {outcome.last_line}")
    if failed:
        raise StopError(
            f"{len(failed)} of {len(trials)} runs failed; the output of the first one is in "
            f"{failed[0].trial.folder}/{runs.OUTPUT}; run the same command to repeat them.",
            failed[0].code,
        )


def _plan(args: argparse.Namespace, overrides: list[str], root: str) -> list[runs.Trial]:
    """Returns the runs in the order of the grid, the config and the flags of each one checked.

    Raises InputError.
    """
    varied = grid.read(args.vary)
    flags = _Flags(args.command, allow_abbrev=False)
    importlib.import_module(f"mlm.commands.{args.command}").add_arguments(flags)
    fixed = [f"--config={args.config}"] if args.config else []
    fixed += [f"--config.{override}" for override in overrides]
    _check_keys(varied, args.command, flags, fixed)
    evaluates = args.command == "evaluate"
    trials: dict[str, runs.Trial] = {}
    for texts in itertools.product(*varied.values()):
        arguments = [
            *fixed,
            *(f"{_flag(key)}={text}" for key, text in zip(varied, texts, strict=True)),
        ]
        others, run_overrides = configs.split_overrides([*arguments, f"--workdir={args.workdir}"])
        parsed = flags.parse_args(others)
        command = [args.command, *arguments]
        classifies = args.command == "classify"
        if evaluates:
            model = common.named_model(parsed) or args.workdir
            classifies = locate.is_classifier(model)
            newest = model if classifies else locate.at_newest_step(model)
            if (
                newest != model
            ):  # trained further, it is another model, whose scores are not there yet
                command.append(f"--step={locate.split_step(newest)[1]}")
        task = configs.CLASSIFICATION if classifies else configs.PRETRAINING
        flat = configs.flatten(common.read_config(parsed, run_overrides, task=task))
        values = {
            key: flat[key] if "." in key else getattr(parsed, key.replace("-", "_"))
            for key in varied
        }
        values = {
            key: " ".join(value) if isinstance(value, list) else value
            for key, value in values.items()
        }
        name = grid.name(values)
        if name in trials:  # however its values are spelled
            raise InputError(f"--vary: asks for the run {name} twice; name each value once.")
        folder = f"{root}/{name}"
        parsed.workdir = args.workdir if evaluates else folder
        command.append(f"--workdir={parsed.workdir}")
        config = common.read_config(parsed, run_overrides, task=task, starts=not evaluates)
        if (
            trials
            and config.hub.name
            and not evaluates
            and {"hub.name", "config"}.isdisjoint(varied)
        ):
            raise InputError(
                f"config.hub.name = {config.hub.name}: several runs would push to it; vary it, too."
            )
        preflight.refuse(
            preflight.Case(args.command, config, Workdir(parsed.workdir, create=None), parsed)
        )
        trials[name] = runs.Trial(name, folder, tuple(command), values, args.entry)
    if not evaluates and not args.entry.record:  # others have scores of their own
        from mlm.sweep import table

        table.check_name(args.metric, config.classify.metric)
    return list(trials.values())


def _check_keys(
    varied: dict[str, list[str]], command: str, flags: argparse.ArgumentParser, fixed: list[str]
) -> None:
    """Raises InputError for a varied key that is none, or that is fixed for all runs."""
    variable = {action.dest for action in flags._actions if action.nargs != 0} - FIXED_FLAGS
    known = variable | configs.flatten(configs.load(str(configs.BASE), [])).keys()
    for key in varied:
        # The config of each run has to have those
        if key.replace("-", "_") not in known and not configs.is_mine(key):
            advice = configs.suggestion(key, known) or "; configs/base.py lists the keys."
            raise InputError(
                f"--vary {key}: is no config key and no flag that {command} can vary{advice}"
            )
        if any(flag.startswith(f"{_flag(key)}=") for flag in fixed):
            raise InputError(
                f"--vary {key}: {_flag(key)} sets it for all runs; remove one of the two."
            )


def _flag(key: str) -> str:
    return f"--config.{key}" if "." in key else f"--{key}"
