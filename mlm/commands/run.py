"""`run`: all stages from the corpus to the export, skipping those that are done for this config."""

import argparse
import time

from mlm import cluster, logs
from mlm.commands import common
from mlm.commands.export import write_export
from mlm.commands.shards import make_shards
from mlm.commands.tokenizer import make_tokenizer
from mlm.commands.train import pretrain
from mlm.data.manifest import Manifest
from mlm.workdir import Workdir


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
        write_export(workdir, args, torch_python="")
        if cluster.is_primary():
            from mlm.report import report

            report.write(workdir)
            _summarize(workdir, manifest)
        cluster.barrier("finished")
    if args.process_id == 0:
        print(f"\n{time.monotonic() - begin:.0f} s in all")


def _summarize(workdir: Workdir, manifest: Manifest) -> None:
    """Prints the scores and the paths."""
    scores = logs.read(workdir.metrics, "eval")[-1]
    entropy = manifest.splits["validation"].unigram_entropy
    print(f"\nevaluation after {scores['step']} steps, on {scores['predictions']:,} masked tokens")
    loss = f"{scores['loss']:.3f} nats{logs.errors(scores, 3)}"
    print(f"  loss {loss}, perplexity {scores['perplexity']:.1f}, accuracy {scores['accuracy']:.1%}")
    if entropy is not None:
        where = "below" if scores["loss"] < entropy else "above"
        difference = abs(entropy - scores["loss"])
        print(f"  unigram entropy of the split {entropy:.3f} nats: the model is {difference:.2f} {where} it")
    print(f"\nreport  {workdir.report}\nexport  {workdir.export}")
    is_scored = any(key.startswith("test,") for key in logs.read_object(workdir.root / logs.RESULTS))
    if "test" in manifest.splits and not is_scored:
        print(f"test    not scored yet: python -m mlm evaluate --workdir={workdir.root} --split=test")
