"""`plan`: compile the training step for a TPU that is not attached: does it fit, and how long does it take?"""

from __future__ import annotations

import argparse

from mlm.commands import common
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parser.add_argument("--topology", default="", metavar="NAME", help="such as v5e:2x4; an unknown one lists all")
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="number of slices of that topology")
    parser.add_argument("--compare", choices=["stock"], help="also plan the baseline, the step of run_mlm_flax.py")
    keys = "plan every combination; KEY is topology, per_chip_batch, mesh or any config key"
    parser.add_argument("--sweep", nargs="+", default=[], metavar="KEY=V,V", help=keys)
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="price of a chip-hour")
    parser.add_argument("--records", type=int, metavar="N", help="training rows; default: those of the workdir")
    parser.add_argument("--no-search", action="store_true", help="if it does not fit, don't search for what would")
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, manifest = common.read_config(args, overrides), None
    from mlm.plan import topology

    topology.prepare()  # before jax is imported
    if args.workdir:
        manifest = common.open_data(config, Workdir(args.workdir, create=False))
    from mlm.plan import plan

    job = plan.make_job(config, manifest, records=args.records, price=args.price)
    flags = {"name": args.topology, "slices": args.slices, "compare": bool(args.compare), "sweep": args.sweep}
    plan.run(config, job, **flags, search=not args.no_search, as_json=args.json)
