"""`report`: curves and a table of a run as one HTML page, or several runs side by side."""

import argparse

from mlm.commands import common
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_workdir_flag(parser)
    parser.add_argument(
        "--compare",
        nargs="+",
        type=common.path,
        default=[],
        metavar="DIR",
        help="other runs to compare this one with, on one page",
    )


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    workdir = Workdir(args.workdir, create=False)
    from mlm.report import report

    if args.compare:
        print(
            report.compare([workdir, *(Workdir(folder, create=False) for folder in args.compare)])
        )
    else:
        report.write(workdir)
        print(workdir.report)
