"""`average`: the mean of several checkpoints, as a checkpoint in a workdir of its own."""

import argparse

from mlm.commands import common
from mlm.errors import InputError
from mlm.text import say
from mlm.workdir import Workdir, lock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="+",
        type=common.path,
        metavar="WORKDIR[@STEPS]",
        help="checkpoints: WORKDIR@A..B (all that are there), WORKDIR@A, or WORKDIR: its newest, or best",
    )
    common.add_workdir_flag(parser, "new folder for the mean, local or gs://")
    parser.add_argument(
        "--last", type=int, default=0, metavar="K", help="the newest K of each WORKDIR"
    )
    parser.add_argument(
        "--decay",
        type=float,
        default=1.0,
        metavar="D",
        help="weight of a checkpoint, as a share of that of the one after it; default: 1, the plain mean",
    )


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if not 0 < args.decay <= 1:
        raise InputError(f"--decay={args.decay}: must be a number above 0, and 1 at most.")
    from mlm.training import average

    new = Workdir(args.workdir, create=None)
    chosen, metas = average.choose(args.names, new, last=args.last, decay=args.decay)
    with lock(new.root):
        average.write_mean(new, chosen, metas, decay=args.decay)
    say("average of " + ", ".join(f"{source.root}@{step}" for source, step in chosen))
    print(new.root)
