"""`run`: all stages from the corpus to the export, skipping those that are done for this config."""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlm import cluster, logs
from mlm.commands import common
from mlm.commands.export import write_export
from mlm.commands.shards import make_shards
from mlm.commands.tokenizer import make_tokenizer
from mlm.commands.train import pretrain
from mlm.data import tokenizer
from mlm.data.manifest import Manifest
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from mlm.pretrained.load import Pretrained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_training_flags(parser)
    common.add_engine_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = common.open_run(args, overrides)
    begin = time.monotonic()
    with common.locked(workdir):
        with common.open_engine(args, config, workdir) as engine:
            if engine is not None:
                make_tokenizer(config, workdir, engine)
                make_shards(config, workdir, engine)
        manifest = common.open_data(config, workdir)
        pretrain(args, config, workdir, manifest)
        model = write_export(workdir, args)
        if cluster.is_primary():
            from mlm.report import report

            report.write(workdir)
            _summarize(workdir, manifest, model)
        cluster.barrier("finished")
    if args.process_id == 0:
        print(f"\n{time.monotonic() - begin:.0f} s in all")


def _summarize(workdir: Workdir, manifest: Manifest, model: Pretrained) -> None:
    """Prints the scores, some sentences of the validation split filled, and the paths."""
    from mlm.inference import fill_mask, results

    scores = logs.read(workdir.metrics, "eval")[-1]
    print(f"\nevaluation after {scores['step']} steps, on {scores['predictions']:,} masked tokens")
    if remark := results.remark_on_few(scores):
        print(f"  {remark}")
    if scores["loss"] is not None:  # some tokens were masked
        print(
            f"  loss {scores['loss']:.3f} nats{logs.errors(scores, 3)}, perplexity {scores['perplexity']:.1f}, "
            f"accuracy {scores['accuracy']:.1%}"
        )
    tok = tokenizer.load(str(workdir.tokenizer))
    masked = list(itertools.islice(_masked_sentences(manifest, tok), 5))
    filled = fill_mask.FillMask(model, tok, 5)([text for text, _ in masked])
    for (text, answer), fillings in zip(masked, filled, strict=True):
        print(f"\n  {text}    (was: {answer})")
        words = (
            f"{f['token_str'].strip() or repr(f['token_str'])} {f['score']:.0%}"
            for f in fillings[0]
        )
        print(f"    {'   '.join(words)}")
    print(f"\nreport  {workdir.report}\nexport  {workdir.export}")
    if "test" in manifest.splits:
        print(f"the test split: python -m mlm evaluate --workdir={workdir.root} --split=test")


def _masked_sentences(
    manifest: Manifest, tok: PreTrainedTokenizerFast
) -> Iterator[tuple[str, str]]:
    """Yields sentences of the validation split with a word masked, and the word: one token of four letters or more."""
    from mlm.data import batches

    for batch in batches.eval_batches(manifest, split="validation", batch=16, rows=(0, 16)):
        for ids in batch["input_ids"][batch["valid"] > 0]:
            text = " ".join(tok.decode(ids, skip_special_tokens=True).split())
            for sentence in re.findall(r"(?<=[.] )[A-Z][^.`:=>{}\[\]]{30,110}[.](?= )", text)[:1]:
                words = [
                    w
                    for w in re.findall(r"(?<= )[a-z]{4,}(?= )", sentence)
                    if len(tok.tokenize(" " + w)) == 1
                ]
                if words:
                    word = words[len(words) // 2]
                    yield re.sub(rf"(?<= ){word}(?= )", tok.mask_token, sentence, count=1), word
