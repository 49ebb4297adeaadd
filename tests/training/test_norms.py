"""Norms by parameter: those of the state before and after a step, on any mesh, without a change to the run."""

import json
import math

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from mlm import logs
from mlm.training import train
from mlm.training.metrics import Log, param_norms
from mlm.training.xla_metrics import Compilations
from tests.support.states import state_of
from tests.support.tiny import flat
from tests.training.toy import logged_task, run, toy

SETTINGS = (
    "train.steps=6",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "optimizer.clip_norm=0.5",
    "log.norms_every=3",
)


def params_at(workdir, step: int) -> dict[str, np.ndarray]:
    """Of a checkpoint, by name."""
    return {
        name.removeprefix("['params']['").removesuffix("']").replace("']['", "/"): x
        for name, x in state_of(workdir.root, step).items()
        if name.startswith("['params']")
    }


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def test_they_are_those_of_the_saved_parameters(tmp_path):
    """By numpy, of the whole arrays that eight devices hold parts of; the gradient before it is clipped."""
    eight = run(tmp_path, task=toy(*SETTINGS, "train.accumulate=2", mesh=(2, 2, 2)))
    task = toy(*SETTINGS)
    gradient = jax.jit(train.make_gradient(task))
    lines = logs.read(eight.norms, "norms")
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        step = line["step"]
        rows = line["parameters"]
        before = params_at(eight, step - 1)
        after = params_at(eight, step)
        assert rows.keys() == before.keys() and "position_embeddings/embedding" in rows
        grads, _ = gradient(
            unflatten_dict(before, sep="/"), next(task.batches(step - 1)), np.int32(step - 1)
        )
        for name, (of_gradient, parameter, update) in rows.items():
            assert parameter == pytest.approx(norm(before[name]), rel=1e-5)
            assert update == pytest.approx(
                norm(after[name] - before[name]) / norm(before[name]), rel=1e-5
            )
            assert of_gradient == pytest.approx(norm(flat(grads)[name]), rel=1e-4)
    last = logs.read(eight.metrics, "train")[-1]  # of step 6, as are the rows
    assert last["grad_norm"] == pytest.approx(
        math.hypot(*(row[0] for row in rows.values())), rel=1e-5
    )


def test_a_parameter_that_is_0_or_does_not_move_or_is_not_finite(tmp_path):
    """Nine digits are the float32; what is no number is null."""
    before = {
        "a": np.zeros(3, np.float32),
        "b": np.full(2, 0.1, np.float32),
        "c": np.full(2, 3e38, np.float32),
    }
    gradient_norms = np.array([0.1, 0.2, np.nan], np.float32)
    found = param_norms(before, before | {"a": np.ones(3, np.float32)}, gradient_norms)
    with Compilations() as counts, Log(tmp_path, logged_task(), counts, start=0) as log:
        log.norms(4, list(before), found)
    (line,) = map(json.loads, (tmp_path / "norms.jsonl").read_text().splitlines())
    rows = line["parameters"]
    assert rows["a"][1:] == [0.0, None] and rows["b"][2] == 0 and rows["c"] == [None, None, 0.0]
    assert np.float32(rows["b"][1]) == np.asarray(found["parameter_norms"])[1]
