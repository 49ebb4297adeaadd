"""`bench`: time step, shards and batches, and the same of the stock programs, in one run."""

from __future__ import annotations

import argparse

from mlm.cluster import detect
from mlm.commands import common
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["step"],
        choices=["step", "products", "shards", "batches", "loop"],
        help="what to measure; products: the matrix products of the step, each alone; shards uses the tokenizer of "
        "the workdir, batches and loop its shards",
    )
    parser.add_argument(
        "--torch", default="", metavar="PYTHON", help="an interpreter with PyTorch, whose step to measure too"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each comparison, about")
    parser.add_argument("--megabytes", type=float, default=20.0, help="of text that the part shards writes")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Prints the measurements."""
    detect.refuse_part_of_a_slice()
    config, manifest, folder = common.read_config(args, overrides), None, ""
    if set(args.parts) - {"step", "products"}:
        from mlm.data import tokenizer

        workdir = Workdir(args.workdir, create=False)
        if {"batches", "loop"} & set(args.parts):
            manifest = common.open_data(config, workdir)
        if "shards" in args.parts:
            folder = str(workdir.tokenizer)
            tokenizer.load_fast(folder)  # refuses a missing one before anything is measured
    from mlm.bench import bench

    bench.run(
        config,
        args.parts,
        manifest,
        seconds=args.seconds,
        as_json=args.json,
        tokenizer_folder=folder,
        megabytes=args.megabytes,
        torch_python=args.torch,
    )
