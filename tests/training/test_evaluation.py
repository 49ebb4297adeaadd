"""Evaluation: every record once, and the same scores for every batch size and number of devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import FlaxRobertaForMaskedLM

from mlm.data.batches import eval_batches
from mlm.data.manifest import DatasetInfo
from mlm.model.loss import Mean
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import evaluation, sharding
from tests.support.tiny import random_batch, tiny_config, tiny_run


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return sharding.make_mesh(data=devices, fsdp=1, tensor=1, devices=jax.devices()[:devices])


def test_rows_come_back_in_the_order_of_the_batch(monkeypatch):
    """The array holds them as `logical_rows` has it for hosts in the order 0, 1, 0, 1, ..."""
    mesh = sharding.make_mesh(data=4, fsdp=2, tensor=1)
    monkeypatch.setattr(sharding, "processes_of", lambda mesh: np.arange(8)[:, None] % 2)
    rows = sharding.logical_rows(mesh, 16)
    assert rows.tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    batches = ({"record_id": (16 * number + np.arange(16))[rows]} for number in range(5))
    shards = jax.NamedSharding(mesh, jax.P())
    step = jax.jit(
        lambda params, batch: (batch["record_id"], -batch["record_id"]), out_shardings=shards
    )
    one, other = evaluation.per_row(step, None, batches, mesh=mesh, rows=16)
    assert one.tolist() == list(range(80)) and (other == -one).all()


@pytest.mark.parametrize(("rows", "devices"), [(7, 1), (64, 8), (16, 4)])
def test_every_record_once(rows, devices):
    """A made-up loss of 100 records, of which no two are the same, in batches of which the last is partial."""

    def made_up(params, batch):
        weight = batch["valid"] * (1.0 + batch["record_id"] % 3)
        loss = weight * jnp.sqrt(1.0 + batch["record_id"])
        lines = jnp.zeros((rows, 2, 3, 3)).at[:, 0, 1].set(jnp.stack([loss, weight, weight / 2], 1))
        return {
            "loss": Mean(loss, weight),
            "accuracy": Mean(weight / 2, weight),
            "breakdown": lines,
        }

    mesh = mesh_of(devices)
    step = evaluation.jit_eval_step(made_up, mesh, None)
    numbers = np.arange(-(-100 // rows) * rows, dtype=np.uint32).reshape(-1, rows)
    batches = (
        {"record_id": ids % 100, "epoch": 0 * ids, "valid": np.float32(ids < 100)}
        for ids in numbers
    )
    found = evaluation.score(
        step, None, batches, mesh=mesh, rows=rows, tokens_per_byte=0.25, draws=2
    )
    weight = 1 + np.arange(100) % 3
    loss = np.sum(weight * np.sqrt(1 + np.arange(100))) / weight.sum()
    assert found["predictions"] == 2 * weight.sum() and found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(loss, rel=1e-6) and found["loss_se_draws"] == 0
    assert found["perplexity"] == math.exp(found["loss"])
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) / 4)
    line = {
        key: pytest.approx(found[key]) for key in ("loss", "perplexity", "accuracy", "predictions")
    }
    assert found["by_position"] == {"2-3": line} and found["by_copy_distance"] == {}, (
        "lines without predictions"
    )
    assert step._cache_size() == 1


def test_standard_errors_are_those_of_a_plain_computation():
    """A made-up model of 13 records in batches of 4 on 3 draws; record 5 has no predictions."""
    rng = np.random.default_rng(0)
    weight_DxN = rng.integers(1, 9, (3, 13)).astype(np.float32)
    weight_DxN[:, 5] = 0
    loss_DxN = (weight_DxN * rng.gamma(4, 1, (3, 13))).astype(np.float32)
    table = {"loss": Mean(loss_DxN, weight_DxN), "accuracy": Mean(weight_DxN // 2, weight_DxN)}
    table["rare"] = Mean(np.zeros((3, 13)), np.zeros((3, 13)))

    def step(params, batch):
        places = (np.asarray(batch["epoch"]), np.asarray(batch["record_id"]))
        return jax.tree.map(lambda column: jnp.asarray(column[places] * batch["valid"]), table)

    def score(valid_N, draws=1):
        ids = np.arange(16, dtype=np.uint32).reshape(4, 4)
        batches = [
            {"record_id": ids_B % 13, "epoch": 0 * ids_B, "valid": np.float32(valid_N[ids_B])}
            for ids_B in ids
        ]
        settings = {"mesh": mesh_of(1), "rows": 4, "tokens_per_byte": None, "draws": draws}
        return evaluation.score(step, None, batches, **settings)

    valid_N = np.arange(16) < 13
    found = score(valid_N, draws=3)
    loss_D = loss_DxN.sum(1) / weight_DxN.sum(1)
    assert found["loss"] == pytest.approx(loss_D.mean())
    assert found["predictions"] == weight_DxN.sum()
    assert found["loss_se_draws"] == pytest.approx(np.std(loss_D, ddof=1) / 3**0.5)
    one = score(valid_N)
    assert not {"loss_se_draws", "rare", "bits_per_byte"} & one.keys()
    assert one["loss"] == pytest.approx(loss_D[0]), "the first draw is that of one"
    influence_N = (loss_DxN[0] - loss_D[0] * weight_DxN[0]) / weight_DxN[0].sum()
    error = (12 / 11 * (influence_N**2).sum()) ** 0.5
    assert one["loss_se_records"] == pytest.approx(error, rel=1e-5)
    assert "loss_se_records" not in score(np.arange(16) == 4)
    empty = score(0 * valid_N)
    assert math.isnan(empty["loss"]) and math.isnan(empty["accuracy"]) and empty["predictions"] == 0


def test_the_scores_of_a_mixture_are_means_by_share():
    """Bits per byte by the bytes of each; errors are independent; a metric that one folder lacks is left out."""
    one = {"loss": 2.0, "accuracy": 0.5, "predictions": 10, "loss_se_records": 0.3, "own": 1.0}
    other = {"loss": 4.0, "accuracy": 0.1, "predictions": 30, "loss_se_records": 0.4, "own": 3.0}
    found = evaluation.mean([3, 1], [one | {"loss_se_draws": 0.1, "rare": 1.0}, other], [0.25, 0.5])
    assert found == pytest.approx({
        "loss": 2.5, "accuracy": 0.4, "predictions": 40, "perplexity": math.exp(2.5), "own": 1.5,
        "loss_se_records": math.hypot(0.9, 0.4) / 4, "bits_per_byte": 2.5 / math.log(2) / (3.5),
    })  # fmt: skip
    assert "bits_per_byte" not in evaluation.mean([3, 1], [one, other], [0.25, None])
    assert evaluation.mean([3], [one], [None]) is one


def test_evaluation_has_no_dropout_and_masks_of_its_own_seed():
    """Whatever the seeds and the rates of training are."""
    task = tiny_run("model.init_stddev=0.3")
    params = task.init().params
    batch = sharding.put_batch(random_batch() | {"valid": np.ones(16, np.float32)}, task.mesh, 16)

    def losses(task: Pretraining) -> np.ndarray:
        return np.asarray(task.eval_step(params, batch)["loss"].sum)

    expected = losses(task)
    rates = ("model.hidden_dropout=0.5", "model.attention_dropout=0.5")
    seeds = ("masking.seed=5", "train.seed=6", "data.seed=7")
    others = tiny_run("model.init_stddev=0.3", *rates, *seeds)
    np.testing.assert_array_equal(losses(others), expected)
    assert np.ptp(expected) > 0


# The model of transformers ----------------------------------------------------------------------------------


class WithLabels(Pretraining):
    """Counts a metric of its own: the mean of the predicted ids."""

    def metrics(self, logits_BxKxV, masked, intermediates):
        sum_B = jnp.sum(masked.labels_BxK * masked.weights_BxK, axis=-1)
        return {"label": Mean(sum_B, jnp.sum(masked.weights_BxK, axis=-1))}


@pytest.mark.standard
def test_scores_are_those_of_transformers(manifest):
    """The masks of `eval_masking`, through transformers' own model and numpy, and a metric of the task."""
    config = tiny_config("data.lanes=4", "model.init_stddev=0.3", "evaluate.count=independent")
    mesh = mesh_of(2)
    run = WithLabels(config, DatasetInfo.from_manifest(manifest), mesh=mesh)
    eval_step = evaluation.make_eval_step(
        run.module,
        run.eval_masking,
        mesh,
        sharding.shardings_of(run.abstract_state).params,
        metrics=run.metrics,
        with_breakdown=True,
    )
    state = run.init()
    found = pretraining.score_split(config, manifest, mesh, eval_step, state.params, "validation")
    params = jax.device_get(state.params)
    stock = jax.jit(FlaxRobertaForMaskedLM(run.module.config, _do_init=False).__call__)
    loss = 0.0
    count = 0
    labels = 0.0
    for batch in eval_batches(manifest, split="validation", batch=16, rows=(0, 16)):
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        masked = jax.device_get(run.eval_masking(jax.random.key(evaluation.MASK_SEED), *columns))
        weights = masked.weights_BxK * batch["valid"][:, None]
        logits = stock(masked.ids_BxL, batch["attention_mask"], params=params).logits
        logits = np.asarray(logits, np.float64)[..., : run.info.vocab_size]
        log_total = np.log(np.exp(logits).sum(-1))
        losses = log_total - np.take_along_axis(logits, batch["input_ids"][..., None], -1)[..., 0]
        loss = loss + (losses * weights).sum()
        count = count + int(weights.sum())
        labels += (masked.labels_BxK * weights).sum()
    assert found["predictions"] == count
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["label"] == pytest.approx(labels / count, rel=1e-6), (
        "rows that fill the last batch do not count"
    )
    for table, first in (("by_position", "0-1"), ("by_copy_distance", "1")):
        assert next(iter(found[table])) == first and len(found[table]) > 4
        lines = found[table].values()
        assert sum(line["predictions"] for line in lines) == found["predictions"]
        nats = sum(line["loss"] * line["predictions"] for line in lines)
        assert nats / count == pytest.approx(found["loss"], rel=1e-6), table
