"""Nothing around a run chooses its random bits or types: no variable of the environment, no setting of a notebook."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from mlm.errors import InputError
from mlm.model import keys
from tests import ROOT
from tests.training.toy import run

VARIABLES = {
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_RANDOM_SEED_OFFSET": "3",
    "FLAX_FIX_RNG_SEPARATOR": "1",
}
PROGRAM = """
import json, sys
import jax, numpy as np
from tests.support.tiny import random_batch, tiny_run
from mlm.training import sharding
task = tiny_run("model.hidden_dropout=0.1", mesh=(1, 1, 1))
batch = sharding.put_batch(random_batch(), task.mesh, 16)
state = task.init()
for _ in range(2):
    state, metrics = task.train_step(state, batch)
arrays = [[leaf.dtype.name, np.asarray(leaf).tobytes().hex()] for leaf in jax.tree.leaves(state)]
print(json.dumps([float(metrics["loss"]).hex(), *arrays]))
"""


@pytest.mark.standard
def test_no_variable_of_the_environment_changes_a_parameter():
    """Initial values, masks and dropout, to the bit."""

    def trained(variables: dict[str, str]) -> list:
        flags = {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM]
        return json.loads(
            subprocess.check_output(command, cwd=ROOT, env=os.environ | flags | variables)
        )

    assert trained(VARIABLES) == trained({})


def test_a_key_is_that_of_jax_as_it_comes():
    for seed in (0, 7, 2**31, 2**32 - 1):
        assert np.array_equal(
            jax.random.key_data(keys.make_key(seed)), jax.random.key_data(jax.random.key(seed))
        )


def test_a_resume_with_another_rounding_is_refused(tmp_path):
    run(tmp_path, "train.steps=2", "checkpoint.every=2")
    with (
        jax.default_matmul_precision("bfloat16"),
        pytest.raises(InputError, match="jax_default_matmul_precision"),
    ):
        run(tmp_path, "train.steps=2", "checkpoint.every=2")
