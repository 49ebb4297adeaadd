"""`plan`: compile the training step for a TPU that is not attached: does it fit, and how long does it take?"""

from __future__ import annotations

import argparse

from mlm.commands import common
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser)
    parser.add_argument("--topology", default="", metavar="NAME", help="such as v5e:2x4; an unknown one lists them all")
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="of that topology, connected by the network")
    parser.add_argument("--compare", choices=["stock"], help="with the baseline, the step of run_mlm_flax.py")
    parser.add_argument(
        "--sweep", nargs="+", default=[], metavar="KEY=V,V", help="topology, per_chip_batch, mesh, any key"
    )
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of a chip for an hour")
    parser.add_argument("--records", type=int, metavar="N", help="rows of the training split; default: of the workdir")
    parser.add_argument("--no-search", action="store_true", help="if it doesn't fit, don't look for what would")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Prints the plan."""
    config, manifest = common.read_config(args, overrides), None
    from mlm.plan import topology

    topology.prepare()  # before jax is imported
    if args.workdir:
        manifest = common.open_data(config, Workdir(args.workdir, create=False))
    from mlm.plan import plan

    job = plan.make_job(config, manifest, records=args.records, price=args.price)
    plan.run(
        config,
        job,
        name=args.topology,
        slices=args.slices,
        compare=bool(args.compare),
        sweep=args.sweep,
        search=not args.no_search,
        as_json=args.json,
    )
