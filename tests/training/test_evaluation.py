"""Evaluation: every record once, and the same scores for every batch size and number of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformers import FlaxRobertaForMaskedLM

from mlm.data.batches import eval_batches
from mlm.data.manifest import DatasetInfo
from mlm.model.loss import Mean
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import data_parallel, evaluation, sharding
from tests.support.tiny import slow, tiny_config


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


@pytest.mark.standard
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
    monkeypatch.setattr(data_parallel, "processes_of", lambda mesh: np.arange(8)[:, None] % 2)
    rows = data_parallel.logical_rows(mesh, 16)
    assert rows.tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    batches = ({"record_id": (16 * number + np.arange(16))[rows]} for number in range(3))
    shards = NamedSharding(mesh, P())
    step = jax.jit(lambda params, batch: (batch["record_id"], -batch["record_id"]), out_shardings=shards)
    one, other = evaluation.per_row(step, None, batches, mesh=mesh, rows=16)
    assert one.tolist() == list(range(48)) and (other == -one).all()


def test_standard_errors_are_those_of_a_plain_computation():
    """A made-up model of 13 records in batches of 4 on 3 draws; record 5 has no predictions."""
    rng = np.random.default_rng(0)
    weight_DxN = rng.integers(1, 9, (3, 13)).astype(np.float32)
    weight_DxN[:, 5] = 0
    loss_DxN = (weight_DxN * rng.gamma(4, 1, (3, 13))).astype(np.float32)
    loss, accuracy = Mean(loss_DxN, weight_DxN), Mean(weight_DxN // 2, weight_DxN)

    def step(params, batch):
        places = (np.asarray(batch["epoch"]), np.asarray(batch["record_id"]))
        return jax.tree.map(
            lambda column: jax.numpy.asarray(column[places] * batch["valid"]), {"loss": loss, "accuracy": accuracy}
        )

    ids = np.arange(16).reshape(4, 4).astype(np.uint32)
    batches = [{"record_id": b % 13, "epoch": np.zeros(4, np.uint32), "valid": np.float32(b < 13)} for b in ids]
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES)
    found = evaluation.score(step, None, batches, mesh=mesh, rows=4, tokens_per_byte=None, draws=3)
    loss_D = loss_DxN.sum(1) / weight_DxN.sum(1)
    assert found["loss"] == pytest.approx(loss_D.mean()) and found["predictions"] == weight_DxN.sum()
    assert found["loss_se_draws"] == pytest.approx(np.std(loss_D, ddof=1) / 3**0.5)
    rows = [n for n in range(13) if n != 5]
    jackknife = [
        np.mean(np.delete(loss_DxN, n, 1).sum(1) / np.delete(weight_DxN, n, 1).sum(1)) for n in rows
    ]  # another estimator of the same: they agree to the first order of 1/N
    assert found["loss_se_records"] == pytest.approx((11 / 12 * 12 * np.var(jackknife)) ** 0.5, rel=0.1)
    one = evaluation.score(step, None, batches, mesh=mesh, rows=4, tokens_per_byte=None)
    assert "loss_se_draws" not in one and one["loss"] == pytest.approx(loss_D[0])
    influence_N = (loss_DxN[0] - loss_D[0] * weight_DxN[0]) / weight_DxN[0].sum()
    assert one["loss_se_records"] == pytest.approx((12 / 11 * (influence_N**2).sum()) ** 0.5, rel=1e-5)
    mixed = evaluation.mean([0.75, 0.25], [found | {"rare": 1.0}, found], [None, None])  # one counted none
    assert "rare" not in mixed
    assert mixed["loss_se_records"] == pytest.approx(found["loss_se_records"] * (0.75**2 + 0.25**2) ** 0.5)


def test_draws_are_those_of_the_epochs_and_compile_one_step(manifest):
    """Draw 0 is that of one draw, to the bit; the others are masks of their own; the mean is over them all."""
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1)
    config = tiny_config("data.lanes=4", "evaluate.batch=16", "model.init_stddev=0.3", "evaluate.draws=3")
    run = Pretraining(config, DatasetInfo.from_manifest(manifest), mesh=mesh)
    params = run.init().params
    found = pretraining.score_split(config, manifest, mesh, run.eval_step, params, "validation")
    assert run.eval_step._cache_size() == 1
    read = list(eval_batches(manifest, split="validation", batch=16, rows=(0, 16)))
    alone = []
    for draw in range(3):
        own = [batch | {"epoch": np.full_like(batch["epoch"], draw)} for batch in read]
        alone.append(evaluation.score(run.eval_step, params, own, mesh=mesh, rows=16, tokens_per_byte=None)["loss"])
    first = pretraining.score_split(
        tiny_config("data.lanes=4", "evaluate.batch=16"), manifest, mesh, run.eval_step, params, "validation"
    )
    assert alone[0] == first["loss"], "the first draw is that of evaluate.draws = 1"
    assert len(set(alone)) == 3
    assert found["loss"] == pytest.approx(np.mean(alone), rel=1e-12)
    assert found["loss_se_draws"] == pytest.approx(np.std(alone, ddof=1) / 3**0.5, rel=1e-9)


class WithLabels(Pretraining):
    """Counts a metric of its own: the mean of the predicted ids."""

    def metrics(self, logits_BxKxV, masked, intermediates):
        sum_B = jax.numpy.sum(masked.labels_BxK * masked.weights_BxK, axis=-1)
        return {"label": Mean(sum_B, jax.numpy.sum(masked.weights_BxK, axis=-1))}


@pytest.mark.standard
def test_independent_masks_have_the_loss_of_a_plain_computation(manifest):
    """The masks of `eval_masking`, through transformers' own model and numpy, and a metric of the task."""
    config = tiny_config("data.lanes=4", "evaluate.batch=16", "model.init_stddev=0.3", "evaluate.count=independent")
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1)
    run = WithLabels(config, DatasetInfo.from_manifest(manifest), mesh=mesh)
    params = jax.device_get(run.init().params)
    found = pretraining.score_split(config, manifest, mesh, run.eval_step, run.init().params, "validation")
    stock = jax.jit(FlaxRobertaForMaskedLM(run.module.config, _do_init=False).__call__)
    loss, count, labels = 0.0, 0, 0.0
    for batch in eval_batches(manifest, split="validation", batch=16, rows=(0, 16)):
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        masked = jax.device_get(run.eval_masking(jax.random.key(config.evaluate.seed), *columns))
        weights = masked.weights_BxK * batch["valid"][:, None]
        logits = stock(masked.ids_BxL, batch["attention_mask"], params=params).logits
        logits = np.asarray(logits, np.float64)[..., : run.info.vocab_size]
        log_total = np.log(np.exp(logits).sum(-1))
        own = log_total - np.take_along_axis(logits, batch["input_ids"][..., None], -1)[..., 0]
        loss, count = loss + (own * weights).sum(), count + int(weights.sum())
        labels += (masked.labels_BxK * weights).sum()
    assert found["predictions"] == count
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["label"] == pytest.approx(labels / count, rel=1e-6), "rows that fill the last batch do not count"
