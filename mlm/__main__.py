"""`python -m mlm COMMAND`: the command table. One line a command; what it does lives in the module it names."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import types

from ml_collections import ConfigDict

from mlm import config as configs
from mlm import watch
from mlm.errors import PreemptedError, StopError
from mlm.workdir import Workdir

EXAMPLES = """examples:
  python -m mlm run --config=configs/quickstart.py --workdir=runs/quickstart
  python -m mlm train --config=configs/quickstart.py --workdir=runs/quickstart --config.train.steps=8000
  python -m mlm predict --workdir=runs/quickstart "Returns the <mask> of the array."
"""
MODEL = {"default": "", "metavar": "FOLDER", "help": "a transformers folder; default: newest checkpoint"}
HOST_FLAGS = {"coordinator": "", "processes": 1, "process_id": 0}  # for a command that has none


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code (README, "Exit codes")."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for name in ("absl", "asyncio", "concurrent.futures"):  # orbax logs what it raises as well, with its stacks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, _stop)  # until the training loop takes it over
    argv, overrides = split_overrides(argv)
    args = parser().parse_args(argv)
    place = {key: getattr(args, key, default) for key, default in HOST_FLAGS.items()}
    watching = watch.begin(args.name, args.workdir, processes=place["processes"], process=place["process_id"])
    try:
        watching.connect(place["coordinator"])
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

    def command(name: str, function: types.FunctionType, words: str, *, needs_config: bool) -> argparse.ArgumentParser:
        sub = table.add_parser(name, help=words, description=words)
        sub.add_argument("--config", required=needs_config, metavar="FILE", help="such as configs/quickstart.py")
        sub.add_argument("--workdir", default="", metavar="DIR", help="folder of the run, local or gs://")
        sub.set_defaults(command=function, name=name)
        return sub

    command("run", _run, "all stages, skipping what is done and unchanged", needs_config=True)
    command("tokenizer", _tokenizer, "train a tokenizer on the corpus", needs_config=True)
    command("shards", _shards, "tokenize, chunk and write TFRecord shards", needs_config=True)
    command("train", _train, "train, evaluate, checkpoint, resume", needs_config=True)
    evaluate = command("evaluate", _evaluate, "score a checkpoint or a model folder on a split", needs_config=False)
    evaluate.add_argument("--model", **MODEL)
    evaluate.add_argument("--split", default="validation")
    predict = command("predict", _predict, "fill <mask> in texts, or in lines from a pipe", needs_config=False)
    predict.add_argument("texts", nargs="*")
    predict.add_argument("--model", **MODEL)
    predict.add_argument("--top-k", type=int, default=5)
    export = command("export", _export, "write a transformers folder and prove it", needs_config=False)
    export.add_argument("--torch", default="", metavar="PYTHON", help="an interpreter with PyTorch to prove it in")
    bench = command("bench", _bench, "measure step, shards and batches beside the stock ones", needs_config=True)
    _add_bench_arguments(bench)
    plan = command("plan", _plan, "compile the step for a TPU that isn't there: does it fit?", needs_config=True)
    _add_plan_arguments(plan)
    command("report", _report, "curves and tables as one HTML page", needs_config=False)
    for name in ("run", "shards", "train", "evaluate", "export"):
        _add_host_flags(table.choices[name])
    return root


def _add_host_flags(command: argparse.ArgumentParser) -> None:
    """Adds what a process is told of its place among several; the same command is started on every host."""
    several = command.add_argument_group("several processes")
    several.add_argument("--coordinator", default="", metavar="HOST:PORT", help="address of process 0, and a free port")
    several.add_argument("--processes", type=int, default=1, metavar="N", help="how many there are")
    several.add_argument("--process-id", type=int, default=0, metavar="I", help="which this is, from 0")


def _add_bench_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--parts",
        nargs="+",
        default=["step"],
        choices=["step", "shards", "batches", "loop"],
        help="what to measure; shards uses the tokenizer of the workdir, batches and loop its shards",
    )
    bench.add_argument(
        "--torch", default="", metavar="PYTHON", help="an interpreter with PyTorch, whose step to measure too"
    )
    bench.add_argument("--seconds", type=float, default=20.0, help="of each comparison, about")
    bench.add_argument("--megabytes", type=float, default=20.0, help="of text that the part shards writes")
    bench.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--topology", default="", metavar="NAME", help="such as v5e:2x4; a wrong one lists them")
    plan.add_argument("--compare", choices=["stock"], help="the step of run_mlm_flax.py too")
    plan.add_argument(
        "--sweep", nargs="+", default=[], metavar="KEY=V,V", help="topology, per_chip_batch, mesh, any key"
    )
    plan.add_argument("--price", type=float, metavar="DOLLARS", help="of a chip for an hour")
    plan.add_argument("--records", type=int, metavar="N", help="rows of the training split; default: of the workdir")
    plan.add_argument("--no-search", action="store_true", help="if it doesn't fit, don't look for what would")
    plan.add_argument("--json", action="store_true", help="one line of JSON instead of tables")


def _open(args: argparse.Namespace, overrides: list[str]) -> tuple[ConfigDict, Workdir]:
    """Returns (config, workdir) for a command that writes; the config is checked before anything else is touched."""
    return configs.load(args.config, overrides), Workdir(args.workdir)


def _locked(workdir: Workdir) -> contextlib.AbstractContextManager[None]:
    """Holds the workdir for the run: its first process does that for all."""
    return workdir.locked() if watch.current.process == 0 else contextlib.nullcontext()


def _run(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = _open(args, overrides)
    from mlm import stages

    begin = time.monotonic()
    with _locked(workdir):
        hosts = stages.Hosts(args.processes, args.process_id)
        stages.make_tokenizer(config, workdir, hosts)
        stages.make_shards(config, workdir, hosts)
        watch.current.wait_for_all("data")
        manifest = stages.open_data(config, workdir)
        from mlm import distributed, run

        distributed.initialize(config, workdir, manifest, saves=True)
        run.train(config, workdir, manifest)
        run.finish(workdir, manifest)
    if args.process_id == 0:
        print(f"\n{time.monotonic() - begin:.0f} s in all")


def _tokenizer(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = _open(args, overrides)
    from mlm import stages

    with workdir.locked():
        stages.make_tokenizer(config, workdir)


def _shards(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = _open(args, overrides)
    from mlm import stages

    hosts = stages.Hosts(args.processes, args.process_id)
    with workdir.locked(part=str(args.process_id) if args.processes > 1 else ""):
        stages.make_tokenizer(config, workdir, hosts)
        stages.make_shards(config, workdir, hosts)


def _train(args: argparse.Namespace, overrides: list[str]) -> None:
    config, workdir = _open(args, overrides)
    from mlm import stages

    manifest = stages.open_data(config, workdir)  # faults of the data are told before jax is imported
    from mlm import distributed, run

    distributed.initialize(config, workdir, manifest, saves=True)
    with _locked(workdir):
        run.train(config, workdir, manifest)


def _evaluate(args: argparse.Namespace, overrides: list[str]) -> None:
    workdir = Workdir(args.workdir, create=False)
    config = configs.load(args.config, overrides) if args.config else configs.load_saved(workdir.config, overrides)
    from mlm import stages

    manifest = stages.open_data(config, workdir)
    from mlm import distributed, evaluate

    distributed.initialize(config, workdir, manifest, saves=False)
    evaluate.run(config, workdir, manifest, model=args.model, split=args.split)


def _predict(args: argparse.Namespace, overrides: list[str]) -> None:
    workdir = None if args.model else Workdir(args.workdir, create=False)
    from mlm import predict, trained

    model = trained.from_folder(args.model) if workdir is None else trained.from_checkpoint(workdir)
    predict.run(model, texts=args.texts, top_k=args.top_k, stdin=sys.stdin, stdout=sys.stdout)


def _export(args: argparse.Namespace, overrides: list[str]) -> None:
    workdir = Workdir(args.workdir, create=False)
    with _locked(workdir):
        if args.coordinator:
            from mlm import distributed

            config = configs.load_saved(workdir.config, overrides)
            distributed.initialize(config, workdir, None, saves=False)
        from mlm import run

        run.export(workdir, torch_python=args.torch)
    if args.process_id == 0:
        print(workdir.export)


def _bench(args: argparse.Namespace, overrides: list[str]) -> None:
    config, manifest, folder = configs.load(args.config, overrides), None, ""
    if args.parts != ["step"]:
        from mlm import stages
        from mlm.data import tokenizer

        workdir = Workdir(args.workdir, create=False)
        if {"batches", "loop"} & set(args.parts):
            manifest = stages.open_data(config, workdir)
        if "shards" in args.parts:
            folder = str(workdir.tokenizer)
            tokenizer.load_fast(folder)  # told now, if it is missing
    from mlm import bench

    bench.run(
        config,
        args.parts,
        manifest,
        seconds=args.seconds,
        as_json=args.json,
        tokenizer_folder=folder,
        megabytes=args.megabytes,
        torch_python=args.torch,
    )


def _plan(args: argparse.Namespace, overrides: list[str]) -> None:
    config, manifest = configs.load(args.config, overrides), None
    from mlm.tpu import topology

    topology.prepare()  # before jax is imported
    if args.workdir:
        from mlm import stages

        manifest = stages.open_data(config, Workdir(args.workdir, create=False))
    from mlm import plan

    job = plan.make_job(config, manifest, records=args.records, price=args.price)
    wishes = {"compare": bool(args.compare), "sweep": args.sweep, "search": not args.no_search, "as_json": args.json}
    plan.run(config, job, name=args.topology, **wishes)


def _report(args: argparse.Namespace, overrides: list[str]) -> None:
    workdir = Workdir(args.workdir, create=False)
    from mlm import report

    report.write(workdir)
    print(workdir.report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
