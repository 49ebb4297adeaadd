"""`verify`: do the attached devices compute what they should, and as fast as they should?"""

import argparse

from mlm import cluster
from mlm.commands import common
from mlm.data.manifest import NAME
from mlm.errors import DamageError, StopError
from mlm.paths import UPath
from mlm.text import show, table

SECONDS, SECONDS_QUICK = 300.0, 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    common.add_host_flags(parser)
    parser.add_argument("--quick", action="store_true", help="take about a minute: fewer layers, steps and settings")


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides)
    with common.locked(workdir):
        has_shards = config.data.mixture or (UPath(workdir.shards_of(config)) / NAME).is_file()
        manifest = common.load_data(config, workdir) if has_shards else None
        from mlm.cluster import distributed
        from mlm.tasks.pretraining import Pretraining
        from mlm.verify import checks
        from mlm.verify.session import Session

        data = common.fingerprints(manifest) if manifest else ("", "")
        distributed.initialize(config, workdir, *data, saves=False, entry=args.entry)
        seconds = SECONDS_QUICK if args.quick else SECONDS
        pretraining = args.entry.pretraining or Pretraining
        session = Session(config, workdir, manifest, pretraining, args.quick, seconds)
        failed = session.run(checks.CHECKS)
    if cluster.is_primary():
        show(table("check", "what", "measured", "expected", "result", rows=rows(session.results)))
    if failed:
        file = workdir.root / "verify.json"
        raise StopError(f"{', '.join(failed)}: not as it should be on these devices; see {file}.", DamageError.code)


def rows(results: dict) -> list[tuple[str, ...]]:
    """Returns the cells of the table."""
    keys = ("what", "measured", "expected", "status")
    return [(name, *(line[key] for key in keys)) for name, entry in results.items() for line in entry["results"]]
