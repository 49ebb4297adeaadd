"""`bench`: time step, shards and batches beside the baselines, in one run."""

from __future__ import annotations

import argparse

from mlm.cluster import detect
from mlm.commands import common
from mlm.workdir import Workdir

PARTS = """what to measure: the step, its matrix products one by one, writing shards (with the tokenizer of the
workdir), reading batches and the training loop (both with the shards of the workdir); default: step"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parts = ["step", "products", "shards", "batches", "loop"]
    parser.add_argument("--parts", nargs="+", default=["step"], choices=parts, help=PARTS)
    parser.add_argument("--torch", default="", metavar="PYTHON", help="Python with PyTorch, to time its step too")
    seconds = "approximate time of each comparison; default: 20"
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help=seconds)
    megabytes = "text to write as shards; default: 20"
    parser.add_argument("--megabytes", type=float, default=20.0, metavar="MB", help=megabytes)
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
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

    flags = {"seconds": args.seconds, "as_json": args.json, "megabytes": args.megabytes, "torch_python": args.torch}
    bench.run(config, args.parts, manifest, tokenizer_folder=folder, **flags)
