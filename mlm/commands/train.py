"""`train`: pretrain on existing shards; evaluate, checkpoint, resume."""

import argparse

from ml_collections import ConfigDict

from mlm import cluster
from mlm.cluster import watch
from mlm.commands import common
from mlm.data.manifest import Manifest
from mlm.paths import UPath, copy_files, replacing
from mlm.pretrained import locate
from mlm.workdir import Workdir

add_arguments = common.add_training_flags


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides)
    cluster.progress(watch.UNTIMED)
    with common.locked(workdir):
        source, step = locate.split_step(config.train.branch_from)
        if step is not None:  # a branch has the tokenizer of its source
            if cluster.is_primary() and not (workdir.tokenizer / "tokenizer.json").is_file():
                with replacing(workdir.tokenizer, last="tokenizer.json") as new:
                    copy_files(UPath(source) / "tokenizer", UPath(new))
            cluster.barrier("tokenizer")
        manifest = common.open_data(config, workdir)  # before jax is imported
        pretrain(args, config, workdir, manifest)


def pretrain(args: argparse.Namespace, config: ConfigDict, workdir: Workdir, manifest: Manifest) -> None:
    """Trains to the last step, from the newest checkpoint if there is one."""
    from mlm.cluster import distributed
    from mlm.tasks.pretraining import Pretraining
    from mlm.training import loop

    distributed.initialize(config, workdir, *common.fingerprints(manifest), saves=True, entry=args.entry)
    loop.run_task(config, workdir, (args.entry.pretraining or Pretraining).open(config, workdir, manifest))
