"""`train`: pretrain on shards that are there; evaluate, checkpoint, resume."""

from __future__ import annotations

import argparse

from mlm import cluster
from mlm.cluster import watch
from mlm.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_training_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Trains."""
    config, workdir = common.open_run(args, overrides)
    cluster.progress(watch.UNTIMED)
    manifest = common.open_data(config, workdir)  # before jax is imported
    from mlm.cluster import distributed
    from mlm.tasks.pretraining import Pretraining
    from mlm.training import loop

    distributed.initialize(config, workdir, manifest.fingerprint, manifest.tokenizer_fingerprint, saves=True)
    with common.locked(workdir):
        common.keep_compiled(workdir)
        loop.run_task(config, workdir, (args.pretraining or Pretraining).open(config, workdir, manifest))
