"""The training step and the evaluation step: mask -> model -> loss -> optimizer, in one jit each.

Dimensions: A microbatches, B rows, L tokens in a row, K predictions in a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.model.loss import RowSums, prediction_scores, sum_rows
from mlm.model.masking import TokenMasking
from mlm.model.module import Model, Params, segment_and_position_ids
from mlm.training import breakdown, recipe
from mlm.training.recipe import Run
from mlm.training.sharding import BATCH, logical_rows
from mlm.training.state import TrainState, Window, shardings_of

# input_ids and attention_mask [B, L] int32, record_id and epoch [B] uint32; share [B] float32 with train.hours
Batch = dict[str, jax.Array]
Inputs = Any  # what a loss reads: a tree of arrays with an entry for each row
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]  # metrics are scalars
Gradient = Callable[[Params, Batch, jax.Array], tuple[Params, RowSums]]


def mean_gradient(
    run: Run,
    prepare: Callable[[Batch, jax.Array], Inputs],
    row_sums: Callable[[Params, Inputs, jax.Array, jax.Array], RowSums],
    mesh: Mesh,
) -> Gradient:
    """Returns `(params, batch, step) -> (gradient of the mean loss, sums over the batch)`.

    The mean is over all predictions of the global batch: losses and weights are summed over microbatches and devices
    and divided once, so that accumulation changes the result by rounding alone, also with dropout, which depends on the
    number of a row in the global batch. Each device sums over its slice of the data axis; the compiler partitions the
    other axes.
    """
    accumulate = run["train.accumulate"]

    def loss_sum(params: Params, inputs: Inputs, rows_B: jax.Array, key: jax.Array) -> tuple[jax.Array, RowSums]:
        rows = row_sums(params, inputs, rows_B, key)
        return jnp.sum(rows.loss_B), jax.tree.map(jnp.sum, rows)

    gradient_sum = jax.grad(loss_sum, has_aux=True)

    def local_grads(params: Params, inputs: Inputs, rows_B: jax.Array, key: jax.Array) -> tuple[Params, RowSums]:
        """Returns the sums over one slice of the data axis."""
        if accumulate == 1:
            return gradient_sum(params, inputs, rows_B, key)

        def add(total: tuple[Params, RowSums], micro: tuple) -> tuple[tuple[Params, RowSums], None]:
            index, inputs = micro
            part = gradient_sum(params, inputs, rows_B * accumulate + index, key)
            return jax.tree.map(jnp.add, total, part), None

        micro = jax.tree.map(lambda x: _microbatches(x, accumulate), inputs)
        shapes = jax.eval_shape(gradient_sum, params, jax.tree.map(lambda x: x[0], micro), rows_B, key)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, zero, (jnp.arange(accumulate, dtype=jnp.uint32), micro))[0]

    sum_grads = local_grads
    if mesh.shape["data"] > 1:
        # Gradients accumulated in float32 are sent in float32, and all on CPU, where XLA crashes on less (jax 0.10.2).
        keep_dtype = accumulate > 1 or mesh.devices.flat[0].platform == "cpu"
        sum_grads = _psum_over_data(local_grads, mesh, comm_dtype=None if keep_dtype else run["model.dtype"])

    def gradient(params: Params, batch: Batch, step: jax.Array) -> tuple[Params, RowSums]:
        inputs = prepare(batch, step)
        rows_B = logical_rows(mesh, len(jax.tree.leaves(inputs)[0]) // accumulate)
        in_order = (np.diff(rows_B) == 1).all()
        rows_B = jnp.arange(len(rows_B), dtype=jnp.uint32) if in_order else jnp.asarray(rows_B)
        key = jax.random.fold_in(jax.random.key(run["train.seed"]), step)
        total, sums = sum_grads(params, inputs, rows_B, key)
        return jax.tree.map(lambda g: g / jnp.maximum(sums.weight_B, 1), total), sums

    return gradient


def _microbatches(x_Bx: jax.Array, accumulate: int) -> jax.Array:
    """Returns [A, B / A, ...]: microbatch a holds rows a, a + A, ..., which keeps every row on its device."""
    return jnp.moveaxis(x_Bx.reshape(-1, accumulate, *x_Bx.shape[1:]), 1, 0)


def _psum_over_data(local_grads: Callable, mesh: Mesh, *, comm_dtype: str | None) -> Callable:
    """Sums `local_grads` over the data axis in one all-reduce; matrices are sent in `comm_dtype`, if given."""

    def psum_grads(*args: Any) -> tuple[Params, RowSums]:
        total, sums = local_grads(*args)
        cast = jax.tree.map(lambda g: g.astype(comm_dtype) if comm_dtype and g.ndim > 1 else g, total)
        cast, sums = jax.lax.psum((cast, sums), "data")
        return jax.tree.map(lambda g, like: g.astype(like.dtype), cast, total), sums

    # An axis left to the compiler, even one of size 1, costs fusions on a TPU: each norm is written to memory.
    manual_axes = {axis for axis, size in mesh.shape.items() if axis == "data" or size == 1}
    specs = (P(), P("data"), P("data"), P())
    return jax.shard_map(psum_grads, mesh=mesh, in_specs=specs, out_specs=P(), axis_names=manual_axes, check_vma=False)


def split_rows(batch: Batch, parts: int) -> Batch:
    """Returns a batch in which each row is split into `parts` consecutive subsequences, each a row of its own.

    Subsequence p of record r is record r * parts + p, modulo 2^32: distinct as long as there are fewer.
    """
    if parts == 1:
        return batch
    part = jnp.arange(parts, dtype=jnp.uint32)
    rows = {name: batch[name].reshape(-1, batch[name].shape[1] // parts) for name in ("input_ids", "attention_mask")}
    record_id = (batch["record_id"][:, None] * jnp.uint32(parts) + part).reshape(-1)
    return {**rows, "record_id": record_id, "epoch": jnp.repeat(batch["epoch"], parts)}


def schedule_step(batch: Batch) -> jax.Array:
    """Returns the schedule position of a batch under train.hours, in steps."""
    return jnp.max(batch["share"]) * recipe.HOURS_STEPS


def make_train_step(
    run: Run,
    gradient: Gradient,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    abstract_state: TrainState,  # from `state.jit_init`
    *,
    has_accuracy: bool = True,
) -> TrainStep:
    """Returns the jitted step `(state, batch) -> (state, metrics)`; the state is donated.

    A step whose loss or gradient is not finite updates nothing and is counted. After train.guard_limit of them in a row
    no step updates anything; the loop stops when it next reads the metrics (log.every).
    """
    ema_decay = run["optimizer.ema_decay"]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, sums = gradient(state.params, batch, state.step)
        by_share = {"progress": schedule_step(batch)} if "share" in batch else {}
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **by_share)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(sums.loss_B) & jnp.isfinite(grad_norm)
        keep = finite & (state.consecutive_nonfinite < run["train.guard_limit"])

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(keep, new, old)

        params = jax.tree.map(choose, optax.apply_updates(state.params, updates), state.params)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda e, p: choose(ema_decay * e + (1 - ema_decay) * p, e), ema, params)
        fresh = state.step % run["log.every"] == 0
        window = jax.tree.map(
            lambda old, new: jnp.where(fresh, 0, old) + jnp.where(keep, new, 0), state.window, Window(*sums)
        )
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=jax.tree.map(choose, opt_state, state.opt_state),
            ema=ema,
            consecutive_nonfinite=jnp.where(keep, 0, state.consecutive_nonfinite + 1),
            skipped=state.skipped + ~keep,
            window=window,
        )
        metrics = {
            "loss": window.loss / window.weight,
            **({"accuracy": window.correct / window.weight} if has_accuracy else {}),
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(schedule(by_share.get("progress", state.step - state.skipped)), jnp.float32),
            "skipped": new.skipped,
            "consecutive_nonfinite": new.consecutive_nonfinite,
            **({"share": jnp.max(batch["share"])} if by_share else {}),
        }
        return new, metrics

    shardings, mesh = shardings_of(abstract_state), abstract_state.step.sharding.mesh
    return jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, BATCH)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )


def jit_eval_step(step: Callable[[Params, Batch], Any], mesh: Mesh, param_shardings: Params) -> Callable:
    """Returns the jitted step; its results are on every host."""
    shardings = (param_shardings, NamedSharding(mesh, BATCH))
    return jax.jit(step, in_shardings=shardings, out_shardings=NamedSharding(mesh, P()))


def make_eval_step(
    module: Model,
    masking: TokenMasking,
    mask_seed: int,
    mesh: Mesh,
    param_shardings: Params,
    *,
    with_breakdown: bool = False,
) -> Callable[[Params, Batch], tuple[jax.Array, ...]]:
    """Returns the jitted `(params, batch) -> RowSums`, without dropout; `with_breakdown` adds `breakdown.sums`.

    The masks depend on the record and the draw, which is the batch's "epoch"; rows whose "valid" is 0 have weight 0.
    """

    def step(params: Params, batch: Batch) -> tuple[jax.Array, ...]:
        attention_BxL = batch["attention_mask"]
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        masked = masking(jax.random.key(mask_seed), *columns)
        logits = module.logits(params, masked.ids_BxL, attention_BxL, masked.positions_BxK)
        weights_BxK = masked.weights_BxK * batch["valid"][:, None]
        scores = prediction_scores(logits, masked.labels_BxK, weights_BxK, masking.vocab_size)
        if not with_breakdown:
            return sum_rows(scores)
        inputs = (batch["input_ids"], attention_BxL)
        segments_BxL, _ = segment_and_position_ids(*inputs, 0, module.compute.cls_id)
        return *sum_rows(scores), breakdown.sums(scores, batch["input_ids"], segments_BxL, masked)

    return jit_eval_step(step, mesh, param_shardings)
