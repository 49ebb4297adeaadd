"""`verify`: do the attached devices compute what they should, and as fast as they should?"""

import argparse

from mlm import cluster
from mlm.commands import common
from mlm.data.manifest import NAME
from mlm.errors import DamageError, StopError
from mlm.paths import UPath
from mlm.text import show, table


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
        from mlm.verify import kernels, rows, session, speed, step, transfer, verdict

        data = common.fingerprints(manifest) if manifest else ("", "")
        distributed.initialize(config, workdir, *data, saves=False, entry=args.entry)
        checks = {
            "kernels": kernels.check,
            "step": step.check,
            "rows": rows.check,
            "speed": speed.check,
            "input": transfer.check_input,
            "storage": transfer.check_storage,
            "verdict": verdict.check,
        }
        run = session.Session(config, workdir, manifest, args.entry.pretraining or Pretraining, args.quick)
        failed = run.run(checks)
    if cluster.is_primary():
        keys, results = ("what", "measured", "expected", "status"), run.checks.items()
        cells = [(name, *(line[key] for key in keys)) for name, check in results for line in check["results"]]
        show(table("check", "what", "measured", "expected", "result", rows=cells))
    if failed:
        file = workdir.root / "verify.json"
        raise StopError(f"{', '.join(failed)}: not as it should be on these devices; see {file}.", DamageError.code)
