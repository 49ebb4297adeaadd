"""`export`: write a checkpoint as a transformers folder, check it, push it to the Hub."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlm import cluster
from mlm import config as configs
from mlm.commands import common
from mlm.doctor import preflight
from mlm.errors import InputError
from mlm.export import push
from mlm.paths import UPath
from mlm.pretrained import locate
from mlm.text import say
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from mlm.pretrained.load import Pretrained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser, required=False)
    which = parser.add_mutually_exclusive_group()
    common.add_step_flag(which, "the workdir, exported to export-N")
    which.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint of the lowest evaluation loss, not the newest; of a classifier it is always the best",
    )
    which.add_argument(
        "--milestones",
        action="store_true",
        help="export each milestone of the workdir to export-STEP; with --push, each goes to a branch step-STEP",
    )
    parser.add_argument(
        "--to",
        type=common.path,
        default="",
        metavar="DIR",
        help="folder to write; default: export, or export-N, in the workdir, which otherwise is only read",
    )
    parser.add_argument(
        "--torch",
        type=common.path,
        default="",
        metavar="PYTHON",
        help="Python with PyTorch to verify the export in",
    )
    parser.add_argument(
        "--push", default="", metavar="USER/NAME", help="upload it to the Hugging Face Hub"
    )
    parser.add_argument(
        "--revision",
        default="",
        metavar="BRANCH",
        help="with --push: the branch to upload to, such as step-1000; made if it is missing; default: main",
    )
    parser.add_argument(
        "--public",
        action="store_true",
        help="with --push: to a public repository, not a private one",
    )
    common.add_host_flags(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    workdir = Workdir(args.workdir, create=False)
    task = configs.CLASSIFICATION if locate.is_classifier(workdir) else configs.PRETRAINING
    common.join(args, overrides, task=task)
    if others := [override for override in overrides if not override.startswith(("pod.", "hub."))]:
        raise InputError(
            f"--config.{others[0]}: export writes the checkpoint as it is; only pod.* and hub.* can be set."
        )
    if (args.public or args.revision) and not args.push:
        raise InputError("--public, --revision: need --push=USER/NAME.")
    if args.milestones and (args.revision or args.to):
        raise InputError(
            "--milestones: names the folders and branches; leave out --revision and --to."
        )
    if args.push:
        push.check(args.push, args.revision)  # before anything that takes time
    config = ConfigDict()
    if args.config or overrides or args.processes > 1:
        config = common.read_config(args, overrides, task=task)
    preflight.refuse(preflight.Case(args.name, ConfigDict(), workdir, args))
    with contextlib.nullcontext() if args.to else common.locked(workdir):
        if args.processes > 1:
            from mlm.cluster import distributed

            distributed.initialize(config, workdir, saves=False, entry=args.entry)
        steps = locate.milestones(workdir) if args.milestones else [args.step]
        if not steps:
            raise InputError(
                f"--milestones: none was kept in {workdir.checkpoints}; name a step with --step."
            )
        hub = {
            key: value for key, value in configs.flatten(config).items() if key.startswith("hub.")
        }
        models = [
            write_export(
                workdir, args, step=step, best=args.best, torch_python=args.torch, changes=hub
            )
            for step in steps
        ]
    for step, model in zip(steps, models, strict=True) if args.process_id == 0 else ():
        folder = args.to or workdir.export_of(step)
        print(folder)
        if args.push:
            address = push.push(
                UPath(folder),
                args.push,
                public=args.public,
                revision=f"step-{step}" if args.milestones else args.revision,
                message=f"Export of mlm, step {model.step}",
            )
            print(address)


def write_export(
    workdir: Workdir,
    args: argparse.Namespace,
    *,
    step: int | None = None,
    best: bool = False,
    torch_python: str = "",
    changes: dict[str, object] | None = None,
) -> Pretrained:
    """Exports a checkpoint (see `load.from_workdir`) from process 0; returns its model in all of them.

    `changes` are of keys that its card shows.
    """
    from mlm.export import export

    model = export.load_checkpoint(workdir, args.entry, step=step, best=best)
    if changes:
        run_config = configs.unflatten(configs.flatten(model.run_config) | changes)
        model = dataclasses.replace(model, meta=model.meta | {"config": run_config})
    if cluster.is_primary():
        folder = UPath(getattr(args, "to", "") or workdir.export_of(step))
        for line in export.export_checkpoint(model, workdir, folder, torch_python=torch_python):
            say(f"export: {line}")
    cluster.barrier("exported")
    return model
