"""`compare`: judge masked language models, whatever their tokenizers, by the same words of a text."""

import argparse
import json

from mlm import config as configs
from mlm.commands import common
from mlm.paths import write_text
from mlm.text import show, table
from mlm.workdir import Workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        nargs="+",
        type=common.path,
        required=True,
        metavar="MODEL",
        help="workdirs, WORKDIR@STEP, folders or names on the Hugging Face Hub",
    )
    parser.add_argument(
        "--source",
        type=common.source,
        required=True,
        metavar="SOURCE",
        help="the text, as in corpus.sources: text:GLOB, jsonl:GLOB[#FIELD], hf:NAME[:CONFIG][#SPLIT], ...",
    )
    parser.add_argument(
        "--words", type=int, default=2000, metavar="N", help="words to ask; default: 2000"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=1000,
        metavar="N",
        help="most characters of the text around a word; default: 1000",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draw of the words; default: 0"
    )
    common.add_workdir_flag(
        parser, "folder for words.html and words.json; default: none is written"
    )
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config = configs.load(str(configs.BASE), overrides)
    common.check_sources("--source", [args.source])
    from mlm.data.corpus import Corpus
    from mlm.inference import comparison
    from mlm.report import words

    corpus = Corpus.from_config(config.corpus).of_texts((args.source,), "--source")
    corpus.check(args.source)
    models = comparison.open_models(args.models, args.entry)
    texts = [document.text for part in corpus.parts() for document in corpus.read(part, texts="")]
    root = Workdir(args.workdir).root if args.workdir else None
    scores = comparison.compare(
        config, models, texts, count=args.words, size=args.window, seed=args.seed
    )
    result = {"source": args.source} | scores
    parts = [
        part
        for heads, rows in words.tables(result)
        for part in ("", table(*heads, rows=rows, indent=2))
    ]
    if args.json:
        show(json.dumps(result))
    else:
        show(f"{args.source}: {words.summary(result)}", *parts)
    if root:
        write_text(root / "words.json", json.dumps(result, indent=1) + "\n")
        write_text(root / "words.html", words.to_page(result))
