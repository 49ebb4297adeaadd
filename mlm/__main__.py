"""`python -m mlm COMMAND`: each command is a module of mlm/commands/, imported when it is called."""

import argparse
import importlib
import logging
import os
import signal
import sys
import traceback
import types

from mlm.errors import InputError, PreemptedError, StopError, of_storage
from mlm.text import prepare_streams, say, use_utf8

# each is mlm/commands/NAME.py, with `add_arguments(parser)` and `main(args, overrides)`
COMMANDS = {
    "run": "run all stages, skipping those that are done for this config",
    "tokenizer": "train a tokenizer on the corpus",
    "shards": "tokenize and chunk the corpus, write TFRecord shards",
    "doctor": "check the data and the settings of a run before it starts",
    "train": "train, evaluate, checkpoint, resume",
    "classify": "fine-tune a model to classify texts, predict a number, or label words",
    "glue": "fine-tune on the tasks of GLUE by a protocol, published or your own, as one table",
    "evaluate": "score a checkpoint or a model folder on a split",
    "compare": "judge masked language models by the same words of any text",
    "sweep": "run a command over a grid of settings and seeds: one table",
    "predict": "fill <mask> in texts, or classify them",
    "export": "write a transformers folder and verify it",
    "average": "average checkpoints into one",
    "bench": "time step, shards and batches beside the baselines",
    "plan": "compile the step for a TPU or GPU that is not attached: does it fit?",
    "verify": "check what the attached devices compute, and how fast",
    "report": "write curves and tables as one HTML page",
}
TRAIN = ("run", "train", "classify")
NO_CONFIG = ("average", "predict", "report")
# of one process, where TPUs want one on each host
ALONE = ("average", "bench", "compare", "doctor", "predict")
EXAMPLES = """examples:
  python -m mlm run --config=configs/quickstart.py --workdir=runs/quickstart
  python -m mlm train --config=configs/quickstart.py --workdir=runs/quickstart --config.train.steps=8000
  python -m mlm predict --workdir=runs/quickstart "Returns the <mask> of the array."
"""


def main(argv: list[str] | None = None, *, pretraining: type | None = None) -> int:
    """Runs one command, with a subclass of `Pretraining` in the place of mlm's own if given; returns its exit code."""
    if argv is None:
        use_utf8()
    prepare_streams()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0].startswith("--config."):
        parser("").print_help(sys.stderr)
        return InputError.code
    if arguments[0] in ("-h", "--help"):  # at once: what a command needs is imported below
        parser("").parse_args(arguments)
    from mlm import config as configs
    from mlm import logs
    from mlm.cluster import watch

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for name in ("asyncio", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("absl").addFilter(logs.Once())  # orbax also logs what it raises, with stacks
    flags, overrides = configs.split_overrides(arguments)
    # Until the training loop takes it over; a program that is more than this command gets its own back.
    with watch.handling(_stop, *watch.STOP_SIGNALS, restores=argv is not None):
        return _run(flags, overrides, argv, pretraining)


def _run(
    flags: list[str], overrides: list[str], argv: list[str] | None, pretraining: type | None
) -> int:
    from mlm import entry, paths, platforms
    from mlm.cluster import detect, watch

    args = argparse.Namespace(name=flags[0])
    watching = watch.begin(args.name)
    paths.forget()
    try:
        args, unknown = parser(args.name).parse_known_args(flags)
        if unknown:
            raise InputError(_about_flag(unknown[0]))
        platforms.check()
        args.entry = entry.open_entry(pretraining, argv)
        args.entry.check_command(args.name, getattr(args, "command", ""))
        if args.name in ALONE:
            detect.refuse_part_of_a_slice()
        if overrides and args.name in NO_CONFIG:
            raise InputError(
                f"--config.{overrides[0]}: {args.name} takes no --config.KEY; leave it out."
            )
        importlib.import_module(f"mlm.commands.{args.name}").main(args, overrides)
        sys.stdout.flush()  # Python's own flush at the exit would be too late for an exit code
        return watching.end(0)
    except BrokenPipeError:  # as in `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if "processes" in args:  # a lost ssh connection is no success of a run
            return watching.failed(
                StopError("nobody reads the output any more; run the same command to continue."), 1
            )
        return watching.end(0)
    except (Exception, KeyboardInterrupt) as caught:
        error = of_storage(caught) or caught
        interrupt = caught  # a library that is being imported raises an ImportError from it
        while interrupt and not isinstance(interrupt, KeyboardInterrupt):
            interrupt = interrupt.__context__
        if isinstance(error, StopError):
            text = str(error)
            code = error.code
        elif interrupt:
            error = interrupt
            text = "interrupted; run the same command to continue."
            code = PreemptedError.code
        else:
            traceback.print_exc()
            message = (str(error).splitlines() or [""])[0]  # jax puts a note after it
            text = f"{type(error).__name__}: {message:.300}"
            code = 1
        say(f"mlm {args.name}: {text}")
        return watching.failed(error, code)


def _about_flag(flag: str) -> str:
    """Returns the sentence about a flag that the command does not have."""
    from mlm import config as configs

    name = flag.partition("=")[0].lstrip("-")
    near = configs.suggestion(name, configs.KEYS).replace("did you mean ", "did you mean --config.")
    return f"{flag}: there is no such flag{near or '; --help lists them.'}"


def _stop(number: int, frame: types.FrameType | None) -> None:
    """Exits at once: outside the training loop there is nothing to save, and imports swallow exceptions."""
    from mlm.cluster import watch

    watch.current.signaled(number)
    step = watch.current.step
    when = "before it trained a step" if step is None else f"after step {step}"
    message = "stopped; run the same command again."
    if watch.current.command in TRAIN:
        message = f"stopped {when}; run the same command to continue."
    watch.current.end_now("signal", f"{signal.Signals(number).name}: stopped {when}", message)


def parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of all commands, with the flags of `command` only, whose module is imported."""
    root = argparse.ArgumentParser(
        prog="python -m mlm",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Pretrain RoBERTa-class masked language models. --config.group.key=value sets a key of the config.",
    )
    table = root.add_subparsers(metavar="COMMAND", dest="name", required=True)
    for name, description in COMMANDS.items():
        sub = table.add_parser(name, help=description, description=description)
        if name == command:
            importlib.import_module(f"mlm.commands.{name}").add_arguments(sub)
    return root


if __name__ == "__main__":
    sys.exit(main())
