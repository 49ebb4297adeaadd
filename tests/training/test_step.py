"""The step: one trace, the same numbers on every mesh and for every accumulation, and a guard that holds."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.errors import InputError
from mlm.model.loss import Mean
from mlm.plan import hlo
from mlm.tasks.pretraining import Pretraining
from mlm.training import data_parallel, sharding
from tests.support.tiny import INFO, assert_close, flat, random_batch, shared_run, slow, tiny_config, tiny_run


def train(run, count: int = 4, rows: int = 16):
    """Returns the state after `count` updates and the metrics of each."""
    state, history = run.init(), []
    for index in range(count):
        state, metrics = run.train_step(state, sharding.put_batch(random_batch(rows, index), run.mesh, rows))
        history.append({key: float(value) for key, value in metrics.items()})
    return state, history


def test_one_trace():
    run = tiny_run()
    train(run, 5)
    assert run.train_step._cache_size() == 1, "the step was traced more than once"


MODERNBERT = ("model.family=modernbert", "model.layers=3", "model.local_attention=8")
CASES = [slow((2, 4, 1), ()), slow((2, 2, 2), ()), ((2, 2, 2), MODERNBERT), slow((1, 4, 2), MODERNBERT)]
CASES += [slow((2, 2, 2), ("model.family=roberta_prelayernorm",))]


@pytest.mark.standard
@pytest.mark.parametrize(("mesh", "family"), CASES)
def test_every_mesh_gives_the_same_gradient(mesh, family):
    # With SGD-like first steps the parameters would hide a wrong scale; so compare loss and gradient norm of every
    # step, and the first moments, which are the gradient.
    one, other = shared_run(*family), shared_run(*family, mesh=mesh)
    state, history = train(one)
    state2, history2 = train(other)
    for a, b in zip(history, history2, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert_close(moments(state), moments(state2), 1e-3, f"mesh {mesh}")


def moments(state):
    """The first moments of adamw: after one update, (1 - b1) times the gradient."""
    return next(s.mu for s in jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))


def test_parameters_are_spread_as_the_rules_say():
    state = shared_run(mesh=(2, 2, 2)).init()
    for leaves in (state.params, moments(state)):
        kernel = leaves["roberta"]["encoder"]["layer"]["0"]["attention"]["self"]["query"]["kernel"]
        assert kernel.sharding.spec == jax.P("fsdp", "tensor")
        assert kernel.addressable_shards[0].data.shape == (16, 16)


@pytest.mark.standard
@pytest.mark.parametrize(("accumulate", "rate"), [(2, 0.1), slow(4, 0.1), slow(2, 0)])
def test_accumulation_equals_the_large_batch(accumulate, rate):
    # 32 rows, with fewer predictions in the padded ones: a mean of means would differ.
    settings = ("data.global_batch=32", f"model.hidden_dropout={rate}", f"model.attention_dropout={rate}")
    one = shared_run(*settings)
    other = shared_run(*settings, f"train.accumulate={accumulate}")
    state, history = train(one, 1, 32)
    state2, history2 = train(other, 1, 32)
    assert history[0]["loss"] == pytest.approx(history2[0]["loss"], rel=1e-6)
    assert_close(moments(state), moments(state2), 1e-5, f"accumulate {accumulate}")


def test_microbatches_are_rows_of_every_device():
    """A microbatch made of a contiguous block would leave most devices idle or move rows between them."""
    rows = data_parallel.microbatches(jnp.arange(16), 2)
    assert rows.tolist() == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_gradient_is_that_of_the_mean_over_predictions():
    run = shared_run()
    state, history = train(run, 1)
    # Halving the weight of nothing changes nothing: the same batch twice has the same mean and the same gradient.
    twice = shared_run("data.global_batch=32")
    batch = {key: np.concatenate([value, value]) for key, value in random_batch(16).items()}
    state2, metrics = twice.train_step(twice.init(), sharding.put_batch(batch, twice.mesh, 32))
    assert float(metrics["loss"]) == pytest.approx(history[0]["loss"], rel=1e-6)
    assert_close(moments(state), moments(state2), 1e-5, "the batch twice")


def poison(state):
    params = jax.tree.map(lambda p: p, state.params)
    params["lm_head"]["bias"] = params["lm_head"]["bias"].at[7].set(jnp.nan)
    return state.replace(params=params)


def test_guard_skips_what_is_not_finite_and_stops_for_good():
    run = tiny_run("train.guard_limit=3", "optimizer.ema_decay=0.9")
    state, _ = train(run, 2)
    good_params, good_opt = flat(state.params), flat(state.opt_state)
    bad = flat(poison(state).params)
    state = jax.device_put(poison(state), sharding.shardings_of(run.abstract_state))
    for count in (1, 2, 3, 4):
        state, metrics = run.train_step(state, sharding.put_batch(random_batch(), run.mesh, 16))
        assert int(metrics["consecutive_nonfinite"]) == count
        assert int(metrics["skipped"]) == count
    assert all(np.array_equal(value, bad[name], equal_nan=True) for name, value in flat(state.params).items())
    assert all(np.array_equal(value, good_opt[name]) for name, value in flat(state.opt_state).items())
    assert all(np.isfinite(value).all() for value in flat(state.ema).values())

    # After three in a row, finite steps no longer update anything.
    repaired = state.params | {"lm_head": state.params["lm_head"] | {"bias": jnp.asarray(good_params["lm_head/bias"])}}
    state = jax.device_put(state.replace(params=repaired), sharding.shardings_of(run.abstract_state))
    state, metrics = run.train_step(state, sharding.put_batch(random_batch(), run.mesh, 16))
    assert int(metrics["consecutive_nonfinite"]) == 5
    assert all(np.array_equal(value, good_params[name]) for name, value in flat(state.params).items())


@pytest.mark.slow
def test_guard_resets_before_the_limit():
    run = tiny_run("train.guard_limit=3")
    state, _ = train(run, 1)
    good = state.params["lm_head"]["bias"]
    state = jax.device_put(poison(state), sharding.shardings_of(run.abstract_state))
    state, _ = run.train_step(state, sharding.put_batch(random_batch(), run.mesh, 16))
    repaired = state.params | {"lm_head": state.params["lm_head"] | {"bias": good}}
    state = jax.device_put(state.replace(params=repaired), sharding.shardings_of(run.abstract_state))
    state, metrics = run.train_step(state, sharding.put_batch(random_batch(), run.mesh, 16))
    assert int(metrics["consecutive_nonfinite"]) == 0
    assert int(metrics["skipped"]) == 1
    assert np.isfinite(float(metrics["loss"])), "a skipped batch must not poison the mean of the log"


@pytest.mark.slow
def test_average_of_parameters():
    run = tiny_run("optimizer.ema_decay=0.75")
    state = run.init()
    expected = flat(state.params)
    for index in range(3):
        state, _ = run.train_step(state, sharding.put_batch(random_batch(16, index), run.mesh, 16))
        params = flat(state.params)
        expected = {name: 0.75 * value + 0.25 * params[name] for name, value in expected.items()}
    for name, value in flat(state.ema).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_log_window_is_the_mean_over_predictions():
    single, window = tiny_run("log.every=1"), tiny_run("log.every=4")
    _, each = train(single, 6)
    _, mean = train(window, 6)
    assert mean[0]["loss"] == pytest.approx(each[0]["loss"])
    assert mean[3]["loss"] == pytest.approx(np.mean([m["loss"] for m in each[:4]]), rel=2e-2)
    assert mean[4]["loss"] == pytest.approx(each[4]["loss"]), "a new window starts after every fourth update"


class WithPadding(Pretraining):
    """Counts a metric of its own: the share of padding in what the model reads."""

    def metrics(self, logits_BxKxV, masked, intermediates):
        sum_B = jnp.sum(1.0 - masked.attention_BxL, axis=-1)
        return {"padding": Mean(sum_B, jnp.full_like(sum_B, masked.attention_BxL.shape[1]))}


@pytest.mark.parametrize(("shape", "accumulate"), [slow((8, 1, 1), 1), ((2, 2, 2), 2)])
def test_a_metric_of_the_task_is_the_mean_over_the_window(shape, accumulate):
    mesh = sharding.make_mesh(**dict(zip(sharding.AXES, shape, strict=True)))
    settings = ("data.global_batch=32", "log.every=2", f"train.accumulate={accumulate}")
    run = WithPadding(tiny_config(*settings), INFO, mesh=mesh)
    state, shares = run.init(), []
    for rows in (1, 5, 16):
        batch = random_batch(32)
        batch["attention_mask"][:] = 1
        batch["attention_mask"][:rows, 20:] = 0
        shares.append(rows * 12 / (32 * 32))
        state, metrics = run.train_step(state, sharding.put_batch(batch, mesh, 32))
        window = shares[-1:] if len(shares) == 3 else shares
        assert float(metrics["padding"]) == pytest.approx(np.mean(window), rel=1e-6)
    assert run.train_step._cache_size() == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda weights_BxK: jnp.mean(weights_BxK),
        lambda weights_BxK: Mean(jnp.sum(weights_BxK), jnp.float32(1)),
        lambda weights_BxK: Mean(weights_BxK, weights_BxK),
        lambda weights_BxK: Mean(jnp.sum(weights_BxK, -1).astype(jnp.bfloat16), jnp.sum(weights_BxK, -1)),
    ],
)
def test_a_metric_that_is_no_sum_of_each_row_is_refused(wrong):
    class Wrong(Pretraining):
        def metrics(self, logits_BxKxV, masked, intermediates):
            return {"padding": wrong(masked.weights_BxK)}

    with pytest.raises(InputError, match=r"Wrong\.metrics: padding must be .*float32"):
        Wrong(tiny_config(), INFO)


@pytest.mark.slow
def test_padding_of_the_vocabulary_is_never_learnt():
    run = tiny_run("optimizer.weight_decay=0")
    before = flat(run.init().params)
    after = flat(train(run, 3)[0].params)
    for name in ("lm_head/bias", "roberta/embeddings/word_embeddings/embedding"):
        assert after[name].shape[0] == 512
        assert np.array_equal(before[name][500:], after[name][500:]), f"{name}: a row of the padding has moved"
        assert not np.array_equal(before[name][:500], after[name][:500])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", slow("lion"), slow("adafactor"), slow("muon")])
def test_every_optimizer_takes_the_step(name):
    run = tiny_run(f"optimizer.name={name}", "optimizer.clip_norm=1", mesh=(2, 2, 2))
    _, history = train(run, 6)
    assert all(np.isfinite(m["loss"]) and m["skipped"] == 0 for m in history)


@pytest.mark.slow
@pytest.mark.parametrize("change", [slow("model.remat=true"), "model.remat_feed_forward=1"])
def test_remat_changes_nothing(change):
    dropout = ("model.layers=2", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    state, history = train(tiny_run(*dropout), 2)
    state2, history2 = train(tiny_run(*dropout, change), 2)
    assert history[-1]["loss"] == pytest.approx(history2[-1]["loss"], rel=1e-5)
    assert_close(moments(state), moments(state2), 1e-4, change)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [slow((8, 1, 1)), slow((2, 4, 1)), (2, 2, 2)])
def test_dropout_is_the_same_on_every_mesh_and_is_one_of_the_whole_batch(mesh):
    dropout = ("model.layers=2", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    state, history = train(tiny_run(*dropout, "data.global_batch=32", "train.accumulate=2", mesh=(1, 8, 1)), 1, 32)
    state2, history2 = train(tiny_run(*dropout, "data.global_batch=32", "train.accumulate=2", mesh=mesh), 1, 32)
    assert history[0]["loss"] == pytest.approx(history2[0]["loss"], rel=1e-5)
    assert_close(moments(state), moments(state2), 1e-3, f"mesh {mesh}")


@pytest.mark.slow
@pytest.mark.parametrize("change", [slow("train.accumulate=1"), "train.accumulate=2", slow("data.short_length=8")])
@pytest.mark.parametrize("mesh", [slow((8, 1, 1)), (4, 2, 1)])
def test_dropout_follows_the_rows_where_hosts_interleave(monkeypatch, change, mesh):
    """The same rows elsewhere in the array, as `logical_rows` has them for hosts in the order 0, 1, 0, 1, ..."""
    settings = ("model.hidden_dropout=0.1", "data.global_batch=32", "optimizer.b1=0", change)
    batch, found = random_batch(32), []
    for processes in (np.zeros((8, 1), int), np.arange(8)[:, None] % 2):
        monkeypatch.setattr(data_parallel, "processes_of", lambda mesh, processes=processes: processes)
        run = tiny_run(*settings, mesh=mesh)
        rows = data_parallel.logical_rows(run.mesh, 32)
        assert (rows[4] == 16) == processes.any()
        moved = {name: column[rows] for name, column in batch.items()}
        length = run.stages.stage_at(1).length
        found.append(run.train_step(run.init(), sharding.put_batch(moved, run.mesh, 32), length))
    (state, metrics), (state2, metrics2) = found
    assert float(metrics["loss"]) == pytest.approx(float(metrics2["loss"]), rel=1e-6)
    assert_close(moments(state), moments(state2), 1e-4, change)


@pytest.mark.parametrize("accumulate", [slow(1), 4])
def test_gradients_cross_the_devices_once_for_each_update(accumulate):
    run = tiny_run("data.global_batch=64", f"train.accumulate={accumulate}")
    batch = sharding.put_batch(random_batch(64), run.mesh, 64)
    module = hlo.parse(run.train_step.lower(run.abstract_state, batch).compile().as_text())
    reduced = {name: [one for one in body if one.opcode == "all-reduce"] for name, body in module.computations.items()}
    elements = sum(math.prod(shape) for one in reduced.pop(module.entry) for shape in shapes_in(one.shape))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    assert parameters < elements < 1.02 * parameters + 100, "each parameter's gradient once, and the sums"
    assert not any(reduced.values()), "an all-reduce within the loop over the microbatches"


def shapes_in(text: str) -> list[list[int]]:
    """Returns the shapes of the arrays that an instruction's result is made of."""
    return [[int(size) for size in sizes.split(",") if size] for sizes in re.findall(r"\w\[([\d,]*)\]", text)]


@pytest.mark.slow
def test_bfloat16_keeps_float32_parameters():
    state, history = train(tiny_run("model.dtype=bfloat16"), 2)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))
    assert history[0]["loss"] == pytest.approx(train(tiny_run(), 1)[1][0]["loss"], rel=2e-2)
