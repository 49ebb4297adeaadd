"""The training step and the evaluation step: mask -> model -> loss -> optimizer, in one jit each.

Dimensions: A microbatches, B rows, L tokens in a row, K predictions in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.model.loss import RowSums, masked_cross_entropy
from mlm.model.masking import TokenMasking
from mlm.model.roberta import Network, Params
from mlm.training.sharding import BATCH, logical_rows
from mlm.training.state import TrainState, Window

Batch = dict[str, jax.Array]  # input_ids and attention_mask [B, L] int32, record_id and epoch [B] uint32
Inputs = Any  # what a loss reads: a tree of arrays with an entry for each row
Metrics = dict[str, jax.Array]  # scalars


def mean_gradient(
    *,
    prepare: Callable[[Batch, jax.Array], Inputs],
    loss_sum: Callable[[Params, Inputs, jax.Array, jax.Array], tuple[jax.Array, RowSums]],
    seed: int,
    accumulate: int,
    mesh: Mesh | None,
    dtype: str,
) -> Callable[[Params, Batch, jax.Array], tuple[Params, RowSums]]:
    """Returns `(params, batch, step) -> (gradient of the mean loss, sums over the batch)`.

    The mean is over all predictions of the global batch: sums and weights are added over microbatches and devices and
    divided once, so that `accumulate` changes the result by rounding alone.

    Args:
      prepare: `(batch, step) -> what the loss reads of it`.
      loss_sum: `(params, inputs, rows_B, dropout's key) -> (summed loss, sums over rows)`, where rows_B numbers the
        rows for the dropout.
      seed: of the dropout's keys.
      accumulate: A; microbatch a holds rows a, a + A, ... so that each device has its share of every one.
      mesh: of the batch. Over its data axis each device adds up by itself; over the others the compiler splits. None to
        leave it all to the compiler.
      dtype: of the computation.
    """
    gradient_sum = jax.grad(loss_sum, has_aux=True)

    def own_sum(params: Params, inputs: Inputs, rows_B: jax.Array, key: jax.Array) -> tuple[Params, RowSums]:
        """Returns the sums over the rows that a slice of the data axis holds."""
        if accumulate == 1:
            return gradient_sum(params, inputs, rows_B, key)

        def add(total: tuple[Params, RowSums], micro: tuple) -> tuple[tuple[Params, RowSums], None]:
            index, inputs = micro
            part = gradient_sum(params, inputs, rows_B, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, part), None

        micro = jax.tree.map(lambda x: _microbatches(x, accumulate), inputs)
        shapes = jax.eval_shape(gradient_sum, params, jax.tree.map(lambda x: x[0], micro), rows_B, key)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, zero, (jnp.arange(accumulate), micro))[0]

    add_up = own_sum
    if mesh is not None and mesh.shape["data"] > 1:
        narrow = accumulate == 1 and mesh.devices.flat[0].platform != "cpu"
        add_up = _over_the_data_axis(own_sum, mesh, dtype if narrow else None)

    def gradient(params: Params, batch: Batch, step: jax.Array) -> tuple[Params, RowSums]:
        inputs = prepare(batch, step)
        rows_B = _row_numbers(len(jax.tree.leaves(inputs)[0]) // accumulate, mesh)
        total, sums = add_up(params, inputs, rows_B, jax.random.fold_in(jax.random.key(seed), step))
        return jax.tree.map(lambda g: g / jnp.maximum(sums.weight_B, 1), total), sums

    return gradient


def _row_numbers(rows: int, mesh: Mesh | None) -> jax.Array:
    """Returns the row of a microbatch that each row of its arrays holds, uint32 [rows]."""
    if mesh is not None and (np.diff(numbers := logical_rows(mesh, rows)) != 1).any():
        return jnp.asarray(numbers)
    return jnp.arange(rows, dtype=jnp.uint32)


def as_views(batch: Batch, views: int) -> Batch:
    """Returns a batch whose rows are read as `views` shorter ones each, one after the other.

    Part p of record r is the record r * views + p, modulo 2^32: distinct as long as all of them are fewer.
    """
    if views == 1:
        return batch
    part = jnp.arange(views, dtype=jnp.uint32)
    rows = {name: batch[name].reshape(-1, batch[name].shape[1] // views) for name in ("input_ids", "attention_mask")}
    record_id = (batch["record_id"][:, None] * jnp.uint32(views) + part).reshape(-1)
    return {**rows, "record_id": record_id, "epoch": jnp.repeat(batch["epoch"], views)}


def _over_the_data_axis(own_sum: Callable, mesh: Mesh, dtype: str | None) -> Callable:
    """Returns `own_sum` of each slice of the data axis, added up: once for each update, whatever it does within.

    Args:
      own_sum: `(params, inputs, rows_B, key) -> (gradients, sums over rows)`.
      mesh: of the batch.
      dtype: in which matrices travel, that of the computation, in which their gradients came; None for their own, as
        after accumulation, and on a CPU, where XLA ends the process over a narrower one (jax 0.10.2).
    """

    def shared_sum(*args: Any) -> tuple[Params, RowSums]:
        total, sums = own_sum(*args)
        moved = jax.tree.map(lambda g: g.astype(dtype) if dtype and g.ndim > 1 else g, total)
        moved, sums = jax.lax.psum((moved, sums), "data")
        return jax.tree.map(lambda g, like: g.astype(like.dtype), moved, total), sums

    rows = P("data")
    # With an axis left to it, even of one device, the TPU's compiler fuses less: each norm into an array.
    by_hand = {axis for axis, size in mesh.shape.items() if axis == "data" or size == 1}
    return jax.shard_map(
        shared_sum,
        mesh=mesh,
        in_specs=(P(), rows, rows, P()),
        out_specs=P(),
        axis_names=by_hand,
        check_vma=False,
    )


def make_train_step(
    *,
    gradient: Callable[[Params, Batch, jax.Array], tuple[Params, RowSums]],
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    ema_decay: float,
    guard_limit: int,
    log_every: int,
    mesh: Mesh,
    shardings: TrainState,
    has_accuracy: bool = True,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the jitted step `(state, batch) -> (state, metrics)`; the state is donated.

    An update whose loss or gradient is not finite is skipped and counted; after `guard_limit` in a row the parameters
    stay as they are for good, and the loop, which reads the metrics late, has time to stop.

    Args:
      gradient: of `mean_gradient`.
      tx, schedule: the optimizer, and its learning rate for the log.
      ema_decay: of the averaged parameters; unused if the state has none.
      guard_limit: non-finite updates in a row after which nothing is updated any more.
      log_every: updates over which the logged loss is averaged.
      mesh, shardings: of the batch, and of the state.
      has_accuracy: of what is predicted; numbers have none.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, sums = gradient(state.params, batch, state.step)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        grad_norm = optax.tree.norm(grads)
        good = jnp.isfinite(sums.loss_B) & jnp.isfinite(grad_norm)
        keep = good & (state.bad_in_row < guard_limit)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(keep, new, old)

        params = jax.tree.map(choose, optax.apply_updates(state.params, updates), state.params)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda e, p: choose(ema_decay * e + (1 - ema_decay) * p, e), ema, params)
        window = state.window.add(Window(*sums), fresh=state.step % log_every == 0, use=keep)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=jax.tree.map(choose, opt_state, state.opt_state),
            ema=ema,
            bad_in_row=jnp.where(keep, 0, state.bad_in_row + 1),
            skipped=state.skipped + ~keep,
            window=window,
        )
        means = {"loss": window.loss / window.weight}
        if has_accuracy:
            means["accuracy"] = window.correct / window.weight
        return new, means | {
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(schedule(state.step - state.skipped), jnp.float32),
            "skipped": new.skipped,
            "bad_in_row": new.bad_in_row,
        }

    return jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, BATCH)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )


def _microbatches(x_Bx: jax.Array, accumulate: int) -> jax.Array:
    """Returns [A, B / A, ...]: rows a, a + A, ... in microbatch a, which keeps every row on its device."""
    return jnp.moveaxis(x_Bx.reshape(-1, accumulate, *x_Bx.shape[1:]), 1, 0)


def make_eval_step(
    *,
    network: Network,
    masking: TokenMasking,
    mask_seed: int,
    mesh: Mesh,
    param_shardings: Params,
) -> Callable[[Params, Batch], RowSums]:
    """Returns the jitted `(params, batch) -> RowSums`, on every host, without dropout.

    The masks depend on the record alone; rows whose "valid" is 0 count nothing.
    """

    def step(params: Params, batch: Batch) -> RowSums:
        attention_BxL = batch["attention_mask"]
        record_B = batch["record_id"]
        key = jax.random.key(mask_seed)
        masked = masking(key, batch["input_ids"], attention_BxL, record_B, jnp.zeros_like(record_B))
        logits = network.masked_logits(params, masked.ids_BxL, attention_BxL, masked.positions_BxK)
        weights_BxK = masked.weights_BxK * batch["valid"][:, None]
        return masked_cross_entropy(logits, masked.labels_BxK, weights_BxK, masking.vocab_size)

    return jax.jit(
        step,
        in_shardings=(param_shardings, NamedSharding(mesh, BATCH)),
        out_shardings=NamedSharding(mesh, P()),
    )
