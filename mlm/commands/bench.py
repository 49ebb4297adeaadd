"""`bench`: time step, shards and batches beside the baselines, interleaved, in one run."""

import argparse
import json
import os
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.commands import common
from mlm.data import tokenizer
from mlm.data.manifest import Manifest
from mlm.doctor import preflight
from mlm.errors import InputError
from mlm.text import show
from mlm.workdir import Workdir

PARTS = ("step", "shards", "batches", "loop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["step"],
        choices=PARTS,
        help="what to measure; shards takes the workdir's tokenizer, batches and loop its shards; default: step",
    )
    parser.add_argument(
        "--torch",
        type=common.path,
        default="",
        metavar="PYTHON",
        help="Python with PyTorch, for its step too",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="of each comparison; default: 20"
    )
    parser.add_argument(
        "--megabytes", type=float, default=20.0, metavar="MB", help="text for shards; default: 20"
    )
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.torch and "step" not in args.parts:
        raise InputError("--torch needs --parts step.")
    config = common.read_config(args, overrides)
    common.refuse_classifier(config)
    preflight.refuse(preflight.Case(args.name, config, None, args))
    manifest = None
    folder = ""
    if set(args.parts) - {"step"}:
        workdir = Workdir(args.workdir, create=False)
        if {"batches", "loop"} & set(args.parts):
            manifest = common.open_data(config, workdir)
        if "shards" in args.parts:
            folder = str(workdir.tokenizer)
            tokenizer.load_fast(folder)  # refuses a missing one before anything is measured
    from mlm.bench import interleaved

    results = measure(args, config, manifest, folder)
    show(*([json.dumps(results)] if args.json else interleaved.render(results)))


def measure(
    args: argparse.Namespace, config: ConfigDict, manifest: Manifest | None, tokenizer_folder: str
) -> dict[str, Any]:
    """Returns the measurements by part, as --json prints them."""
    if args.torch:
        # Leaves PyTorch memory of the GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from mlm.bench import inputs, steps
    from mlm.tasks.pretraining import Pretraining

    pretraining = args.entry.pretraining or Pretraining
    config = configs.replace(config, {"data.batch_stages": ()})  # all of data.global_batch rows
    compare = {
        "step": lambda: steps.compare_steps(config, args.seconds, args.torch, pretraining),
        "shards": lambda: inputs.compare_shards(
            config, tokenizer_folder, args.megabytes, args.seconds
        ),
        "batches": lambda: inputs.compare_batches(config, manifest, args.seconds),
        "loop": lambda: inputs.compare_loop(config, manifest, args.seconds, pretraining),
    }
    return {part: compare[part]() for part in PARTS if part in args.parts}
