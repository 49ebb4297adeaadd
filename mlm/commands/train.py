"""`train`: pretrain on shards that are there; evaluate, checkpoint, resume."""

from __future__ import annotations

import argparse

from mlm.cluster import watch
from mlm.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser)
    common.add_host_flags(parser)
    common.add_skip_batches(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Trains."""
    config, workdir = common.open_run(args, overrides)
    watch.at(watch.UNTIMED)
    manifest = common.open_data(config, workdir)  # before jax is imported
    from mlm.cluster import distributed
    from mlm.tasks import pretraining

    distributed.initialize(config, workdir, manifest, saves=True)
    with common.locked(workdir):
        common.keep_compiled(workdir)
        pretraining.train(config, workdir, manifest)
