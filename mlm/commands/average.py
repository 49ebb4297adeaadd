"""`average`: the mean of several checkpoints, as a checkpoint in a workdir of its own."""

import argparse

from mlm.commands import common
from mlm.errors import InputError
from mlm.text import say
from mlm.workdir import Workdir, lock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "checkpoints: WORKDIR@A..B (all that are there), WORKDIR@A,B,C, or WORKDIR: its newest, or best"
    parser.add_argument("names", nargs="+", type=common.path, metavar="WORKDIR[@STEPS]", help=names)
    new = "new folder for the mean, local or gs://"
    parser.add_argument("--workdir", type=common.path, default="", metavar="DIR", help=new)
    parser.add_argument(
        "--last", type=int, default=0, metavar="K", help="the newest K of each WORKDIR"
    )
    decay = (
        "weight of a checkpoint, as a share of that of the one after it; default: 1, the plain mean"
    )
    parser.add_argument("--decay", type=float, default=1.0, metavar="D", help=decay)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.last < 0:
        raise InputError(f"--last={args.last}: must not be negative.")
    if not 0 < args.decay <= 1:
        raise InputError(f"--decay={args.decay}: must be a number above 0, and 1 at most.")
    from mlm.training import average

    new = Workdir(args.workdir, create=None)
    chosen, metas = average.choose(args.names, new, last=args.last, decay=args.decay)
    with lock(Workdir(args.workdir).root):
        average.write_mean(new, chosen, metas, decay=args.decay)
    say("average of " + ", ".join(f"{source.root}@{step}" for source, step in chosen))
    print(new.root)
