"""What commands share. They import jax and TensorFlow in functions, so that a mistake is reported at once."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlm import cluster
from mlm import config as configs
from mlm.cluster import detect, watch
from mlm.cluster.fingerprints import host_fingerprint
from mlm.config_rules import SOURCES, lanes_of_shares
from mlm.data import tokenizer
from mlm.data.manifest import Manifest, check_config, join_folders, load_manifest, verify
from mlm.doctor import preflight
from mlm.engine import dask_engine
from mlm.engine.engine import Engine, open_pool
from mlm.entry import Entry
from mlm.errors import DamageError, InputError, StopError
from mlm.paths import expand, expand_source, is_remote
from mlm.pretrained import checkpoint_files, locate
from mlm.text import printable, say
from mlm.workdir import Workdir, lock

if TYPE_CHECKING:  # which imports jax
    from mlm.training.task import Task

INIT_FROM = "train.init_from"
# What folders that are read together must have in common.
SHARED_FIELDS = ("tokenizer_fingerprint", "length", "special_ids", "all_special_ids", "vocab_size")


def path(text: str, expanded: Callable[[str], str] = expand) -> str:
    """Returns the path of a flag, ~ expanded; the `type` of argparse."""
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}.") from None


source = functools.partial(path, expanded=expand_source)  # of a flag such as --pairs=jsonl:~/x


def check_sources(flag: str, names: Sequence[str]) -> None:
    """Raises InputError for a name that is no source of a corpus."""
    for name in names:
        if not SOURCES[0]((name,)):
            raise InputError(f"{flag} {name}: must be {SOURCES[1].removeprefix('a tuple of ')}.")


def add_config_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds --config and --workdir; a --config that is not `required` defaults to the workdir's."""
    file = (
        "config file, such as configs/quickstart.py"
        if required
        else "config file; default: that of the workdir"
    )
    parser.add_argument("--config", type=path, required=required, metavar="FILE", help=file)
    add_workdir_flag(parser)


def add_workdir_flag(
    parser: argparse.ArgumentParser, text: str = "folder of the run, local or gs://"
) -> None:
    parser.add_argument("--workdir", type=path, default="", metavar="DIR", help=text)


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    detected = (
        "Detected on TPU VMs, GKE TPUs, Slurm and Open MPI; these flags override what is detected."
    )
    group = parser.add_argument_group("several processes", detected)
    group.add_argument(
        "--coordinator",
        default="",
        metavar="HOST[:PORT]",
        help="where process 0 listens; the default port is config.pod.port",
    )
    group.add_argument(
        "--processes", type=int, metavar="N", help="number of processes; 1 runs this one alone"
    )
    group.add_argument("--process-id", type=int, metavar="I", help="index of this process, from 0")


def add_engine_flags(
    parser: argparse.ArgumentParser,
    description: str = "What reads the corpus; default: the cores of the run's hosts.",
) -> None:
    group = parser.add_argument_group("engine", description)
    group.add_argument(
        "--engine", default="", metavar="tls://HOST:PORT", help="scheduler of a Dask cluster"
    )
    group.add_argument(
        "--engine-certificates",
        type=path,
        default="",
        metavar="DIR",
        help="folder of ca.pem, cert.pem and key.pem; default: WORKDIR/hosts/certificates",
    )


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    add_host_flags(parser)
    parser.add_argument(
        "--skip-batches",
        action="append",
        default=[],
        metavar="A:B",
        help="leave out batches A to B; may be repeated",
    )


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=path,
        default="",
        metavar="MODEL",
        help="workdir, WORKDIR@STEP, folder or name on the Hugging Face Hub; default: the checkpoint of the workdir",
    )
    add_step_flag(parser)


def add_step_flag(
    parser: argparse.ArgumentParser, model: str = "the workdir, or of --model if that is one"
) -> None:
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help=f"step of the checkpoint, of {model}; default: the newest, or of a classifier the best",
    )


def named_model(args: argparse.Namespace) -> str:
    """Returns what --model and --step name; "" for the newest checkpoint of the workdir."""
    return (
        args.model if args.step is None else locate.at_step(args.model or args.workdir, args.step)
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON instead of text"
    )


