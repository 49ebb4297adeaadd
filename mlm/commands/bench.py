"""`bench`: time step, shards and batches beside the baselines, interleaved, in one run."""

import argparse
import json
import os
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.cluster import detect
from mlm.commands import common
from mlm.data import tokenizer
from mlm.data.manifest import Manifest
from mlm.errors import InputError
from mlm.text import show
from mlm.workdir import Workdir

PARTS = "what to measure; shards takes the workdir's tokenizer, batches and loop take its shards; default: step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parts = ["step", "shards", "batches", "loop"]
    parser.add_argument("--parts", nargs="+", default=["step"], choices=parts, help=PARTS)
    parser.add_argument("--torch", default="", metavar="PYTHON", help="Python with PyTorch, to time its step too")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each comparison; default: 20")
    parser.add_argument("--megabytes", type=float, default=20.0, metavar="MB", help="text for shards; default: 20")
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    detect.refuse_part_of_a_slice()
    config, manifest, folder = common.read_config(args, overrides), None, ""
    if set(args.parts) - {"step"}:
        workdir = Workdir(args.workdir, create=False)
        if {"batches", "loop"} & set(args.parts):
            manifest = common.open_data(config, workdir)
        if "shards" in args.parts:
            folder = str(workdir.tokenizer)
            tokenizer.load_fast(folder)  # refuses a missing one before anything is measured
    from mlm.bench import interleaved

    found = measure(args, config, manifest, folder)
    show(*([json.dumps(found)] if args.json else interleaved.render(found)))


def measure(args: argparse.Namespace, config: ConfigDict, manifest: Manifest | None, folder: str) -> dict[str, Any]:
    """Returns the measurements by part, as --json prints them."""
    if args.torch:
        if "step" not in args.parts:
            raise InputError("--torch: is for the part step; add it to --parts.")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves PyTorch memory of the GPU
    from mlm.bench import inputs, steps

    config = configs.replace(config, {"data.batch_stages": ()})  # all of data.global_batch rows

    compare = {
        "step": lambda: steps.compare_steps(config, args.seconds, args.torch),
        "shards": lambda: inputs.compare_shards(config, folder, args.megabytes, args.seconds),
        "batches": lambda: inputs.compare_batches(config, manifest, args.seconds),
        "loop": lambda: inputs.compare_loop(config, manifest, args.seconds),
    }
    return {part: compare[part]() for part in compare if part in args.parts}
