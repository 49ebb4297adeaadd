"""`bench`: time step, shards and batches beside the baselines, or train two recipes; interleaved, in one run."""

import argparse
import json
import math
import os
from operator import itemgetter
from pathlib import Path
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

Recipes = dict[str, tuple[str, ConfigDict]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    names = ["step", "shards", "batches", "loop", "quality"]
    parts = "what to measure; shards takes the workdir's tokenizer, batches, loop and quality its shards; default: step"
    parser.add_argument("--parts", nargs="+", default=["step"], choices=names, help=parts)
    torch = "Python with PyTorch, for its step too, and for quality its run_mlm.py"
    parser.add_argument("--torch", type=common.path, default="", metavar="PYTHON", help=torch)
    seconds = "of each comparison, default: 20; for quality, of training each recipe"
    parser.add_argument("--seconds", type=float, metavar="S", help=seconds)
    parser.add_argument("--megabytes", type=float, default=20.0, metavar="MB", help="text for shards; default: 20")
    against = "quality: the other config, as its file has it; default: run_mlm.py's recipe in our step"
    parser.add_argument("--against", type=common.path, default="", metavar="FILE", help=against)
    plot = "quality: write its curves as .png or .svg"
    parser.add_argument("--plot", type=common.path, default="", metavar="FILE", help=plot)
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    check(args)
    config, manifest, folder, recipes = common.read_config(args, overrides), None, "", {}
    preflight.refuse(preflight.Case(args.name, config, None, args))
    if set(args.parts) - {"step"}:
        workdir = Workdir(args.workdir, create=False)
        if "quality" in args.parts:
            config = configs.replace(config, {"evaluate.sets": ()})
            recipes = open_recipes(args, config)
        if {"batches", "loop", "quality"} & set(args.parts):
            manifest = common.open_data(config, workdir)
        if "shards" in args.parts:
            folder = str(workdir.tokenizer)
            tokenizer.load_fast(folder)  # refuses a missing one before anything is measured
    from mlm.bench import interleaved, quality

    results = measure(args, config, manifest, folder, recipes)
    if args.plot:
        from mlm.report import plots

        curves = {}
        for key, row in results["quality"]["recipes"].items():
            file = row["name"].rpartition("/")[2]
            name = f"{file} ({key})" if file in curves else file
            curves[name] = [([], []), plots.points(row["curve"], "loss", 1, itemgetter("seconds"))]
        plots.save(plots.draw_together(curves, "seconds of training"), Path(args.plot))
    if args.json:
        show(json.dumps(results))
        return
    show(*interleaved.render({part: rows for part, rows in results.items() if part != "quality"}))
    if "quality" in results:
        show(*quality.render(results["quality"]))


def check(args: argparse.Namespace) -> None:
    """Raises InputError for flags that don't fit together."""
    quality = "quality" in args.parts
    for flag, value in (("megabytes", args.megabytes), ("seconds", args.seconds)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{flag}={value:g}: must be a number above 0.")
    for flag in ("against", "plot"):
        if getattr(args, flag) and not quality:
            raise InputError(f"--{flag} needs --parts quality.")
    if args.torch and not {"step", "quality"} & set(args.parts):
        raise InputError("--torch needs --parts step or --parts quality.")
    if args.torch and args.against:
        raise InputError("--torch and --against: quality compares two recipes; leave out one of these flags.")
    if quality and args.seconds is None:
        raise InputError("--seconds: quality needs the seconds of training of each recipe, as in --seconds=300.")
    if args.plot and not (args.plot.endswith((".png", ".svg")) and Path(args.plot).parent.is_dir()):
        raise InputError(f"--plot={args.plot}: name a .png or .svg in a folder that exists.")


def open_recipes(args: argparse.Namespace, config: ConfigDict) -> Recipes:
    """Returns {key: (name, config)} of the two that quality compares, on the data of `config`."""
    from mlm.bench import quality
    from mlm.bench.interleaved import NAMES

    if not args.against:
        if args.torch and config.data.mixture:
            raise InputError("--torch: reads one folder of shards, but config.data.mixture names several.")
        key = "torch" if args.torch else "stock"
        return {"mlm": (args.config, config), key: (NAMES[key], quality.baseline(config))}
    other_args = argparse.Namespace(config=args.against, workdir=args.workdir)
    other = quality.on_same_data(config, common.read_config(other_args, [], flag="--against"), args.against)
    name = f"{args.config}, overridden" if Path(args.config).samefile(args.against) else args.config
    return {"mlm": (name, config), "against": (args.against, other)}


def measure(
    args: argparse.Namespace, config: ConfigDict, manifest: Manifest | None, folder: str, recipes: Recipes | None = None
) -> dict[str, Any]:
    """Returns the measurements by part, as --json prints them."""
    if args.torch:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves PyTorch memory of the GPU
    from mlm.bench import inputs, quality, steps
    from mlm.tasks.pretraining import Pretraining

    pretraining = args.entry.pretraining or Pretraining
    config = configs.replace(config, {"data.batch_stages": ()})  # all of data.global_batch rows
    seconds = 20.0 if args.seconds is None else args.seconds
    compare = {
        "step": lambda: steps.compare_steps(config, seconds, args.torch, pretraining),
        "shards": lambda: inputs.compare_shards(config, folder, args.megabytes, seconds),
        "batches": lambda: inputs.compare_batches(config, manifest, seconds),
        "loop": lambda: inputs.compare_loop(config, manifest, seconds, pretraining),
        "quality": lambda: quality.compare(
            recipes, args.workdir, manifest, seconds=seconds, torch=args.torch, pretraining=pretraining
        ),
    }
    return {part: compare[part]() for part in compare if part in args.parts}