def open_run(
    args: argparse.Namespace, overrides: list[str], *, task: str = configs.PRETRAINING
) -> tuple[ConfigDict, Workdir]:
    """Joins the other processes if the command has flags for them; returns the config and the workdir, created."""
    if "processes" in args:
        join(args, overrides, task=task)
    config = read_config(args, overrides, task=task, starts=True, says=True)
    if getattr(args, "skip_batches", []):
        ranges = tuple(dict.fromkeys([*config.data.skip_batches, *args.skip_batches]))
        config = configs.replace(config, {"data.skip_batches": ranges})
    # tries whether a bucket can be written
    workdir = Workdir(args.workdir, create=is_remote(args.workdir) or None)
    if "averaged" in checkpoint_files.newest_meta(workdir.checkpoints):  # parameters alone
        raise InputError(
            f"--workdir={args.workdir}: holds an average of checkpoints, which can't be trained further; "
            f"start from it with --config.train.init_from={workdir.root} in another --workdir."
        )
    preflight.refuse(preflight.Case(args.name, config, workdir, args))
    return config, Workdir(args.workdir)


def join(args: argparse.Namespace, overrides: list[str], *, task: str) -> None:
    """Detects which process of the run this is, sets `args.processes` and `args.process_id`, and meets the others."""
    place = detect.detect(
        coordinator=args.coordinator, processes=args.processes, process_id=args.process_id
    )
    args.processes = place.processes
    args.process_id = place.process_id
    if place.processes > 1:
        say(f"mlm {args.name}: {printable(place.sentence)}")
    problem = None
    try:
        config = read_config(args, overrides, task=task)
    except StopError as error:  # which the other processes shall hear
        config = configs.load(str(configs.BASE), [])
        problem = error
    watch.current.join(place, args.workdir, config.pod)
    if watch.current.service is not None:
        if problem is not None:
            raise problem
        flags = {"--processes": str(place.processes)}
        fingerprint = host_fingerprint(config, args.name, args.workdir, flags)
        watch.current.service.agree("config", fingerprint)


@contextlib.contextmanager
def open_engine(
    args: argparse.Namespace, config: ConfigDict, workdir: Workdir
) -> Iterator[Engine | None]:
    """Yields what runs the corpus's tasks, in process 0 alone: the cluster of --engine, that of the run, or a pool."""
    workers = config.shards.workers
    folder = args.engine_certificates or str(workdir.root / "hosts" / "certificates")
    cluster.progress(watch.UNTIMED)
    if watch.current.cluster.processes > 1 and not args.engine:
        context = dask_engine.open_run_engine(folder, config.pod, workers)
    elif not cluster.is_primary():
        context = contextlib.nullcontext()
    elif args.engine:
        context = dask_engine.connect(args.engine, timeout=60.0, certificates=folder)
    else:
        context = open_pool(workers)
    with context as engine:
        yield engine
        cluster.barrier("data")


def read_config(
    args: argparse.Namespace,
    overrides: list[str],
    *,
    task: str = configs.PRETRAINING,
    starts: bool = False,
    says: bool = False,
) -> ConfigDict:
    """Returns the config of --config, or without it the workdir's.

    A command that `starts` needs train.init_from. With `says`, process 0 prints what the config takes from that model,
    or why it is nothing.
    """
    if args.config is None:
        return configs.load_saved(Workdir(args.workdir, create=False).config, overrides, task=task)
    step = getattr(args, "step", None) if starts else None
    remarks = []

    def derive(
        flat: dict[str, Any], overridden: Collection[str], file: dict[str, Any]
    ) -> dict[str, Any]:
        init_from = flat[INIT_FROM]
        if not init_from and step is None:
            return {}
        from mlm.pretrained import inherit

        named = init_from if step is None else f"{init_from}@{step}"
        try:
            if not inherit.saved(args.workdir, named):
                named = locate.at_step(init_from, step)
            flat = flat | {INIT_FROM: named}
            inherited = inherit.values(
                flat, overridden, file[INIT_FROM], task=task, workdir=args.workdir
            )
        except (InputError, DamageError) as error:
            if starts:
                raise
            remarks.append(f"the sizes are those of the config: {error}")
            return {}
        if keys := ", ".join(f"{key}={value}" for key, value in inherited.items()):
            remarks.append(f"from train.init_from = {named}: {keys}")
        return {INIT_FROM: named} | inherited

    config = configs.load(args.config, overrides, task=task, derive=derive)
    if says and not getattr(args, "process_id", 0):
        for remark in remarks:
            say(printable(remark))
    return config


