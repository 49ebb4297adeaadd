"""Evaluation: every record once, and the same scores for every batch size and number of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mlm.training import build, pretraining, sharding
from tests.fixtures import tiny_config


def scores(manifest, rows: int, devices: int) -> dict[str, float]:
    config = tiny_config("data.lanes=4", f"evaluate.batch={rows}", "model.init_stddev=0.3")
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), sharding.AXES)
    run = build.build_run(config, pretraining.facts_of(manifest), mesh)
    return pretraining.evaluate_split(config, manifest, mesh, run.eval_step, run.init().params, "validation")


@pytest.fixture(scope="module")
def reference(manifest) -> dict[str, float]:
    found = scores(manifest, 16, 1)
    records = manifest.splits["validation"].records
    assert records % 16, "the last batch must be a partial one"
    assert found["predictions"] == pytest.approx(0.2 * records * 31, rel=0.05)
    return found


@pytest.mark.parametrize(("rows", "devices"), [(7, 1), (64, 1), (16, 8), (64, 8)])
def test_same_scores(reference, manifest, rows, devices):
    found = scores(manifest, rows, devices)
    assert found["predictions"] == reference["predictions"]
    assert found["accuracy"] == reference["accuracy"]
    for key in ("loss", "bits_per_byte"):
        assert found[key] == pytest.approx(reference[key], rel=1e-6)
