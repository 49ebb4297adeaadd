"""The program of a run on one page: state, step, loop.

A run gives the same numbers however often it is stopped and restarted.

Dimensions: A microbatches, B rows.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mlm import cluster
from mlm.cluster import distributed
from mlm.errors import NumericsError, PreemptedError
from mlm.model.keys import in_32_bits, make_key
from mlm.model.loss import Mean
from mlm.model.module import Params
from mlm.paths import UPath, write_text
from mlm.text import say
from mlm.training import resume, sharding, xla_metrics
from mlm.training.checkpoint import Checkpoints, OnComplete
from mlm.training.metrics import Log, param_norms
from mlm.training.task import Batch, Inputs, Task, TrainState, TrainStep, metric_names
from mlm.workdir import Workdir

GUARD_LIMIT = 10  # steps in a row without a finite loss and gradient
# (parameters, inputs [B, ...], rows_B, key) -> (gradient summed over the rows, sums)
GradientSum = Callable[[Params, Any, jax.Array, jax.Array], tuple[Params, Any]]


def make_init(task: Task) -> tuple[Callable[..., TrainState], TrainState]:
    """Returns what makes the state before the first step, every array on its devices; and the state of abstract arrays.

    It is jitted; its arguments go to `Task.init_params`.
    """

    @in_32_bits
    def init(*inputs: Any) -> TrainState:
        params = task.init_params(make_key(task.config.train.seed), *inputs)
        window = {name: Mean(jnp.zeros(()), jnp.zeros(())) for name in metric_names(task, params)}
        ema = params if task.config.optimizer.ema_decay > 0 else None
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, task.optimizer.init(params), ema, zero, zero, window)

    shapes = jax.eval_shape(init)
    shardings = sharding.tree_shardings(
        shapes, task.mesh, shapes.params, task.module.partition_rules()
    )
    abstract = jax.tree.map(
        lambda leaf, leaf_sharding: leaf.update(sharding=leaf_sharding), shapes, shardings
    )
    return jax.jit(init, out_shardings=shardings), abstract


def make_gradient(
    task: Task,
) -> Callable[[Params, Batch, jax.Array], tuple[Params, dict[str, Mean]]]:
    """Returns `(params, batch, step) -> (gradient of the mean loss, sums of all metrics)`.

    The mean is over all predictions of the global batch: sums and weights are added up over microbatches and devices,
    and divided once. So mesh and accumulation change the result by rounding alone, also with dropout, which depends on
    the number of a row in the global batch.
    """
    config = task.config
    accumulate = config.train.accumulate

    @functools.partial(jax.grad, has_aux=True)
    def gradient(params: Params, inputs: Inputs, rows_B: jax.Array, key: jax.Array) -> tuple:
        """Returns the gradient of the loss, summed over some rows, and the sums of all metrics: model, then loss."""
        logits, intermediates = task.forward(params, inputs, rows_B, key)
        means = task.loss(logits, inputs).metrics() | task.metrics(logits, inputs, intermediates)
        totals = jax.tree.map(jnp.sum, means)
        return totals["loss"].sum, totals

    def gradient_sum(params: Params, inputs: Inputs, rows_B: jax.Array, key: jax.Array) -> tuple:
        """Returns `gradient` over a device's rows, in microbatches; a microbatch has some rows of every device."""
        if accumulate == 1:
            return gradient(params, inputs, rows_B, key)

        def add(total: tuple, micro: tuple) -> tuple:
            return jax.tree.map(jnp.add, total, gradient(params, *micro, key)), None

        # Microbatch a of A holds rows a, a + A, ..., which keeps every row on its device.
        micro = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0), (inputs, rows_B)
        )
        shapes = jax.eval_shape(gradient, params, *jax.tree.map(lambda x: x[0], micro), key)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, zero, micro)[0]

    matrix_dtype = config.model.dtype if accumulate == 1 else "float32"
    over_devices = sum_over_data(gradient_sum, task.mesh, matrix_dtype=matrix_dtype)

    def mean_gradient(params: Params, batch: Batch, step: jax.Array) -> tuple:
        inputs = task.inputs(batch, step)
        key = jax.random.fold_in(make_key(config.train.seed), step)
        grads, sums = over_devices(params, inputs, batch["row"], key)
        # 0 of a batch without predictions
        weight = jnp.where(sums["loss"].weight > 0, sums["loss"].weight, 1)
        return jax.tree.map(lambda g: g / weight, grads), sums

    return mean_gradient