def refuse_classifier(config: ConfigDict) -> None:
    """Raises InputError for a config of `classify` in a command that would take its step for pretraining's."""
    if config.classify.train:
        what = "this command works on the step of pretraining, not of a classifier"
        raise InputError(
            f"config.classify.train = {config.classify.train}: {what}; leave it empty (--config.classify.train=) to "
            "pretrain a model of these sizes."
        )


def locked(workdir: Workdir) -> contextlib.AbstractContextManager[None]:
    """Locks the workdir on behalf of all processes of the run: process 0 does it."""
    return lock(workdir.root) if cluster.is_primary() else contextlib.nullcontext()


def load_data(config: ConfigDict, workdir: Workdir) -> Manifest:
    """Returns the manifest of the run's shards: of its folder or mixture, and of its validation sets."""
    load = functools.partial(load_manifest, tokenizer_folder=workdir.tokenizer_folder)
    if not (config.data.mixture or config.evaluate.sets):
        return load(workdir.shards_of(config))
    return _load_mixture(config, workdir, load)


def _load_mixture(
    config: ConfigDict, workdir: Workdir, load: Callable[[str], Manifest]
) -> Manifest:
    """Returns the folders and sets as one manifest; raises InputError if they can't be read together."""
    folders = config.data.mixture or ((workdir.shards_of(config), 1.0),)
    parts = [(share, load(folder)) for folder, share in folders]
    sets = {name: load(folder) for name, folder in config.evaluate.sets}
    first, *others = (manifest for _, manifest in parts)
    for key, manifests in (("data.mixture", others), ("evaluate.sets", sets.values())):
        for manifest, field in itertools.product(manifests, SHARED_FIELDS):
            value = str(getattr(manifest, field))
            expected = str(getattr(first, field))
            if value != expected:
                raise InputError(
                    f"config.{key}: {manifest.folder} has the {field} {value:.60}, but {first.folder} {expected:.60}; "
                    "write one of them again with the tokenizer and the shards.length of the other."
                )
    return join_folders(parts, sets)


def open_data(config: ConfigDict, workdir: Workdir) -> Manifest:
    """Returns the manifest of the shards, every file verified, and checks that tokenizer and config fit them."""
    manifest = load_data(config, workdir)
    check_config(manifest, config)
    fingerprint = workdir.tokenizer_folder and tokenizer.fingerprint(workdir.tokenizer_folder)
    if fingerprint and manifest.tokenizer_fingerprint not in (None, fingerprint):
        raise InputError(
            f"{manifest.folder}: was not made with the tokenizer in {workdir.tokenizer}; set shards.dir to that "
            "tokenizer's shards, or tokenizer.path to these shards' tokenizer."
        )
    parts = manifest.parts
    lanes = lanes_of_shares([part.share for part in parts], config.data.lanes)
    for part, count in zip(parts, lanes, strict=True):
        _require_shards(part.manifest, "train", count, f"data.lanes = {config.data.lanes}")
    folders = manifest.folders
    for folder in folders:
        _require_shards(folder, "validation", 1, "shards.validation_count")
    for folder in folders:
        verify(folder)
    return manifest


def _require_shards(manifest: Manifest, split: str, minimum: int, key: str) -> None:
    count = sum(shard.records > 0 for shard in manifest.splits[split].shards)
    if count < minimum:
        raise InputError(
            f"{manifest.folder}: the {split} split has {count} shards with records, config.{key} asks for {minimum}."
        )


def train_and_push(config: ConfigDict, workdir: Workdir, task: Task, entry: Entry) -> None:
    """Trains, and pushes the model to the Hub meanwhile if the config names a repository."""
    from mlm.training import train

    pushes = contextlib.nullcontext()
    if config.hub.name and cluster.is_primary():
        from mlm.export.hub import Pushes

        pushes = Pushes(config.hub.name, workdir, entry)
    with pushes as on_complete:
        train.train(config, workdir, task, on_complete)
    cluster.barrier("pushed")


def fingerprints(manifest: Manifest | None) -> tuple[str, str]:
    """Returns the fingerprints of shards, held-out ones included, and tokenizer: the same on every host of a run."""
    if manifest is None:
        return "", ""
    sets = [held_out.fingerprint for held_out in manifest.sets.values()]
    tests = [manifest.fingerprint_of("test")] if "test" in manifest.splits else []
    return " ".join([manifest.fingerprint, *sets, *tests]), manifest.tokenizer_fingerprint
