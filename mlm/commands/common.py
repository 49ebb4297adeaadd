"""What several commands share: flags, config and workdir, the other processes of the run, the data.

The modules of the commands import jax, TensorFlow and what needs them within functions: a mistake is answered first.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlm import cluster
from mlm import config as configs
from mlm.cluster import detect, watch
from mlm.errors import InputError, StopError
from mlm.text import printable
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from mlm.data.manifest import Manifest


def add_config_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds --config and --workdir."""
    parser.add_argument("--config", required=required, metavar="FILE", help="such as configs/quickstart.py")
    parser.add_argument("--workdir", default="", metavar="DIR", help="folder of the run, local or gs://")


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that override the detected place of a process among several."""
    several = parser.add_argument_group(
        "several processes",
        "Detected on TPU VMs, on GKE's TPUs, under Slurm and under Open MPI; these flags override what is detected.",
    )
    several.add_argument("--coordinator", default="", metavar="HOST[:PORT]", help="of process 0; default: pod.port")
    several.add_argument("--processes", type=int, metavar="N", help="how many there are; 1: this one alone")
    several.add_argument("--process-id", type=int, metavar="I", help="which this is, from 0")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a command that pretrains."""
    add_config_flags(parser)
    add_host_flags(parser)
    parser.add_argument(
        "--skip-batches", action="append", default=[], metavar="A:B", help="leave these out; may be given several times"
    )


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --model."""
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL",
        help="a workdir, folder or hub name; default: the workdir's checkpoint",
    )


def open_run(
    args: argparse.Namespace, overrides: list[str], *, task: str = configs.PRETRAINING, meet: bool = True
) -> tuple[ConfigDict, Workdir]:
    """Joins the other processes, reads the config and makes the workdir; returns the last two.

    Args:
      args: of a command with the flags of `add_config_flags`, and of `add_host_flags` if several processes can do it.
      overrides: "group.key=value".
      task: whose rules the config is held to.
      meet: as for `join`.

    Raises:
      InputError: a flag, a key or a value is wrong, or the workdir can't be written.
    """
    if "processes" in args:
        join(args, overrides, task=task, meet=meet, create=True)
    config = read_config(args, overrides, task=task)
    if getattr(args, "skip_batches", []):
        ranges = tuple(dict.fromkeys([*config.data.skip_batches, *args.skip_batches]))
        config = configs.replace(config, {"data.skip_batches": ranges})
    return config, Workdir(args.workdir)


def join(args: argparse.Namespace, overrides: list[str], *, task: str, meet: bool, create: bool) -> None:
    """Finds out which process of the run this is, says so, and starts to connect to the others.

    Args:
      args: whose `processes` and `process_id` are set to what was found.
      overrides: "group.key=value".
      task: whose rules the config is held to.
      meet: the processes connect to one another; otherwise they share nothing but the workdir.
      create: the workdir, if it isn't there.
    """
    flags = {"coordinator": args.coordinator, "processes": args.processes, "process_id": args.process_id}
    place = detect.detect(**flags, meets=meet)
    args.processes, args.process_id = place.processes, place.process_id
    if place.processes > 1:
        print(f"mlm {args.name}: {printable(place.sentence)}", file=sys.stderr, flush=True)
    try:
        config = read_config(args, overrides, task=task)
    except StopError:  # the command finds it too, when the other processes can be notified
        config = configs.load(str(configs.BASE), [])
    if place.processes > 1:  # what proves that a process belongs to the run lies in its workdir
        Workdir(args.workdir, create=create)
    watch.current.join(place, args.workdir, config.pod)


def read_config(args: argparse.Namespace, overrides: list[str], *, task: str = configs.PRETRAINING) -> ConfigDict:
    """Returns the config of --config, or without one that of the workdir; raises InputError or DamageError."""
    if args.config is None:
        return configs.load_saved(Workdir(args.workdir, create=False).config, overrides, task=task)
    return configs.load(args.config, overrides, task=task)


def locked(workdir: Workdir) -> contextlib.AbstractContextManager[None]:
    """Holds the workdir for the run: its first process does that for all."""
    return workdir.locked() if cluster.is_primary() else contextlib.nullcontext()


def open_data(config: ConfigDict, workdir: Workdir) -> Manifest:
    """Returns the manifest of the shards, every file of them verified, and the tokenizer known to be theirs.

    Raises:
      InputError: there are no shards, or they were made with another tokenizer or length.
      DamageError: a shard is not what was written.
    """
    from mlm.data import tokenizer
    from mlm.data.manifest import load_manifest, verify

    folder = workdir.shards_of(config)
    there = (workdir.tokenizer / "tokenizer.json").is_file()
    manifest = load_manifest(folder, tokenizer_folder=str(workdir.tokenizer) if there else None)
    if manifest.length != config.shards.length:
        raise InputError(
            f"config.shards.length = {config.shards.length}: the shards in {folder} hold {manifest.length}."
        )
    if there and manifest.tokenizer_fingerprint not in (None, tokenizer.fingerprint(str(workdir.tokenizer))):
        raise InputError(
            f"{folder}: was not made with the tokenizer in {workdir.tokenizer}; use those that belong together."
        )
    for split, least, key in (("train", config.data.lanes, "data.lanes"), ("validation", 1, "shards.validation_count")):
        shards = [shard for shard in manifest.splits[split].shards if shard.records]
        if len(shards) < least:
            raise InputError(
                f"{folder}: the {split} split has {len(shards)} shards with records, config.{key} asks for {least}."
            )
    verify(manifest, deep=True)
    return manifest


def keep_compiled(workdir: Workdir) -> None:
    """Keeps compiled programs in the workdir, unless JAX_COMPILATION_CACHE_DIR names another folder."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(workdir.root / "xla_cache"))
