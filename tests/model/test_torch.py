"""Our step against PyTorch: the same weights and batches give the same loss, gradient and AdamW updates; float32.

The masks are ours (TokenMasking), drawn beforehand; PyTorch runs its full head, with the label -100 everywhere else.
Ours is the step that `train` runs: the head on the tokens that it needs, a padded vocabulary, on two
devices.
"""

import json
import pathlib

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from mlm.data.manifest import DatasetInfo
from mlm.model import families, weights
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.training.task import TrainState
from tests.support.pytorch import draw, run_torch
from tests.support.tiny import meshes_of, random_batch, tiny_run

pytestmark = pytest.mark.standard

STEPS = 20
RECIPE = (
    "model.layers=1",
    "model.positions=32",
    "model.init_stddev=0.2",  # large: every array has a gradient that is well above rounding
    f"train.steps={STEPS}",
    "schedule.warmup=5",
    "optimizer.learning_rate=0.002",
    "optimizer.weight_decay=0.1",
    "optimizer.clip_norm=1.8",  # between the smallest and the largest norm
    "log.every=1",
)
# RoBERTa's usual pad id is 1: here every position moves with it.
INFO = DatasetInfo(
    vocab_size=500,
    special_ids={"pad": 3, "cls": 0, "sep": 2, "unk": 4, "mask": 5},
    all_special_ids=(0, 1, 2, 3, 4, 5),
    length=32,
    records=200,
)
# ModernBERT's window is a quarter of the row.
FAMILIES = {
    "roberta": (),
    "modernbert": (
        "model.layers=2",
        "optimizer.clip_norm=2.1",
        "model.local_attention=8",
        "model.global_rope_theta=100",
    ),
}


@meshes_of(2)
def prepare(family: str) -> tuple[Pretraining, TrainState, list[dict]]:
    """Returns the task, its state before training, and its batches."""
    settings = (*RECIPE, f"model.family={family}", *FAMILIES[family])
    task = tiny_run(*settings, info=INFO, mesh=(2, 1, 1))
    # again and again: they can be learnt
    batches = [random_batch(16, seed % 4, task.info) for seed in range(STEPS)]
    assert all((batch["attention_mask"] == 0).any() for batch in batches), "no row has padding"
    return task, task.initial_state(), batches


def to_torch(task, params) -> dict[str, np.ndarray]:
    """Returns parameters under PyTorch's names, without the padding of the vocabulary."""
    family = families.family_of(task.module.config)
    return weights.to_torch(family.resize_vocabulary(jax.device_get(params), 500))


def write(task, state, batches, folder: pathlib.Path) -> None:
    """Writes what tests/pytorch/reference.py reads."""
    config = task.module.config.to_dict() | {"vocab_size": 500}
    names = ("learning_rate", "b1", "b2", "eps", "weight_decay", "clip_norm")
    recipe = {name: task.config.optimizer[name] for name in names}
    recipe |= {"warmup_steps": 5, "steps": STEPS}
    settings = {"config": config, "recipe": recipe}
    (folder / "settings.json").write_text(json.dumps(settings))
    save_file(to_torch(task, state.params), folder / "params.safetensors")
    save_file(draw(task, batches), folder / "batches.safetensors")


def test_twenty_updates_are_pytorch_s(tmp_path):
    """Of each family, by one process with PyTorch, whose imports take longer than the updates."""
    folders = [tmp_path / family for family in FAMILIES]
    prepared = [prepare(family) for family in FAMILIES]
    for each, folder in zip(prepared, folders, strict=True):
        folder.mkdir()
        write(*each, folder)
    run_torch(5, "tests/pytorch/reference.py", *folders)
    for each, folder in zip(prepared, folders, strict=True):
        assert_updates_are_pytorch_s(*each, folder)


def assert_updates_are_pytorch_s(task, state, batches, folder: pathlib.Path) -> None:
    """Losses, gradient norms, the first gradient, and parameters after warmup, clipping and decay."""
    first = to_torch(task, state.params)
    losses = []
    norms = []
    moments = None
    for batch in batches:
        state, metrics = task.train_step(state, sharding.put_batch(batch, task.mesh, 16))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        moments = moments or jax.device_get(optax.tree.get(state.opt_state, "mu"))

    expected = json.loads((folder / "losses.json").read_text())
    values = task.config.optimizer
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)
    assert losses[-1] < losses[0] - 0.1, "nothing was learnt: the comparison is empty"
    np.testing.assert_allclose(norms, expected["norms"], rtol=1e-4)
    assert max(norms) > values.clip_norm > min(norms), (
        "clipping must act in some updates and not in others"
    )

    # Adam's first moment is this, times the gradient
    scale = (1 - values.b1) * min(1, values.clip_norm / norms[0])
    gradient = jax.tree.map(lambda moment: moment / scale, moments)
    padding = families.at_path(gradient, families.family_of(task.module.config).embedding)[500:]
    assert len(padding) == 12 and not np.any(padding)
    ours = to_torch(task, gradient)
    theirs = load_file(folder / "gradient.safetensors")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        # The gradient of a key's bias is 0 but for rounding: a softmax does not change if all its inputs move together.
        is_zero = key.endswith("attention.self.key.bias")
        scale = (
            0.1 * np.abs(theirs[key.replace("key", "query")]).max()
            if is_zero
            else np.abs(value).max()
        )
        assert scale > 1e-6, f"{key}: has no gradient to compare"
        np.testing.assert_allclose(ours[key], value, atol=1e-4 * scale, rtol=0, err_msg=key)

    ours = to_torch(task, state.params)
    theirs = load_file(folder / "trained.safetensors")
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, atol=1e-4, rtol=0, err_msg=key)
        if not key.endswith("attention.self.key.bias"):
            assert np.abs(value - first[key]).max() > 1e-3, f"{key}: has hardly moved"
