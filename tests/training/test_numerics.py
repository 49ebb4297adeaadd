"""Nothing around a run chooses its random bits or types: no variable of the environment, no setting of a notebook."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from mlm.errors import InputError
from mlm.model import keys
from mlm.training import sharding
from tests import ROOT
from tests.support import processes
from tests.support.tiny import meshes_of, random_batch, tiny_run
from tests.training.toy import run

VARIABLES = {
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_RANDOM_SEED_OFFSET": "3",
    "FLAX_FIX_RNG_SEPARATOR": "1",
}


def trained() -> list:
    """The loss of two steps, and every array of their state."""
    task = tiny_run("model.hidden_dropout=0.1", mesh=(1, 1, 1))
    batch = sharding.put_batch(random_batch(), task.mesh, 16)
    state = task.init()
    for _ in range(2):
        state, metrics = task.train_step(state, batch)
    arrays = (
        (leaf.dtype.name, np.asarray(leaf).tobytes().hex()) for leaf in jax.tree.leaves(state)
    )
    return [float(metrics["loss"]).hex(), *map(list, arrays)]


@pytest.mark.standard
@meshes_of(1)
def test_no_variable_of_the_environment_changes_a_parameter():
    """Initial values, masks and dropout, to the bit."""
    program = "import json; from tests.training.test_numerics import trained; print(json.dumps(trained()))"
    command = [sys.executable, "-c", program]
    settings = processes.environment(devices=1) | VARIABLES
    assert json.loads(subprocess.check_output(command, cwd=ROOT, env=settings)) == trained()


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1])
def test_a_key_is_that_of_jax_as_it_comes(seed):
    ours, theirs = map(jax.random.key_data, (keys.make_key(seed), jax.random.key(seed)))
    assert np.array_equal(ours, theirs)


def test_a_resume_with_another_rounding_is_refused(tmp_path):
    run(tmp_path, "train.steps=2", "checkpoint.every=2")
    with (
        jax.default_matmul_precision("bfloat16"),
        pytest.raises(InputError, match="jax_default_matmul_precision"),
    ):
        run(tmp_path, "train.steps=2", "checkpoint.every=2")
