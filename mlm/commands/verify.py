"""`verify`: do the attached devices compute what they should, and as fast as they should?"""

import argparse
import os
import tempfile

from mlm import cluster, memory
from mlm.commands import common
from mlm.data.manifest import NAME
from mlm.errors import DamageError, InputError, StopError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    common.add_host_flags(parser)
    parser.add_argument("--quick", action="store_true", help="take about a minute: fewer layers, steps and settings")


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if (platforms := os.environ.get("JAX_PLATFORMS")) and "cpu" not in platforms.split(","):
        fix = f"set JAX_PLATFORMS={platforms},cpu"
        raise InputError(f"JAX_PLATFORMS={platforms}: leaves out the host's CPU, which verify compares with; {fix}.")
    config, workdir = common.open_run(args, overrides)
    with common.locked(workdir), tempfile.TemporaryDirectory() as programs:
        has_shards = config.data.mixture or config.shards.dir or (workdir.shards / NAME).is_file()
        manifest = common.load_data(config, workdir) if has_shards else None
        from mlm.cluster import distributed
        from mlm.tasks.pretraining import Pretraining
        from mlm.verify import kernels, numbers, session, times

        distributed.initialize(config, workdir, *common.fingerprints(manifest), saves=False, entry=args.entry)
        check_platform(platforms or "")
        memory.cache_programs(programs)  # the first state is the same for many a check and setting
        checks = {
            "kernels": kernels.check,
            "step": numbers.check_step,
            "rows": numbers.check_rows,
            "speed": times.check_speed,
            "plan": times.check_plan,
            "input": times.check_input,
            "storage": times.check_storage,
            "verdict": times.check_verdict,
        }
        pretraining = args.entry.pretraining or Pretraining
        failed = session.Session(config, workdir, manifest, pretraining, args.quick).run(checks)
    if failed:
        if not cluster.is_primary():
            cluster.barrier("the end")  # process 0 fails for all of them
        file = workdir.root / "verify.json"
        raise StopError(f"{', '.join(failed)}: not as it should be on these devices; see {file}.", DamageError.code)


def check_platform(platforms: str) -> None:
    """Raises InputError if jax did not find the first device that JAX_PLATFORMS asks for, about which it is silent."""
    import jax

    asked, platform = platforms.split(",")[0], jax.devices()[0].platform
    if asked and {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked) != platform:
        raise InputError(f"JAX_PLATFORMS={platforms}: jax finds no {asked}, but a {platform}; see what jax logs of it.")
