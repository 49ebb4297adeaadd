"""A test for a subclass of `Pretraining`: what mlm promises of its own class, on a small model and made-up text."""

import contextlib
import hashlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.data import tfrecord, tokenizer
from mlm.data.manifest import DatasetInfo, Manifest, Shard, Split
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files, load
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding, train
from mlm.workdir import Workdir

DEVICES = 8
STEPS = 4
ROWS = 16
LENGTH = 32
VOCABULARY = 500
SHARDS = 4
# What differs from the config that is tested: these keys, and the GROUPS, which are those of configs/base.py.
SMALL = {
    "model.hidden_size": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "model.positions": LENGTH,
    "model.dtype": "float32",
    "shards.length": LENGTH,
    "shards.dir": "",
    "data.global_batch": ROWS,
    "data.lanes": SHARDS,
    "schedule.warmup": 0.0,
    "train.steps": STEPS,
    "evaluate.every": 0,
    "evaluate.batch": ROWS,
    "checkpoint.every": STEPS // 2,
    "log.every": 1,
    "log.tensorboard": False,
}
GROUPS = ("data", "train", "evaluate", "checkpoint", "log", "hub", "mesh")
# transformers' depends on the mesh
WITHOUT_DROPOUT = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
ROUNDING = 1e-4  # relative, of a metric in float32


def use_cpu_devices(count: int) -> None:
    """Gives jax so many CPU devices, if it has fewer and has not started; otherwise raises InputError."""
    with contextlib.suppress(RuntimeError):  # it has started
        jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise InputError(
            f"the test needs {count} devices, jax has {jax.device_count()}; call "
            f'jax.config.update("jax_num_cpu_devices", {count}) before it is used.'
        )


