"""What several tests build on: a tiny model, a tiny batch, and configs small enough for seconds."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from mlm import config as configs
from mlm import logs
from mlm.data.manifest import DatasetInfo
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding, train

TINY = (
    "model.hidden_size=32",
    "model.layers=1",
    "model.heads=2",
    "model.intermediate_size=64",
    "model.positions=64",
    "model.dtype=float32",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
    "shards.length=32",
    "shards.count=16",
    "shards.validation_count=2",
    "data.global_batch=16",
    "evaluate.batch=16",
    "optimizer.learning_rate=0.003",
    "train.steps=12",
    "log.every=2",
    "log.tensorboard=false",
    "masking.rate=0.2",
)
INFO = DatasetInfo(
    vocab_size=500,
    special_ids={"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4},
    all_special_ids=(0, 1, 2, 3, 4),
    length=32,
    records=200,
)


def slow(*values):
    """A parameter's values whose test runs with --slow alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def command(name: str, workdir: object, *overrides: str) -> list[str]:
    """The arguments of a command on the base config."""
    return [name, "--config=configs/base.py", f"--workdir={workdir}", *flags(*overrides)]


def flags(*overrides: str) -> list[str]:
    return [f"--config.{text}" for text in overrides]


def tiny_config(*overrides: str):
    return configs.load("configs/base.py", [*TINY, *overrides])


def tiny_run(
    *overrides: str, mesh: tuple[int, int, int] = (8, 1, 1), info: DatasetInfo = INFO
) -> Pretraining:
    data, fsdp, tensor = mesh
    return Pretraining(
        tiny_config(*overrides), info, mesh=sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    )


def pretrain(config, workdir, manifest) -> dict[str, float]:
    """Trains as the command does; returns the last scores."""
    train.train(config, workdir, Pretraining.open(config, workdir, manifest))
    return logs.read(workdir.metrics, "eval")[-1]


def random_batch(rows: int = 16, seed: int = 0, info: DatasetInfo = INFO) -> dict[str, np.ndarray]:
    """Rows of ordinary tokens between <s> and </s>, the last row half padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(len(info.all_special_ids), info.vocab_size, (rows, info.length)).astype(
        np.int32
    )
    attention = np.ones_like(ids)
    attention[-1, info.length // 2 :] = 0
    ids[:, 0] = info.special_ids["cls"]
    ids[:, info.length // 3] = info.special_ids["sep"]
    ids[attention == 0] = info.special_ids["pad"]
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "record_id": np.arange(rows, dtype=np.uint32) + 1000 * seed,
        "epoch": np.zeros(rows, np.uint32),
        "row": np.arange(rows, dtype=np.uint32),
    }


def flat(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in sharding.named_leaves(tree)}


def assert_close(a, b, rtol: float, what: str):
    """Largest difference of each array, relative to the largest value in it."""
    a = flat(a)
    b = flat(b)
    assert a.keys() == b.keys()
    for name in a:
        scale = max(np.abs(a[name]).max(), 1e-5)  # the gradient of a key bias is 0 but for rounding
        assert np.abs(a[name] - b[name]).max() <= rtol * scale, f"{what}: {name}"


@contextlib.contextmanager
def meshes_of(count: int) -> Iterator[None]:
    """Trainings within have `count` of the eight devices, and so take a fraction of the time."""
    with pytest.MonkeyPatch.context() as patch:
        make_mesh = sharding.make_mesh

        def on_some(*, devices=None, **axes):
            return make_mesh(**axes, devices=devices or jax.devices()[:count])

        patch.setattr(sharding, "make_mesh", on_some)
        yield
