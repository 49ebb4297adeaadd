"""`python -m mlm COMMAND`: the command table, one line a command; mlm/commands/commands.py says what each does."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
import types

from mlm.cluster import detect, watch
from mlm.commands import commands
from mlm.errors import PreemptedError, StopError

EXAMPLES = """examples:
  python -m mlm run --config=configs/quickstart.py --workdir=runs/quickstart
  python -m mlm train --config=configs/quickstart.py --workdir=runs/quickstart --config.train.steps=8000
  python -m mlm predict --workdir=runs/quickstart "Returns the <mask> of the array."
"""
MODEL = {"default": "", "metavar": "FOLDER", "help": "a workdir, folder or hub name; default: newest checkpoint"}
SEVERAL = ("run", "shards", "train", "classify", "evaluate", "export")  # commands that several processes do together
ON_DEVICES = ("predict", "bench", "doctor")  # those that one process does, with its devices


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code (README, "Exit codes")."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for name in ("absl", "asyncio", "concurrent.futures"):  # orbax logs what it raises as well, with its stacks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, _stop)  # until the training loop takes it over
    argv, overrides = split_overrides(argv)
    args = parser().parse_args(argv)
    watching = watch.begin(args.name)
    try:
        if args.name in SEVERAL:
            commands.join(args, overrides)
        elif args.name in ON_DEVICES:
            detect.refuse_part_of_a_slice()
        args.command(args, overrides)
        return watching.end(0)
    except StopError as error:
        print(f"mlm {args.name}: {error}", file=sys.stderr, flush=True)
        return watching.failed(error, error.code)
    except KeyboardInterrupt as error:
        print(f"mlm {args.name}: interrupted; start the same command to go on.", file=sys.stderr, flush=True)
        return watching.failed(error, PreemptedError.code)
    except BrokenPipeError:  # whoever reads the output has had enough of it, as in `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if args.name in SEVERAL:  # what a lost ssh connection does to a run is no success
            return watching.failed(StopError("nobody reads the output any more; start the same command to go on."), 1)
        return watching.end(0)
    except Exception as error:
        traceback.print_exc()
        return watching.failed(error, 1)


def _stop(number: int, frame: types.FrameType | None) -> None:
    """Ends at once: before the first step there is nothing to save, and imports swallow exceptions."""
    print("mlm: stopped before the first step; start the same command to go on.", file=sys.stderr, flush=True)
    watch.current.stopped(signal.Signals(number).name)


def split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (the other arguments, ["group.key=value", ...]); --config.group.key value is understood too."""
    others, overrides = [], []
    rest = iter(argv)
    for argument in rest:
        if argument.startswith("--config."):
            key = argument.removeprefix("--config.")
            overrides.append(key if "=" in key else f"{key}={next(rest, '')}")
        else:
            others.append(argument)
    return others, overrides


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    root = argparse.ArgumentParser(
        prog="python -m mlm",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Pretrain RoBERTa-class masked language models. Set any key of a config: --config.group.key=value.",
    )
    table = root.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, words: str, *, needs_config: bool) -> argparse.ArgumentParser:
        sub = table.add_parser(name, help=words, description=words)
        sub.add_argument("--config", required=needs_config, metavar="FILE", help="such as configs/quickstart.py")
        sub.add_argument("--workdir", default="", metavar="DIR", help="folder of the run, local or gs://")
        sub.set_defaults(command=getattr(commands, name), name=name)
        return sub

    command("run", "all stages, skipping what is done and unchanged", needs_config=True)
    command("tokenizer", "train a tokenizer on the corpus", needs_config=True)
    command("shards", "tokenize, chunk and write TFRecord shards", needs_config=True)
    doctor = command("doctor", "look for what is wrong with the data and a run of it", needs_config=True)
    _add_doctor_arguments(doctor)
    command("train", "train, evaluate, checkpoint, resume", needs_config=True)
    command("classify", "fine-tune a model to classify texts, or to predict a number", needs_config=True)
    evaluate = command("evaluate", "score a checkpoint or a model folder on a split", needs_config=False)
    evaluate.add_argument("--model", **MODEL)
    evaluate.add_argument("--split", default="validation")
    evaluate.add_argument(
        "--masks", nargs="+", default=[], choices=["token", "word", "span"], help="kinds beside the run's own"
    )
    evaluate.add_argument("--pseudo", type=int, default=0, metavar="N", help="pseudo-perplexity too, of N rows")
    predict = command("predict", "fill <mask>, or classify: texts, or lines from a pipe", needs_config=False)
    predict.add_argument("texts", nargs="*")
    predict.add_argument("--model", **MODEL)
    predict.add_argument("--top-k", type=int, default=5)
    predict.add_argument("--targets", nargs="+", default=[], metavar="WORD", help="fill with one of these alone")
    export = command("export", "write a transformers folder and prove it", needs_config=False)
    export.add_argument("--torch", default="", metavar="PYTHON", help="an interpreter with PyTorch to prove it in")
    export.add_argument("--push", default="", metavar="USER/NAME", help="bring it to the Hugging Face Hub, privately")
    export.add_argument("--public", action="store_true", help="with --push: for everybody")
    bench = command("bench", "measure step, shards and batches beside the stock ones", needs_config=True)
    _add_bench_arguments(bench)
    plan = command("plan", "compile the step for a TPU that isn't there: does it fit?", needs_config=True)
    _add_plan_arguments(plan)
    report = command("report", "curves and tables as one HTML page", needs_config=False)
    report.add_argument("--compare", nargs="+", default=[], metavar="DIR", help="other runs, on one page with this one")
    for name in SEVERAL:
        _add_host_flags(table.choices[name])
    for name in ("run", "train"):
        table.choices[name].add_argument(
            "--skip-batches", action="append", default=[], metavar="A:B", help="leave them out; may come several times"
        )
    return root


