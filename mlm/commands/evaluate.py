"""`evaluate`: score a checkpoint or a model folder on a split."""

from __future__ import annotations

import argparse

from mlm import config as configs
from mlm.commands import common
from mlm.pretrained import locate
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser, required=False)
    common.add_model_flag(parser)
    parser.add_argument("--split", default="validation")
    parser.add_argument(
        "--masks", nargs="+", default=[], choices=["token", "word", "span"], help="kinds beside the run's own"
    )
    parser.add_argument("--pseudo", type=int, default=0, metavar="N", help="pseudo-perplexity too, of N rows")
    common.add_host_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Scores a model, and prints the scores."""
    workdir = Workdir(args.workdir, create=False)
    classifies = locate.is_classifier(args.model or workdir)
    task = configs.CLASSIFICATION if classifies else configs.PRETRAINING
    common.join(args, overrides, task=task, meet=True, create=False)
    config = common.read_config(args, overrides, task=task)
    manifest = None if classifies else common.open_data(config, workdir)  # before jax is imported
    fingerprints = () if classifies else (manifest.fingerprint, manifest.tokenizer_fingerprint)
    from mlm.cluster import distributed

    distributed.initialize(config, workdir, *fingerprints, saves=False)
    if classifies:
        from mlm.inference import evaluate_classifier

        evaluate_classifier.run(config, workdir, model=args.model, split=args.split)
    else:
        from mlm.inference import evaluate

        flags = {"model": args.model, "split": args.split, "masks": args.masks, "pseudo": args.pseudo}
        evaluate.run(config, workdir, manifest, **flags)
