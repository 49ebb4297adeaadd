"""`doctor`: check the data and the settings of a run before it starts; writes nothing."""

from __future__ import annotations

import argparse

from mlm.cluster import detect
from mlm.commands import common
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parser.add_argument("--hosts", type=int, default=0, metavar="N", help="hosts of the planned run")
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="devices of all hosts; default: those here")
    topology = "TPU, such as v5e:2x4, to estimate memory and step time for, as `plan` does"
    parser.add_argument("--topology", default="", metavar="NAME", help=topology)
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="number of slices of that topology")
    rows = "training rows to search for duplicates; default: 200,000"
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help=rows)
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    detect.refuse_part_of_a_slice()
    config, workdir = common.read_config(args, overrides), Workdir(args.workdir, create=False)
    from mlm.plan import topology

    if args.topology:
        topology.prepare()  # before jax is imported
    from mlm.doctor import doctor

    flags = {name: getattr(args, name) for name in ("hosts", "devices", "topology", "slices", "rows")}
    doctor.run(config, workdir, **flags, as_json=args.json)