def check_task(
    pretraining: type[Pretraining], config: ConfigDict, changes: Mapping[str, Any] | None = None
) -> None:
    """Raises AssertionError that says what is not equal, of a subclass with a config made small.

    Eight devices must give the metrics of one, as must other batches, but for rounding; and a run that ended in the
    middle and was resumed must give the metrics and parameters of one that did not, to the bit. Metrics must be finite,
    of rows without predictions, too, and the masks of a record the same in whatever batch and row it is.

    Args:
      changes: config values, {"group.key": value}, that SMALL must not have, such as another number of layers.
    """
    use_cpu_devices(DEVICES)
    base = configs.flatten(configs.load(str(configs.BASE), []))
    groups = {key: value for key, value in base.items() if key.partition(".")[0] in GROUPS}
    groups["data.isolate_documents"] = config.data.isolate_documents
    dropout = WITHOUT_DROPOUT if config.model.implementation == "transformers" else {}
    config = configs.replace(config, groups | SMALL | dropout | dict(changes or {}))
    with tempfile.TemporaryDirectory(prefix="mlm-test-") as folder:
        manifest = write_shards(
            Path(folder, "shards"), vocab_size=VOCABULARY, length=config.shards.length
        )

        def make(keys: dict[str, Any], devices: int, workdir: str = "") -> Pretraining:
            changed = configs.replace(config, keys)
            return pretraining(
                changed,
                DatasetInfo.from_manifest(manifest),
                mesh=sharding.mesh_of(changed.mesh, jax.devices()[:devices]),
                word_starts_V=np.arange(VOCABULARY) % 3 > 0,
                workdir=Workdir(workdir or tempfile.mkdtemp(dir=folder)),
                manifest=manifest,
            )

        task = make({}, 1)
        differences = _differences_of_masks(task)
        logged = _train(task)
        whole = task.workdir
        expected = {name: value for name, value in logged.items() if value is not None}
        differences += [f"{name} is not finite" for name, value in logged.items() if value is None]

        # By shard_map and by the compiler; on CPUs, it aborts with three axes above 1 at small batches (jax 0.10.2).
        meshes = [{"train.accumulate": 2, "evaluate.batch": 3 * ROWS // 2}]
        if any(any(spec) for _, spec in task.module.partition_rules()):
            meshes.append({"mesh.fsdp": 4, "mesh.tensor": 2})
        for keys in meshes:
            values = _train(make(keys, DEVICES))
            title = ", ".join(
                [f"{DEVICES} devices", *(f"{key} = {value}" for key, value in keys.items())]
            )
            differences += [
                f"{title}: {name} is {values.get(name)}, and {value} on one device"
                for name, value in expected.items()
                if values.get(name) is None
                or not math.isclose(value, values[name], rel_tol=ROUNDING, abs_tol=1e-6)
            ]

        task.workdir = Workdir(f"{folder}/resumed")
        task.batches = _ending(task.batches)
        with contextlib.suppress(_EndError):
            _train(task)
        again = make({}, 1, f"{folder}/resumed")
        # the same programs, compiled already
        again.train_step = task.train_step
        again.eval_step = task.eval_step
        _train(again)
        differences += _differences_after_resume(whole, again.workdir)
    if differences:
        raise AssertionError(f"{pretraining.__qualname__}: " + "\n".join(differences))


def write_shards(folder: Path, *, vocab_size: int, length: int) -> Manifest:
    """Writes shards of made-up text: documents of half a row, with frequent tokens; the last row has special ones."""
    rng = np.random.default_rng(0)
    splits = {}
    ordinary = np.arange(len(tokenizer.ROLES), vocab_size)
    probs = 1 / np.arange(1, len(ordinary) + 1)
    probs /= probs.sum()
    special_ids = {role: number for number, role in enumerate(tokenizer.ROLES)}
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        written = []
        for number in range(SHARDS):
            ids_NxL = rng.choice(ordinary, (ROWS, length), p=probs)
            for start in (0, length // 2):
                ids_NxL[:, start] = special_ids["cls"]
                ids_NxL[:, start + length // 2 - 1] = special_ids["sep"]
            ids_NxL[-1] = special_ids["sep"]
            content = b"".join(tfrecord.encode(ids_NxL))
            file = f"{split}/dataset-{number}-{ROWS}.tfrecord"
            (folder / file).write_bytes(content)
            written.append(Shard(file, ROWS, len(content), hashlib.sha256(content).hexdigest()))
        splits[split] = Split(tuple(written))
    return Manifest(
        folder=str(folder),
        length=length,
        vocab_size=vocab_size,
        special_ids=special_ids,
        all_special_ids=tuple(special_ids.values()),
        tokenizer_fingerprint="",
        full_rows=True,
        inputs="",
        source="made-up text",
        splits=splits,
    )


def _train(task: Pretraining) -> dict[str, float]:
    """Trains; returns {"KIND, step N, METRIC": value} of the log."""
    train.train(task.config, task.workdir, task)
    return {
        f"{line['kind']}, step {line['step']}, {name}": value
        for line in logs.read(task.workdir.metrics)
        for name, value in line.items()
        if name not in ("kind", "step")
    }


def _differences_of_masks(task: Pretraining) -> list[str]:
    """Returns which inputs of the model and the loss are not the same for the rows of a batch in another batch."""
    columns = next(task.batches(0))
    fewer = {name: column[ROWS // 2 :][::-1].copy() for name, column in columns.items()}
    inputs, others = (
        sharding.named_leaves(jax.jit(task.inputs)(sharding.put_batch(rows, task.mesh, count), 0))
        for rows, count in ((columns, ROWS), (fewer, ROWS // 2))
    )
    return [
        f"{name} depends on the row or the batch that a record is in; draw masks from its record and epoch alone"
        for (name, value), (_, other) in zip(inputs, others, strict=True)
        if not np.array_equal(value[ROWS // 2 :][::-1], other)
    ]


def _ending(batches: Callable[[int], Iterator]) -> Callable[[int], Iterator]:
    """Returns `batches`, of which the last can't be read, as if the run were killed."""

    def read(start: int) -> Iterator:
        yield from itertools.islice(batches(start), STEPS - 1)
        raise _EndError

    return read


class _EndError(Exception):
    """The run ends here."""


def _differences_after_resume(whole: Workdir, resumed: Workdir) -> list[str]:
    """Returns what differs between a run that ended after its first checkpoint and was resumed, and a whole one."""
    lines = zip(logs.read(whole.metrics), logs.read(resumed.metrics), strict=True)
    params = zip(_parameters(whole), _parameters(resumed), strict=True)
    return [
        f"resumed: the log has {other}, and {line} in a run that did not end"
        for line, other in lines
        if line != other
    ] + [
        f"resumed: the parameter {name} is not that of a run that did not end"
        for (name, value), (_, other) in params
        if not np.array_equal(value, other)
    ]


def _parameters(workdir: Workdir) -> list[tuple[str, np.ndarray]]:
    meta = checkpoint_files.read_meta(workdir.checkpoints, STEPS)
    return sharding.named_leaves(load.restore(workdir, STEPS, meta))
