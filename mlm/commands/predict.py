"""`predict`: fill masks in texts, or classify them; texts are arguments or lines from a pipe."""

from __future__ import annotations

import argparse
import sys

from mlm.cluster import detect
from mlm.commands import common
from mlm.pretrained import locate
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_config_flags(parser, required=False)
    parser.add_argument("texts", nargs="*")
    common.add_model_flag(parser)
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--targets", nargs="+", default=[], metavar="WORD", help="fill with one of these alone")


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Prints the answers."""
    detect.refuse_part_of_a_slice()
    workdir = None if args.model else Workdir(args.workdir, create=False)
    streams = {"stdin": sys.stdin, "stdout": sys.stdout}
    classifies = locate.is_classifier(args.model or workdir)
    from mlm.pretrained import load

    model = load.load(args.model or workdir, head=load.CLASSIFIER if classifies else load.LM_HEAD)
    if classifies:
        from mlm.inference import classify_texts

        classify_texts.run(model, texts=args.texts, top_k=args.top_k, **streams)
    else:
        from mlm.inference import fill_mask

        fill_mask.run(model, texts=args.texts, top_k=args.top_k, targets=args.targets, **streams)
