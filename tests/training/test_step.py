"""The step: the gradient of a plain formula on every mesh and for every accumulation, one trace, a guard that holds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlm.plan import hlo
from mlm.training import sharding, train
from tests.support.tiny import assert_close, flat
from tests.training.toy import Toy, batch_of, toy

DROPOUT = "model.hidden_dropout=0.1"
NAN = 10_000  # added to the records of a batch whose loss is not finite


def step_on(task: Toy, state, batch: dict[str, np.ndarray]):
    """Returns the next state, and the metrics as numbers."""
    batch = sharding.put_batch(batch, task.mesh, len(batch["epoch"]))
    state, metrics = task.train_step(state, batch, None)
    return state, {name: value.tolist() for name, value in metrics.items()}


def gradient_of(task: Toy, batch: dict[str, np.ndarray], step: int = 3):
    batch = sharding.put_batch(batch, task.mesh, len(batch["epoch"]))
    return jax.device_get(
        jax.jit(train.make_gradient(task))(task.init().params, batch, jnp.int32(step))
    )


def mean_loss(params, batch: dict[str, np.ndarray], share: float) -> tuple[jax.Array, jax.Array]:
    """The mean loss of a batch without dropout at a share of the run, and its weight."""
    ids = batch["input_ids"]
    places_LxH = params["position_embeddings"]["embedding"][: ids.shape[1]]
    hidden_BxLxH = params["table"]["kernel"][ids] + places_LxH
    logits_BxL = hidden_BxLxH @ params["head"]["kernel"][:, 0] + params["head"]["bias"]
    target_B = batch["record_id"] % 5 + batch["epoch"]
    weights_BxL = batch["attention_mask"] * (1 - 0.5 * share)
    weight = jnp.sum(weights_BxL)
    return jnp.sum((logits_BxL - target_B[:, None]) ** 2 * weights_BxL) / weight, weight


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [((1, 1, 1), 1), ((1, 1, 1), 4), ((2, 2, 1), 2), ((1, 2, 2), 1), ((2, 1, 2), 1)],
)
def test_the_gradient_is_that_of_the_mean_over_the_global_batch(mesh, accumulate):
    """With fewer predictions in the padded row: a mean of means, over devices or microbatches, would differ."""
    task = toy(f"train.accumulate={accumulate}", mesh=mesh)
    batch = batch_of(16)
    grads, sums = gradient_of(task, batch)
    params = jax.device_get(task.init().params)
    formula = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    (loss, weight), expected = formula(params, batch, 3 / task.stages.steps)
    assert_close(grads, expected, 1e-5, f"{mesh}, {accumulate}")
    assert sums["loss"].sum == pytest.approx(float(loss * weight), rel=1e-6)
    assert sums["loss"].weight == pytest.approx(float(weight))


def test_dropout_is_one_of_the_global_batch(monkeypatch):
    """It follows the row, the step and the seed, whatever the mesh, the accumulation and the order of the hosts."""
    batch = batch_of(16)
    wanted = gradient_of(toy(DROPOUT), batch)
    found = gradient_of(toy(DROPOUT, "train.accumulate=2", mesh=(2, 2, 1)), batch)
    assert_close(found, wanted, 1e-5, "mesh")
    for other in (
        gradient_of(toy(), batch),
        gradient_of(toy(DROPOUT), batch, 4),
        gradient_of(toy(DROPOUT, "train.seed=1"), batch),
    ):
        assert not np.allclose(other[0]["head"]["kernel"], wanted[0]["head"]["kernel"], rtol=1e-3)
    monkeypatch.setattr(sharding, "processes_of", lambda mesh: np.arange(4)[:, None] % 2)
    task = toy(DROPOUT, "train.accumulate=2", mesh=(2, 2, 1))
    rows = sharding.logical_rows(task.mesh, 16)
    assert rows[4] == 8
    found = gradient_of(task, {name: column[rows] for name, column in batch.items()})
    assert_close(found, wanted, 1e-5, "hosts that interleave")


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_one_trace_of_a_step_that_takes_its_state(name):
    """Shardings, those of moments of other shapes too, are pinned and the state is donated."""
    settings = ("optimizer.learning_rate=0.01", "schedule.warmup=2", "schedule.name=constant")
    task = toy(*settings, f"optimizer.name={name}", mesh=(2, 2, 2))
    state = first = task.init()
    rates = []
    for count in range(1, 4):
        state, metrics = step_on(task, state, batch_of(16))
        assert state.step == count
        rates.append(metrics["learning_rate"])
    assert task.train_step._cache_size() == 1, "the step was traced more than once"
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params)), "the state is donated"
    assert sharding.shardings_of(state) == sharding.shardings_of(task.abstract_state)
    assert rates == pytest.approx([0, 0.005, 0.01])


def test_a_window_of_the_log_is_the_mean_over_its_predictions():
    single = toy("log.every=1")
    window = toy("log.every=3")
    one = single.init()
    other = window.init()
    sums = []
    for step in range(4):
        batch = batch_of(4, step)
        batch["attention_mask"][:, 2 + 7 * step :] = 0
        one, alone = step_on(single, one, batch)
        other, mean = step_on(window, other, batch)
        weight = batch["attention_mask"].sum() * (1 - 0.5 * step / 12)
        sums = sums if step < 3 else []
        sums.append((alone["loss"] * weight, weight))
        loss, weight = np.sum(sums, axis=0)
        assert mean["loss"] == pytest.approx(loss / weight, rel=1e-5), step


def test_the_average_of_the_parameters():
    task = toy("optimizer.ema_decay=0.75")
    state = task.init()
    expected = flat(state.params)
    for number in range(3):
        state, _ = step_on(task, state, batch_of(4, number))
        expected = {
            name: 0.75 * expected[name] + 0.25 * value for name, value in flat(state.params).items()
        }
    for name, value in flat(state.ema).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7)
    assert state.best_params is state.ema and toy().init().best_params is not None


def test_guard_skips_what_is_not_finite_and_stops_for_good(monkeypatch):
    """A skipped step counts, and neither moves anything nor takes part in the log."""
    monkeypatch.setattr(train, "GUARD_LIMIT", 3)
    task = toy("optimizer.ema_decay=0.9", "log.every=9", "train.steps=100")
    good = batch_of(4)
    bad = batch_of(4)
    bad["record_id"] += NAN
    state = task.init()
    plan = [
        (good, 0, 0),
        (bad, 1, 1),
        (bad, 2, 2),
        (good, 0, 2),
        (bad, 1, 3),
        (bad, 2, 4),
        (bad, 3, 5),
        (good, 4, 6),
    ]
    for batch, consecutive, skipped in plan:
        moves = consecutive == 0
        kept = flat((state.params, state.opt_state, state.ema))
        weight = float(state.window["loss"].weight)
        state, metrics = step_on(task, state, batch)
        assert (metrics["consecutive_nonfinite"], metrics["skipped"]) == (consecutive, skipped)
        now = flat((state.params, state.opt_state, state.ema))
        assert moves != all(np.array_equal(kept[name], now[name]) for name in kept)
        assert math.isfinite(metrics["loss"])
        assert (float(state.window["loss"].weight) > weight) == moves
    assert int(state.opt_state[0].count) == 2


def test_a_gradient_that_is_not_finite_is_skipped():
    """Where the loss itself is: the square of the gradient overflows."""
    task = toy("model.hidden_dropout=0")
    state = task.init()
    huge = state.params["head"]["kernel"] * 1e18
    state = state.replace(params=state.params | {"head": state.params["head"] | {"kernel": huge}})
    state = jax.device_put(state, sharding.shardings_of(task.abstract_state))
    _, metrics = step_on(task, state, batch_of(4))
    assert metrics["skipped"] == 1 and not math.isfinite(metrics["grad_norm"])


def test_rows_are_split_into_shorter_ones():
    batch = batch_of(3) | {"record_id": np.array([5, 2**32 - 1, 7], np.uint32)}
    parts = jax.device_get(train.split_rows(jax.tree.map(jnp.asarray, batch), 8))
    assert parts.keys() == batch.keys()
    for name in ("input_ids", "attention_mask"):
        assert np.array_equal(parts[name], batch[name].reshape(12, 8))
    ids = (4 * batch["record_id"][:, None] + np.arange(4, dtype=np.uint32)).ravel()
    assert parts["record_id"].tolist() == ids.tolist(), "modulo 2**32"
    assert parts["epoch"].tolist() == np.repeat(batch["epoch"], 4).tolist()
    assert parts["row"].tolist() == list(range(12))
    assert train.split_rows(batch, None) is batch and train.split_rows(batch, 32) is batch


def test_gradients_cross_the_devices_once_for_each_update():
    task = toy("train.accumulate=4", mesh=(4, 1, 1))
    batch = sharding.put_batch(batch_of(16), task.mesh, 16)
    module = hlo.parse(task.train_step.lower(task.abstract_state, batch).compile().as_text())
    crossing = {
        name: [one for one in body if one.opcode.startswith(("all-", "collective-"))]
        for name, body in module.computations.items()
    }
    reduced = [one for one in crossing.pop(module.entry) if one.opcode == "all-reduce"]
    elements = sum(hlo.size(one.shape) for one in reduced) / 4  # of float32
    parameters = sum(leaf.size for leaf in jax.tree.leaves(task.abstract_state.params))
    assert parameters < elements < parameters + 10, "each parameter's gradient once, and the sums"
    assert not any(crossing.values()), (
        "rows or sums cross the devices within the loop over the microbatches"
    )


def test_the_first_parameters_are_those_of_the_seed():
    """Made on their devices as the same key makes them on one."""
    params = toy(mesh=(2, 2, 2)).init().params
    assert_close(params, toy().init().params, 0, "mesh")
    other = toy("train.seed=1").init().params
    assert not np.array_equal(other["head"]["kernel"], params["head"]["kernel"])


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_a_step_without_predictions_moves_nothing(name):
    """Neither momentum nor weight decay, nor the average, nor a count; it is no step of the nonfinite guard."""
    task = toy(f"optimizer.name={name}", "optimizer.weight_decay=0.1", "optimizer.ema_decay=0.5")
    state, _ = step_on(task, task.init(), batch_of(4))
    before = jax.device_get(state)
    empty = batch_of(4)
    empty["attention_mask"][:] = 0
    state, metrics = step_on(task, state, empty)
    after = jax.device_get(state)
    for part in ("params", "opt_state", "ema"):
        assert_close(getattr(after, part), getattr(before, part), 0, name)
    assert (after.step, metrics["skipped"], metrics["consecutive_nonfinite"]) == (2, 0, 0)


def test_an_optimizer_that_reads_the_loss_gets_a_number_of_a_step_without_predictions():
    seen = []

    def update(updates, state, params=None, *, value, **_):
        jax.debug.callback(lambda value: seen.append(float(value)), value)
        return updates, state

    task = Toy(toy().config)
    task.optimizer = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    task.init, task.abstract_state = train.make_init(task)
    task.train_step = train.make_train_step(task)
    empty = batch_of(4)
    empty["attention_mask"][:] = 0
    jax.block_until_ready(step_on(task, task.init(), empty))
    jax.effects_barrier()
    assert seen == [0.0]


def test_after_skipped_steps_all_schedules_are_at_the_step_of_the_run():
    """The learning rate and the masking rate; a decay ends with the run, however many steps were skipped."""
    settings = ("train.steps=8", "log.every=1", "schedule.name=linear")
    task = toy(*settings, "optimizer.name=lion", "optimizer.weight_decay=0")
    state = task.init()
    for step in range(8):
        batch = batch_of(4, step)
        is_skipped = step in (2, 3)
        batch["record_id"] += NAN * is_skipped
        before = np.asarray(state.params["head"]["kernel"])
        state, metrics = step_on(task, state, batch)
        rate = 0.003 * (1 - step / 8)
        assert metrics["learning_rate"] == pytest.approx(rate, rel=1e-5)
        moved = np.abs(np.asarray(state.params["head"]["kernel"]) - before).max()
        if is_skipped:
            assert moved == 0
        else:
            assert moved == pytest.approx(rate, rel=1e-3)
            visible = batch["attention_mask"].mean() * (1 - 0.5 * step / 8)
            assert metrics["visible"] == pytest.approx(visible, rel=1e-5)
    assert metrics["skipped"] == 2
