"""`verify`: do the attached devices compute what they should, and as fast as they should?"""

import argparse
import os

from mlm import cluster
from mlm.commands import common
from mlm.errors import DamageError, InputError, StopError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    common.add_host_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        fix = f"set JAX_PLATFORMS={platforms},cpu"
        raise InputError(
            f"JAX_PLATFORMS={platforms}: leaves out the host's CPU, which verify compares with; {fix}."
        )
    config, workdir = common.open_run(args, overrides)
    common.refuse_classifier(config)
    with common.locked(workdir):
        from mlm.cluster import distributed
        from mlm.tasks.pretraining import Pretraining
        from mlm.verify import kernels, numbers, speed
        from mlm.verify.session import Session

        distributed.initialize(
            config, workdir, *common.fingerprints(None), saves=False, entry=args.entry
        )
        session = Session(config, args.entry.pretraining or Pretraining)
        failed = []
        for check in (
            numbers.check_rows,
            numbers.check_step,
            kernels.check_kernels,
            speed.check_speed,
        ):
            cluster.progress("compile")  # the phase that may take longest
            for result in check(session):
                if cluster.is_primary():
                    print(result, flush=True)
                if result.is_right is False:
                    failed.append(result.what)
    if failed:
        if not cluster.is_primary():
            cluster.barrier("the end")  # process 0 fails for all of them
        raise StopError(
            f"{'; '.join(failed)}: not as it should be on these devices.", DamageError.code
        )
