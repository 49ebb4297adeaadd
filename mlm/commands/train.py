"""`train`: pretrain on existing shards; evaluate, checkpoint, resume."""

import argparse

from ml_collections import ConfigDict

from mlm import cluster
from mlm.cluster import watch
from mlm.commands import common
from mlm.commands.tokenizer import make_tokenizer
from mlm.data.manifest import Manifest
from mlm.doctor import preflight
from mlm.workdir import Workdir

add_arguments = common.add_training_flags


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides)
    cluster.progress(watch.UNTIMED)
    with common.locked(workdir):
        case = preflight.Case(args.name, config, workdir, args)
        if cluster.is_primary() and case.tokenizer and workdir.tokenizer_folder is None:
            make_tokenizer(config, workdir)  # a copy, which the commands that read text need
        cluster.barrier("tokenizer")
        manifest = common.open_data(config, workdir)  # before jax is imported
        pretrain(args, config, workdir, manifest)


def pretrain(
    args: argparse.Namespace, config: ConfigDict, workdir: Workdir, manifest: Manifest
) -> None:
    """Trains to the last step, from the newest checkpoint if there is one."""
    from mlm.cluster import distributed
    from mlm.tasks.pretraining import Pretraining
    from mlm.training import hours

    distributed.initialize(
        config, workdir, *common.fingerprints(manifest), saves=True, entry=args.entry
    )
    task_class = args.entry.pretraining or Pretraining
    if config.train.hours:
        records = manifest.splits["train"].records
        config = hours.with_steps(
            config, workdir, records, lambda: task_class.open(config, workdir, manifest)
        )
    task = task_class.open(config, workdir, manifest)
    common.train_and_push(config, workdir, task, args.entry)
