"""Evaluation: every record once, and the same scores for every batch size and number of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.data.manifest import DatasetInfo
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import evaluation, sharding
from tests.fixtures import slow, tiny_config


def scores(manifest, rows: int, devices: int) -> dict[str, float]:
    config = tiny_config("data.lanes=4", f"evaluate.batch={rows}", "model.init_stddev=0.3")
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), sharding.AXES)
    run = Pretraining(config, DatasetInfo.from_manifest(manifest), mesh=mesh)
    return pretraining.score_split(config, manifest, mesh, run.eval_step, run.init().params, "validation")


@pytest.fixture(scope="module")
def reference(manifest) -> dict[str, float]:
    found = scores(manifest, 16, 1)
    records = manifest.splits["validation"].records
    assert records % 16, "the last batch must be a partial one"
    assert found["predictions"] == pytest.approx(0.2 * records * 31, rel=0.05)
    return found


@pytest.mark.parametrize(("rows", "devices"), [(7, 1), slow(64, 1), slow(16, 8), (64, 8)])
def test_same_scores(reference, manifest, rows, devices):
    found = scores(manifest, rows, devices)
    assert found["predictions"] == reference["predictions"]
    assert found["accuracy"] == reference["accuracy"]
    for key in ("loss", "bits_per_byte"):
        assert found[key] == pytest.approx(reference[key], rel=1e-6)


def test_rows_come_back_in_the_order_of_the_batch(monkeypatch):
    """The array holds them as `logical_rows` has it for hosts in the order 0, 1, 0, 1, ..."""
    mesh = sharding.make_mesh(data=4, fsdp=2, tensor=1)
    monkeypatch.setattr(sharding, "processes_of", lambda mesh: np.arange(8)[:, None] % 2)
    rows = sharding.logical_rows(mesh, 16)
    assert rows.tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    batches = ({"record_id": (16 * number + np.arange(16))[rows]} for number in range(3))
    shards = NamedSharding(mesh, P())
    step = jax.jit(lambda params, batch: (batch["record_id"], -batch["record_id"]), out_shardings=shards)
    one, other = evaluation.per_row(step, None, batches, mesh=mesh, rows=16)
    assert one.tolist() == list(range(48)) and (other == -one).all()
