"""`glue`: the tasks of GLUE by a protocol, published or your own, over seeds, as one table."""

import argparse
import json

from mlm import config as configs
from mlm import logs
from mlm.commands import common
from mlm.doctor import preflight
from mlm.errors import InputError, StopError
from mlm.glue.tasks import GLUE, NAMES, TASKS, load_protocol
from mlm.paths import UPath, canonical, write_text
from mlm.pretrained import locate
from mlm.text import show
from mlm.workdir import Workdir, lock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=common.path,
        required=True,
        metavar="MODEL",
        help="model to evaluate: workdir, WORKDIR@STEP, folder or Hub name",
    )
    common.add_workdir_flag(parser, "of the table and its runs")
    parser.add_argument(
        "--protocol",
        type=common.path,
        default="roberta",
        metavar="NAME",
        help=f"{', '.join(NAMES)} (configs/glue/), or a file like theirs; default: roberta",
    )
    parser.add_argument(
        "--tasks", nargs="+", default=list(GLUE), choices=list(TASKS), help="default: those of GLUE"
    )
    data = "copy of the data: hf:FOLDER as on the Hub, or jsonl:FOLDER with TASK/SPLIT.jsonl; default: from the Hub"
    parser.add_argument("--data", type=common.source, default="", metavar="FOLDER", help=data)
    parser.add_argument(
        "--config",
        type=common.path,
        default=str(configs.BASE),
        metavar="FILE",
        help="config of the runs; default: base.py",
    )
    common.add_json_flag(parser)


def _check_flags(args: argparse.Namespace, overrides: list[str]) -> None:
    """Raises InputError for a --workdir or --data that can't be used, by its name alone, or a key that is decided."""
    if locate.is_workdir(args.workdir):  # its glue.json has a table for each of its steps
        raise InputError(
            f"--workdir={args.workdir}: holds a trained model; name another folder for the table."
        )
    if args.data and args.data.partition(":")[0] not in ("hf", "jsonl"):
        raise InputError(
            f"--data={args.data}: must be hf:FOLDER, or jsonl:FOLDER with TASK/SPLIT.jsonl."
        )
    for override in overrides:
        key = override.partition("=")[0]
        is_tasks = key.startswith("classify.") and key != "classify.length"
        if is_tasks or key in ("train.init_from", "train.seed"):
            raise InputError(
                f"config.{key}: --model, the tasks or the protocol's seeds decide it; leave it out."
            )


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    from mlm.glue import glue
    from mlm.pretrained import load

    _check_flags(args, overrides)
    names = [name for name in TASKS if name in args.tasks]
    protocol = load_protocol(args.protocol)
    if (others := [name for name in names if name in protocol.from_mnli]) and "mnli" not in names:
        start = f"{others[0]} starts from MNLI's model in the protocol {args.protocol}"
        raise InputError(f"--tasks: {start}; name mnli, too.")
    settings = [f"{key}={value}" for key, value in next(protocol.cells(names[0], {})).items()]
    config = configs.load(args.config, [*settings, *overrides], task=configs.CLASSIFICATION)
    max_length = load.load(args.model, head=None, headers=True).longest_row
    started = configs.replace(config, {"train.init_from": args.model}, task=configs.CLASSIFICATION)
    preflight.refuse(preflight.Case(args.name, started, Workdir(args.workdir, create=None), args))
    for name in names:
        for split in TASKS[name].validation:
            glue.read(args.data, name, split)  # before anything is trained
    workdir = Workdir(args.workdir)
    folder, step = locate.split_step(locate.at_newest_step(args.model))
    model = locate.at_step(canonical(folder) if UPath(folder).is_dir() else folder, step)
    flags = [f"--config={args.config}", f"--config.train.init_from={model}"]
    flags += [f"--config.{override}" for override in overrides]
    with lock(workdir.root):
        table = glue.run(
            names,
            glue.Setup(
                protocol=args.protocol,
                data=args.data,
                root=workdir.root,
                flags=flags,
                overrides=configs.parse(config, overrides),
                longest=max_length,
            ),
        )
        table = glue.save(workdir.root, table | {"model": model})
    if step is not None:
        file = Workdir(folder, create=False).glue
        tables = logs.read_object(file)  # for its report and model card
        joined = glue.join(tables.get(str(step), {}), table)
        write_text(file, json.dumps(tables | {str(step): joined}) + "\n")
    if args.json:
        print(json.dumps(table))
    else:
        show(*glue.render(table))
    failed = {
        name: table["tasks"][name]["code"] for name in names if "failed" in table["tasks"][name]
    }
    if len(failed) < len(names):
        print(workdir.root / "submission")
    if failed:
        code = next(iter(failed.values()))
        raise StopError(
            f"{', '.join(failed)} failed; run the same command to repeat the failed runs.", code
        )
