"""`predict`: fill the masks of texts, or classify texts, given as arguments or through a pipe."""

import argparse
import os
import sys

from mlm.commands import common
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.pretrained import locate
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_workdir_flag(parser)
    parser.add_argument(
        "texts",
        nargs="*",
        help="default: the lines of standard input, each answered by a line of JSON",
    )
    common.add_model_flag(parser)
    parser.add_argument(
        "--top-k", type=int, default=5, metavar="K", help="answers per mask or text; default: 5"
    )
    parser.add_argument(
        "--targets", nargs="+", default=[], metavar="WORD", help="fill masks with these words only"
    )


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    name = common.named_model(args) or Workdir(args.workdir, create=False)
    is_classifier = locate.is_classifier(name)
    if is_classifier and args.targets:
        raise InputError(
            f"--targets: {args.model or args.workdir} is a classifier and fills no masks; leave it out."
        )
    from mlm.cluster import distributed
    from mlm.inference.answers import answer_texts
    from mlm.inference.classify_texts import TextClassifier
    from mlm.inference.fill_mask import FillMask
    from mlm.pretrained import load
    from mlm.tasks.changed_model import with_class

    if isinstance(name, Workdir) and os.access(programs := str(name.root / "xla_cache"), os.W_OK):
        # of training on this machine; compiling takes longer than computing
        distributed.cache_programs(programs)
    model = load.load(name, head=load.CLASSIFIER if is_classifier else load.LM_HEAD)
    model = with_class(model, args.entry, command=args.name)
    tok = tokenizer.load(model.tokenizer)
    predictor = (
        TextClassifier(model, tok, args.top_k)
        if is_classifier
        else FillMask(model, tok, args.top_k, args.targets)
    )
    answer_texts(predictor, args.texts, sys.stdin, sys.stdout)
