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
from mlm.plan import calibration, tables, topology
from mlm.text import say, show
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parser.add_argument(
        "--topology", default="", metavar="NAME", help="such as v5e:2x4 or h100:8; v5e:? lists those of v5e"
    )
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="number of slices of that topology")
    parser.add_argument("--compare", choices=["stock"], help="also plan the baseline, the step of run_mlm_flax.py")
    keys = "plan every combination; KEY is topology, per_chip_batch, mesh or any config key"
    parser.add_argument("--sweep", nargs="+", default=[], metavar="KEY=V,V", help=keys)
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="price of a chip-hour")
    parser.add_argument("--records", type=int, metavar="N", help="training rows; default: those of the workdir")
    parser.add_argument("--no-search", action="store_true", help="if it does not fit, don't search for what would")
    calibration = "verify.json of such a device, by which estimates are scaled; default: that of mlm/plan/calibrations"
    parser.add_argument("--calibration", type=common.path, metavar="FILE", help=calibration)
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    topology.prepare()  # before jax is imported
    config, manifest = common.read_config(args, overrides, says=True), None
    if args.workdir:
        manifest = common.open_data(config, Workdir(args.workdir, create=False))
    results = compute(args, config, manifest)
    render = tables.sweep if args.sweep else tables.plan
    show(*([json.dumps(results)] if args.json else render(results)))


def compute(args: argparse.Namespace, config: ConfigDict, manifest: Manifest | None) -> dict[str, Any]:
    """Returns what --json prints: {"sweep": [...]}, or {"plan"} and with --compare {"baseline", "ratio"}."""
    with topology.silence():  # jax's import
        from mlm.bench import baseline
    from mlm.plan import plan

    for flag, value in (("--records", args.records), ("--price", args.price)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag}={value}: must be a number above 0.")
    if args.compare and not baseline.exists(config.model.family):
        raise InputError(
            f"--compare={args.compare}: run_mlm_flax.py can't train config.model.family = {config.model.family}; leave "
            "it out."
        )
    topology.check_slices(args.slices)
    measured = None if args.calibration is None else calibration.read(args.calibration)
    if measured and (other := measured.difference(config)):
        raise InputError(f"--calibration={args.calibration}: was measured with {other}; run verify with this one.")
    job = plan.make_job(
        config,
        manifest,
        records=args.records,
        price=args.price,
        pretraining=args.entry.pretraining,
        calibration=measured,
    )
    if args.sweep:
        cells = plan.cells(args.sweep, args.topology)
        rules = configs.load_rules(args.config)
        rows = [plan.plan_cell(config, job, args.slices, cell, rules) for cell in cells]
        return {"sweep": rows, "calibration": tables.reference(row["plan"] for row in rows if "plan" in row)}
    if not args.topology:
        raise InputError(
            "--topology: name the TPU or GPU, as in v5e:2x4 or h100:8; --topology=v5e:? lists those of v5e."
        )
    place = topology.find(args.topology, args.slices)
    program, row = plan.measure(config, job, place)
    results = {"plan": row, "calibration": tables.reference([row])}
    if not program.fits and not args.no_search:
        say("it does not fit; looking for what would")
        row["largest"] = plan.largest_batch(config, job, place, program)
        row["remedies"] = plan.remedies(config, job, place)
    if args.compare:
        results["baseline"] = other = plan.measure(config, job, place, kind="baseline")[1]
        if row["fits"] and other["fits"]:
            results["ratio"] = {
                "cycles": row["cycles"]["all"] / other["cycles"]["all"],
                "temporaries": row["bytes_per_chip"]["temporaries"] / other["bytes_per_chip"]["temporaries"],
            }
    return results
