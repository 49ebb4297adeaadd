"""`doctor`: check the data and the settings of a run before it starts; writes nothing."""

from __future__ import annotations

import argparse
import importlib.util

from mlm.cluster import detect
from mlm.commands import common
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser)
    parser.add_argument("--hosts", type=int, default=0, metavar="N", help="that the run will have")
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="over all hosts; default: this machine's")
    parser.add_argument("--topology", default="", metavar="NAME", help="of a TPU: memory and time of a step, as plan")
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="of that topology")
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help="rows to search for duplicates")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Prints what it finds."""
    detect.refuse_part_of_a_slice()
    config, workdir = common.read_config(args, overrides), Workdir(args.workdir, create=False)
    from mlm.plan import topology

    if args.topology and importlib.util.find_spec("libtpu") is not None:
        topology.prepare()  # before jax is imported
    from mlm.doctor import doctor

    flags = {name: getattr(args, name) for name in ("hosts", "devices", "topology", "slices", "rows")}
    doctor.run(config, workdir, **flags, as_json=args.json)