def sum_over_data(gradient_sum: GradientSum, mesh: Mesh, *, matrix_dtype: str) -> GradientSum:
    """Returns `gradient_sum` over all devices: each takes its slice of the data axis, and one all-reduce adds them up.

    The compiler partitions the other axes. Gradients of matrices are sent in `matrix_dtype`, but on CPU, where XLA
    crashes on less than float32 (jax 0.10.2), all in float32.
    """
    if mesh.shape["data"] == 1:
        return gradient_sum
    dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else matrix_dtype

    def psum_grads(*inputs: Any) -> tuple:
        local_grads, sums = gradient_sum(*inputs)
        cast = jax.tree.map(lambda g: g.astype(dtype) if g.ndim > 1 else g, local_grads)
        cast, sums = jax.lax.psum((cast, sums), "data")
        return jax.tree.map(lambda g, like: g.astype(like.dtype), cast, local_grads), sums

    # An axis left to the compiler, even one of size 1, costs fusions on a TPU: each norm is written to memory.
    manual_axes = {axis for axis, size in mesh.shape.items() if axis == "data" or size == 1}
    specs = (P(), P("data"), P("data"), P())
    return jax.shard_map(
        psum_grads,
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
        axis_names=manual_axes,
        check_vma=False,
    )


def make_train_step(task: Task) -> TrainStep:
    """Returns the jitted step `(state, batch, length=None) -> (state, metrics)`; the state is donated.

    With a `length`, each row of the batch is read as several rows of so many tokens.

    A step whose loss or gradient is not finite updates nothing and is counted. After GUARD_LIMIT of them in a row
    no step updates anything; the loop stops when it next reads the metrics (log.every). A step without predictions
    updates nothing, either: momentum and weight decay would move the parameters all the same.
    """
    config = task.config
    mean_gradient = make_gradient(task)
    optimizer = optax.with_extra_args_support(task.optimizer)

    @in_32_bits
    def step(state: TrainState, batch: Batch, length: int | None = None) -> tuple:
        grads, sums = mean_gradient(state.params, split_rows(batch, length), state.step)

        predictions = sums["loss"].weight
        loss = sums["loss"].sum / jnp.where(predictions > 0, predictions, 1)
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, step=state.step, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            decay = config.optimizer.ema_decay
            ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, params)

        squared_norms = [jnp.sum(jnp.square(grad)) for grad in jax.tree.leaves(grads)]
        grad_norm = jnp.sqrt(sum(squared_norms))
        is_finite = jnp.isfinite(sums["loss"].sum) & jnp.isfinite(grad_norm)
        is_taken = is_finite & (state.consecutive_nonfinite < GUARD_LIMIT)
        keep = is_taken & (predictions > 0)
        new = (params, opt_state, ema)
        old = (state.params, state.opt_state, state.ema)
        params, opt_state, ema = jax.tree.map(lambda new, old: jnp.where(keep, new, old), new, old)
        nonfinite = jnp.where(is_taken, 0, state.consecutive_nonfinite + 1)
        skipped = state.skipped + ~is_taken

        # The window adds up what is logged as a mean, and starts again after a logged step.
        totals = jax.tree.map(
            lambda old, new: old + jnp.where(is_taken, new, 0), state.window, sums
        )
        is_logged = (state.step + 1) % config.log.every == 0
        window = jax.tree.map(lambda total: jnp.where(is_logged, 0, total), totals)
        metrics = {name: mean.sum / mean.weight for name, mean in totals.items()}
        metrics["grad_norm"] = grad_norm
        metrics["learning_rate"] = jnp.asarray(task.schedule(state.step), jnp.float32)
        metrics["skipped"] = skipped
        metrics["consecutive_nonfinite"] = nonfinite
        metrics["gradient_norms"] = jnp.sqrt(jnp.stack(squared_norms))
        return TrainState(
            state.step + 1, params, opt_state, ema, nonfinite, skipped, window
        ), metrics

    shardings = sharding.shardings_of(task.abstract_state)
    return jax.jit(
        step,
        static_argnums=2,
        in_shardings=(shardings, NamedSharding(task.mesh, sharding.BATCH)),
        out_shardings=(shardings, NamedSharding(task.mesh, P())),
        donate_argnums=0,
    )


