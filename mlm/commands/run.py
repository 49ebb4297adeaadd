"""`run`: every stage from the corpus to the export; those that are done and unchanged are skipped."""

from __future__ import annotations

import argparse
import re
import time
from typing import TYPE_CHECKING

from mlm import cluster, logs
from mlm.cluster import watch
from mlm.commands import common
from mlm.commands.export import write_export
from mlm.commands.shards import make_shards
from mlm.commands.tokenizer import make_tokenizer
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from mlm.data.manifest import Manifest
    from mlm.pretrained.load import Pretrained

SENTENCES = 5  # shown with their fillings at the end of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    common.add_training_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    """Makes all that is not there yet, from the tokenizer to the export."""
    config, workdir = common.open_run(args, overrides)
    from mlm.data.hosts import Hosts

    begin = time.monotonic()
    with common.locked(workdir):
        hosts = Hosts(args.processes, args.process_id, config.shards.patience)
        cluster.progress(watch.UNTIMED)
        make_tokenizer(config, workdir, hosts)
        make_shards(config, workdir, hosts)
        cluster.barrier("data")
        manifest = common.open_data(config, workdir)
        from mlm.cluster import distributed
        from mlm.report import report
        from mlm.tasks.pretraining import Pretraining
        from mlm.training import loop

        distributed.initialize(config, workdir, manifest.fingerprint, manifest.tokenizer_fingerprint, saves=True)
        common.keep_compiled(workdir)
        loop.run_task(config, workdir, (args.pretraining or Pretraining).open(config, workdir, manifest))
        model = write_export(workdir, torch_python="")
        if cluster.is_primary():
            report.write(workdir)
            summarize(workdir, manifest, model)
        cluster.barrier("finished")
    if args.process_id == 0:
        print(f"\n{time.monotonic() - begin:.0f} s in all")


def summarize(workdir: Workdir, manifest: Manifest, model: Pretrained) -> None:
    """Prints the scores beside the unigram entropy, some sentences of the validation split filled, and the paths."""
    from mlm.data import tokenizer
    from mlm.inference import fill_mask

    scores = logs.read(workdir.metrics, "eval")[-1]
    entropy = manifest.splits["validation"].unigram_entropy
    print(f"\nevaluation after {scores['step']} updates, on {scores['predictions']:,} masked tokens")
    print(f"  loss {scores['loss']:.3f} nats, perplexity {scores['perplexity']:.1f}, accuracy {scores['accuracy']:.1%}")
    if entropy is not None:
        print(
            f"  unigram entropy of the split {entropy:.3f} nats: the model is {entropy - scores['loss']:.2f} under it"
        )
    tok = tokenizer.load(str(workdir.tokenizer))
    texts, answers = masked_sentences(manifest, tok, SENTENCES)
    for text, answer, fillings in zip(texts, answers, fill_mask.FillMask(model, tok, 5)(texts), strict=True):
        print(f"\n  {text}    (was: {answer})")
        print("    " + "   ".join(f"{_shown(f['token_str'])} {f['score']:.0%}" for f in fillings[0]))
    print(f"\nreport  {workdir.report}\nexport  {workdir.export}")


def _shown(token: str) -> str:
    return token.strip() or repr(token)  # a line break is a filling too


def masked_sentences(manifest: Manifest, tok: PreTrainedTokenizerFast, count: int) -> tuple[list[str], list[str]]:
    """Returns up to `count` sentences of the validation split with one whole word masked, and the words.

    The word is the middle one of those that are one token and at least four letters long.
    """
    from mlm.data import batches

    texts, answers = [], []
    rows = batches.eval_batches(manifest, split="validation", batch=16, rows=(0, 16))
    for batch in rows:
        for ids in batch["input_ids"][batch["valid"] > 0]:
            text = " ".join(tok.decode(ids, skip_special_tokens=True).split())
            for sentence in re.findall(r"(?<=[.] )[A-Z][^.`:=>{}\[\]]{30,110}[.](?= )", text)[:1]:
                words = [w for w in re.findall(r"(?<= )[a-z]{4,}(?= )", sentence) if len(tok.tokenize(" " + w)) == 1]
                if words:
                    word = words[len(words) // 2]
                    texts.append(re.sub(rf"(?<= ){word}(?= )", tok.mask_token, sentence, count=1))
                    answers.append(word)
            if len(texts) == count:
                return texts, answers
    return texts, answers
