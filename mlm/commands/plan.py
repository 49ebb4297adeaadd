"""`plan`: compile the training step for a TPU or GPU that is not attached: does it fit, and how long does it take?"""

import argparse
import json
import math
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.commands import common
from mlm.data.manifest import Manifest
from mlm.errors import InputError
from mlm.plan import tables, topology
from mlm.text import show
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parser.add_argument(
        "--topology",
        default="",
        metavar="NAME",
        help="such as v5e:2x4, v3-8 or h100:8; v5e:? lists those of v5e",
    )
    parser.add_argument(
        "--slices", type=int, default=1, metavar="N", help="number of slices of that topology"
    )
    parser.add_argument(
        "--compare", choices=["stock"], help="also plan the baseline, the step of run_mlm_flax.py"
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        default=[],
        metavar="KEY=V,V",
        help="plan every combination; KEY is topology, per_chip_batch or any config key",
    )
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="price of a chip-hour")
    parser.add_argument(
        "--records", type=int, metavar="N", help="training rows; default: those of the workdir"
    )
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if listed := topology.listed(args.topology):
        show(*listed)
        return
    topology.prepare()  # before jax is imported
    config = common.read_config(args, overrides, says=True)
    common.refuse_classifier(config)
    manifest = (
        common.open_data(config, Workdir(args.workdir, create=False)) if args.workdir else None
    )
    results = compute(args, config, manifest)
    render = tables.sweep if args.sweep else tables.plan
    show(*([json.dumps(results)] if args.json else render(results)))


def compute(
    args: argparse.Namespace, config: ConfigDict, manifest: Manifest | None
) -> dict[str, Any]:
    """Returns what --json prints: {"sweep": [...]}, or {"plan"} and with --compare {"baseline", "ratio"}."""
    from mlm.bench import baseline
    from mlm.plan import plan

    for flag, value in (("--records", args.records), ("--price", args.price)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag}={value}: must be a number above 0.")
    if args.compare and not baseline.exists(config.model.family):
        what = f"run_mlm_flax.py can't train config.model.family = {config.model.family}"
        raise InputError(f"--compare={args.compare}: {what}; leave it out.")
    job = plan.Job(manifest, args.records, args.price, args.entry.pretraining)
    if args.sweep:
        rules = configs.load_rules(args.config)
        cells = plan.cells(args.sweep, args.topology)
        return {"sweep": [plan.plan_cell(config, job, args.slices, cell, rules) for cell in cells]}
    if not args.topology:
        raise InputError(
            "--topology: name the TPU or GPU, as in v5e:2x4 or h100:8; --topology=v5e:? lists those of v5e."
        )
    place = topology.find(args.topology, args.slices)
    ours = plan.measure(config, job, place)
    results = {"plan": ours}
    if args.compare:
        theirs = results["baseline"] = plan.measure(config, job, place, kind="baseline")
        if "cycles" in ours and "cycles" in theirs:
            results["ratio"] = {
                "cycles": ours["cycles"]["all"] / theirs["cycles"]["all"],
                "temporaries": ours["bytes_per_chip"]["temporaries"]
                / theirs["bytes_per_chip"]["temporaries"],
            }
    return results