def split_rows(batch: Batch, length: int | None) -> Batch:
    """Returns a batch in which each row is split into consecutive rows of `length` tokens; the same batch for None.

    Rows that are not longer stay as they are. Part p of record r is record r * parts + p, modulo 2^32: distinct as long
    as there are fewer.
    """
    if length is None or length >= batch["input_ids"].shape[1]:
        return batch
    parts = batch["input_ids"].shape[1] // length
    rows = {name: batch[name].reshape(-1, length) for name in ("input_ids", "attention_mask")}
    for name in {"record_id", "row"} & batch.keys():
        numbers_BxP = batch[name][:, None] * jnp.uint32(parts) + jnp.arange(parts, dtype=jnp.uint32)
        rows[name] = numbers_BxP.reshape(-1)
    return rows | {"epoch": jnp.repeat(batch["epoch"], parts)}


def train(
    config: ConfigDict, workdir: Workdir, task: Task, on_complete: OnComplete | None = None
) -> None:
    """Trains from the newest checkpoint, or that of train.branch_from, to the last step, if there are steps left."""
    start = resume.find_start(config, workdir, task)
    if cluster.is_primary():
        write_text(workdir.config, config.to_json(indent=1) + "\n")
        if start.step < task.stages.steps:
            say(describe(task, start.step))
    with (
        xla_metrics.Compilations() as compilations,
        Checkpoints(
            workdir.checkpoints,
            keep=config.checkpoint.keep,
            milestones=start.milestones,
            on_complete=on_complete,
        ) as checkpoints,
    ):
        state = start.restore(task)
        with (
            Log(workdir.root, task, compilations, start=start.step) as log,
            distributed.StopSignal() as stop,
            contextlib.ExitStack() as trace,
        ):
            Loop(task, start, checkpoints, log, workdir.root / "profile").run(state, stop, trace)


def describe(task: Task, start: int) -> str:
    """Returns what will be trained, on what and how long, as some lines."""
    config = task.config
    rows = config.data.global_batch
    steps = task.stages.steps
    parameters = sum(leaf.size for leaf in jax.tree.leaves(task.abstract_state.params))
    device = task.mesh.devices.flat[0]
    axes = " x ".join(f"{axis} {size}" for axis, size in task.mesh.shape.items())
    lines = {
        "parameters": f"{parameters:,}, computed in {config.model.dtype}",
        **task.describe(),
        "batch": f"{rows:,} rows, {rows // config.train.accumulate:,} at once",
        "devices": f"{task.mesh.size} of {device.device_kind}, {axes}",
        "steps": f"{steps:,}, from step {start + 1:,} on",
    }
    epochs = task.epoch(steps)
    if epochs is not None:
        lines["epochs"] = f"{epochs:.4g}"
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