def _add_host_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags that override the detected place of a process among several."""
    several = command.add_argument_group(
        "several processes",
        "Detected on TPU VMs, on GKE's TPUs, under Slurm and under Open MPI; these flags override what is detected.",
    )
    several.add_argument("--coordinator", default="", metavar="HOST[:PORT]", help="of process 0; default: pod.port")
    several.add_argument("--processes", type=int, metavar="N", help="how many there are; 1: this one alone")
    several.add_argument("--process-id", type=int, metavar="I", help="which this is, from 0")


def _add_bench_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--parts",
        nargs="+",
        default=["step"],
        choices=["step", "products", "shards", "batches", "loop"],
        help="what to measure; products: the matrix products of the step, each alone; shards uses the tokenizer of "
        "the workdir, batches and loop its shards",
    )
    bench.add_argument(
        "--torch", default="", metavar="PYTHON", help="an interpreter with PyTorch, whose step to measure too"
    )
    bench.add_argument("--seconds", type=float, default=20.0, help="of each comparison, about")
    bench.add_argument("--megabytes", type=float, default=20.0, help="of text that the part shards writes")
    bench.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def _add_doctor_arguments(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--hosts", type=int, default=0, metavar="N", help="that the run will have")
    doctor.add_argument("--devices", type=int, default=0, metavar="N", help="over all hosts; default: this machine's")
    doctor.add_argument("--topology", default="", metavar="NAME", help="of a TPU: memory and time of a step, as plan")
    doctor.add_argument("--slices", type=int, default=1, metavar="N", help="of that topology")
    doctor.add_argument("--rows", type=int, default=200_000, metavar="N", help="to look through for what comes twice")
    doctor.add_argument("--json", action="store_true", help="one line of JSON instead of text")


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--topology", default="", metavar="NAME", help="such as v5e:2x4; a wrong one lists them")
    plan.add_argument("--slices", type=int, default=1, metavar="N", help="of that topology, over the network between")
    plan.add_argument("--compare", choices=["stock"], help="the step of run_mlm_flax.py too")
    plan.add_argument(
        "--sweep", nargs="+", default=[], metavar="KEY=V,V", help="topology, per_chip_batch, mesh, any key"
    )
    plan.add_argument("--price", type=float, metavar="DOLLARS", help="of a chip for an hour")
    plan.add_argument("--records", type=int, metavar="N", help="rows of the training split; default: of the workdir")
    plan.add_argument("--no-search", action="store_true", help="if it doesn't fit, don't look for what would")
    plan.add_argument("--json", action="store_true", help="one line of JSON instead of tables")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
