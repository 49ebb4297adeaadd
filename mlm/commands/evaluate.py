"""`evaluate`: score a checkpoint or a model folder on a split."""

import argparse

from mlm import config as configs
from mlm.commands import common
from mlm.doctor import preflight
from mlm.errors import InputError
from mlm.pretrained import locate
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser, required=False)
    common.add_model_flag(parser)
    parser.add_argument(
        "--split",
        default="validation",
        metavar="NAME",
        help="split to score, or a validation set by its name (evaluate.sets); default: validation",
    )
    kinds = ["token", "word", "span"]
    parser.add_argument(
        "--masks", nargs="+", default=[], choices=kinds, help="masks to score besides the run's own"
    )
    parser.add_argument(
        "--pseudo", type=int, default=0, metavar="N", help="also the pseudo-perplexity of N rows"
    )
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="draws of the masks to score, with the standard error over them; default: 1",
    )
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="also the loss by position in the row, and by distance of the nearest copy of the token there",
    )
    parser.add_argument(
        "--dtypes",
        action="store_true",
        help="also the loss and accuracy in float32 and in bfloat16 on the same rows and masks",
    )
    parser.add_argument(
        "--pairs",
        type=common.source,
        default="",
        metavar="SOURCE",
        help="score minimal pairs instead: jsonl:FILE (a pattern, too), csv:FILE, hf:NAME[:CONFIG][#SPLIT]",
    )
    parser.add_argument(
        "--phenomenon",
        default="",
        metavar="FIELD",
        help="field to group the pairs by; default: UID if there is one, else the file",
    )
    common.add_json_flag(parser)
    common.add_host_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    workdir = Workdir(args.workdir, create=False)
    model = common.named_model(args)
    is_classifier = not args.pairs and locate.is_classifier(model or workdir)
    masks = args.masks or args.pseudo or args.draws or args.breakdown or args.dtypes
    if masks and (args.pairs or is_classifier):
        raise InputError(
            "--masks, --draws, --pseudo, --breakdown, --dtypes: are of a masked language model's rows, not of --pairs "
            "or of a classifier; leave them out."
        )
    if args.pairs and args.split != "validation":
        raise InputError(f"--pairs={args.pairs}: takes no --split; leave it out.")
    if args.draws is not None and args.draws < 1:
        raise InputError(f"--draws={args.draws}: must be a whole number from 1 up.")
    if args.phenomenon and not args.pairs:
        raise InputError(f"--phenomenon={args.phenomenon} needs --pairs=SOURCE.")
    task = configs.CLASSIFICATION if is_classifier else configs.PRETRAINING
    common.join(args, overrides, task=task)
    config = common.read_config(args, overrides, task=task)
    preflight.refuse(preflight.Case(args.name, config, workdir, args))
    manifest = None if is_classifier or args.pairs else common.open_data(config, workdir)
    from mlm.cluster import distributed

    distributed.initialize(
        config, workdir, *common.fingerprints(manifest), saves=False, entry=args.entry
    )
    from mlm.inference import evaluate, evaluate_classifier, minimal_pairs

    if args.pairs:
        minimal_pairs.run(
            config,
            workdir,
            model=model,
            source=args.pairs,
            phenomenon=args.phenomenon,
            entry=args.entry,
            as_json=args.json,
        )
    elif is_classifier:
        evaluate_classifier.run(config, workdir, model=model, split=args.split, as_json=args.json)
    else:
        evaluate.run(
            config,
            workdir,
            manifest,
            model=model,
            split=args.split,
            masks=args.masks,
            draws=args.draws or 1,
            pseudo=args.pseudo,
            breakdown=args.breakdown,
            dtypes=args.dtypes,
            entry=args.entry,
            as_json=args.json,
        )