@dataclasses.dataclass
class Loop:
    """What the loop writes to; `run` is the loop."""

    task: Task
    start: resume.Start
    checkpoints: Checkpoints
    log: Log
    profile: UPath
    # step, metrics and norms, which are read when the next step is dispatched
    pending: tuple[int, dict | None, dict | None] | None = None

    def run(
        self, state: TrainState, stop: distributed.StopSignal, trace: contextlib.ExitStack
    ) -> None:
        """Runs the steps after the start, if there are any."""
        task = self.task
        config = task.config
        log = self.log
        last = task.stages.steps
        if self.start.step >= last:
            return
        if self.start.saves_initial_state:
            self.save(0, state, self.evaluate(0, state))
        batches = task.batches(self.start.step)
        measure = jax.jit(param_norms, out_shardings=NamedSharding(task.mesh, P()))
        compiled: set[tuple[int, int]] = set()
        for step in range(self.start.step + 1, last + 1):
            if step == config.log.profile_start:
                trace.enter_context(xla_metrics.tracing(self.profile))
            elif 0 < config.log.profile_start == step - xla_metrics.TRACED_STEPS:
                jax.block_until_ready(state.step)
                trace.close()
            stage = task.stages.stage_at(step)
            # the first call opens the data, or compiles
            is_new = (stage.rows, stage.length) not in compiled
            if is_new:  # before it compiles, which is no time of steps
                self.read_pending()
            cluster.progress("start" if is_new else "input", step)
            log.waits.add("host_wait")
            columns = next(batches)
            log.waits.add("input_wait")
            batch = sharding.put_batch(columns, task.mesh, stage.rows)
            cluster.progress("compile" if is_new else "step", step)
            if is_new:
                log.notify(
                    f"step {step}: compiling, for {stage.rows:,} rows of {stage.length:,} tokens"
                )
            distributed.compile_together(task.train_step, state, batch, stage.length)
            norms_due = is_due(step, config.log.norms_every)
            # also at a first step, which the clock leaves out: the programs of the norms compile there
            measures = norms_due or (is_new and config.log.norms_every > 0)
            # a copy, since the step overwrites its state
            before = jax.tree.map(jnp.copy, state.params) if measures else None
            log.waits.add("host_wait")
            with (
                jax.profiler.StepTraceAnnotation("train", step_num=step),
                jax.transfer_guard("disallow"),
            ):
                state, metrics = task.train_step(state, batch, stage.length)
            log.waits.running.put(metrics["grad_norm"])
            gradient_norms_P = metrics.pop("gradient_norms")
            norms = measure(before, state.params, gradient_norms_P) if measures else None
            if is_new:
                compiled.add((stage.rows, stage.length))
                with log.paused("first_step", step):
                    jax.block_until_ready(metrics)
                log.restart_clock(step)
            self.read_pending()
            logs_step = step == last or is_due(step, config.log.every)
            self.pending = (step, metrics if logs_step else None, norms if norms_due else None)
            stopped = stop.requested(step)
            ends = step == last or task.is_epoch_end(step) or step in self.start.milestones
            evaluates = ends or is_due(step, config.evaluate.every)
            pushes = evaluates and config.hub.name != ""
            saves = ends or stopped or is_due(step, config.checkpoint.every) or pushes
            if evaluates or saves:
                self.read_pending()
            if saves and int(metrics["consecutive_nonfinite"]) >= GUARD_LIMIT:
                self.read(step, metrics, None)  # raises
            scores = self.evaluate(step, state) if evaluates else None
            if saves:
                self.save(step, state, scores)
            self.checkpoints.poll()
            if stopped and step < last:
                self.checkpoints.finish()
                raise PreemptedError(
                    f"stopped after step {step} of {last}, and saved; run the same command to continue."
                )

    def read_pending(self) -> None:
        """Reads the step before, unless it was read already."""
        if self.pending:
            self.read(*self.pending)
            self.pending = None

    def read(
        self, step: int, metrics: dict[str, jax.Array] | None, norms: dict[str, jax.Array] | None
    ) -> None:
        """Logs metrics and norms of a step, if given; raises NumericsError if the nonfinite guard stops the run."""
        if norms:
            names = [name for name, _ in sharding.named_leaves(self.task.abstract_state.params)]
            self.log.norms(step, names, norms)
        if metrics is None:
            return
        self.log.train(step, metrics)
        nonfinite = int(metrics["consecutive_nonfinite"])
        if nonfinite >= GUARD_LIMIT:
            raise NumericsError(
                f"step {step}: {nonfinite} steps in a row were not finite, the last good one was "
                f"{step - nonfinite}; start a new --workdir or a branch (train.branch_from) with a lower "
                "learning rate or a longer warmup."
            )

    def evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """Scores the validation split, and logs the scores."""
        cluster.progress("evaluate", step)
        jax.block_until_ready(state.step)  # training, so not part of the pause
        with self.log.paused("eval", step):
            scores = self.task.evaluate(state.best_params)
        self.log.evaluation(step, scores)
        return scores

    def save(self, step: int, state: TrainState, scores: dict[str, float] | None) -> None:
        """Saves a checkpoint."""
        cluster.progress("save", step)
        self.log.flush()
        jax.block_until_ready(state.step)  # training, so not part of the pause
        with self.log.paused("checkpoint", step):
            score = None if scores is None else self.task.minimized_metric(scores)
            self.checkpoints.save(step, state, self.start.metadata(self.task, step), score)


def is_due(step: int, every: int) -> bool:
    """Returns whether something is to be done after a step, every so many steps; never if that is 0."""
    return every > 0 and step % every == 0
