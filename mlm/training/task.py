"""A task, which is what the loop trains, and its state.

Dimensions: B rows.
"""

import abc
from collections.abc import Callable, Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import logs
from mlm.data.stages import Stages
from mlm.errors import InputError
from mlm.model.keys import make_key
from mlm.model.loss import Mean, RowSums
from mlm.model.module import Model, Params
from mlm.monitor.loss_spikes import MetricsHook

# Columns of a global batch, [B, ...]: "row" [B] uint32 is each row's number in it.
Batch = dict[str, jax.Array]
Inputs = Any  # what a model and a loss read: a tree of arrays, [B, ...]

# (state, batch, length=None) -> (state, metrics): scalars, and "gradient_norms", one for each parameter, which the loop
# takes out of them
TrainStep = Callable[..., tuple["TrainState", dict[str, jax.Array]]]
# Names beside those of metrics: in logs, in what a step or an evaluation returns, and in what `evaluate` prints.
RESERVED = (*logs.STANDARD, *logs.NORMS, "kind", "consecutive_nonfinite", "breakdown")
RESERVED += ("split", "model", "class", "masks", "dtypes")


class TrainState(flax.struct.PyTreeNode):
    """All that the next step depends on besides its batch; a checkpoint holds exactly this. Parameters are float32."""

    step: jax.Array  # int32: batches consumed
    params: Params
    opt_state: optax.OptState
    ema: Params | None  # averaged parameters; None if off
    consecutive_nonfinite: jax.Array  # int32: non-finite steps since the last finite one
    skipped: jax.Array  # int32: non-finite steps in total
    # of each metric, since the last logged step: a restart does not change a logged mean
    window: dict[str, Mean]

    @property
    def best_params(self) -> Params:
        """The parameters to evaluate and to export: the averaged ones if there are any."""
        return self.params if self.ema is None else self.ema


class Task(abc.ABC):
    """What a run trains: model, batches, loss and evaluation. Its subclasses stand in mlm/tasks/."""

    config: ConfigDict
    mesh: Mesh
    stages: Stages  # what each step reads
    module: Model  # whose partition_rules() split the parameters over the mesh
    schedule: optax.Schedule  # of the learning rate
    optimizer: optax.GradientTransformation
    # of data and model, as JSON: saved with a checkpoint, for those who load it
    metadata: dict[str, Any]
    data_fingerprint: str  # a run can't resume on other data
    # jitted; its arguments are those of `init_params` after the key
    init: Callable[..., TrainState]
    abstract_state: TrainState  # of abstract arrays with shardings; both from `train.make_init`
    train_step: TrainStep  # from `train.make_train_step`

    @abc.abstractmethod
    def init_params(self, key: jax.Array) -> Params:
        """Returns random parameters."""

    @abc.abstractmethod
    def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of a global batch of `rows` rows."""

    @abc.abstractmethod
    def inputs(self, batch: Batch, step: jax.Array) -> Inputs:
        """Returns what the model and the loss read after `step` steps: for a language model, masked tokens."""

    @abc.abstractmethod
    def forward(
        self, params: Params, inputs: Inputs, rows_B: jax.Array, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the logits, and what modules `sow`; dropout depends on the key and on each row's number, `rows_B`."""

    @abc.abstractmethod
    def loss(self, logits: jax.Array, inputs: Inputs) -> RowSums:
        """Returns the loss, summed over each row, and its weight; divided once, later."""

    def metrics(
        self, logits: jax.Array, inputs: Inputs, intermediates: dict[str, Any]
    ) -> dict[str, Mean]:
        """Returns further metrics to log, each a sum and a weight of every row, float32 [B]."""
        return {}

    @abc.abstractmethod
    def initial_state(self) -> TrainState:
        """Returns the state before the first step."""

    @abc.abstractmethod
    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        """Returns this host's rows of the batches after step `start`."""

    @abc.abstractmethod
    def evaluate(self, params: Params) -> dict[str, Any]:
        """Returns the scores of the validation split, "loss" among them; the same on every host."""

    def minimized_metric(self, scores: dict[str, Any]) -> float:
        """Returns the score that the best checkpoint minimizes."""
        return scores["loss"]

    def is_epoch_end(self, step: int) -> bool:
        """Returns whether to evaluate and save after this step, whatever the config's intervals are."""
        return False

    def describe(self) -> dict[str, str]:
        """Returns what is read, for the lines before the first step: {what: counts}."""
        return {}

    def epoch(self, step: int) -> float | None:
        """Returns how often the data has been read after `step` steps, None where the run doesn't count that."""
        return None

    @abc.abstractmethod
    def tokens_read(self, step: int) -> float:
        """Returns the tokens that the steps up to `step` read, for the throughput."""

    @abc.abstractmethod
    def flops_per_token(self, length: int) -> float:
        """Returns the useful FLOPs of a step per token, for MFU, on rows of `length` tokens."""

    @abc.abstractmethod
    def useful_flops(self, step: int) -> float:
        """Returns the useful FLOPs of the run's own steps up to `step`."""

    def words_per_row(self) -> float:
        """Returns the words of training text in a row, for milestones."""
        raise InputError(
            "config.checkpoint.milestones: only pretraining can count words; give them in steps."
        )

    def make_hooks(self, notify: Callable[[str], None]) -> list[MetricsHook]:
        """Returns the metrics hooks of the run, on the first host; `notify` prints a message."""
        return []


def metric_names(task: Task, params: Params) -> list[str]:
    """Returns the names of the loss and the metrics of a task.

    Raises InputError for a name of mlm's own, and for a loss or metric that is not a sum and a weight of each row.
    """
    # never one, of which a sum over all is one of each
    rows = 2 * task.mesh.shape["data"] * task.mesh.shape["fsdp"]
    name_of_class = type(task).__qualname__

    def means(params: Params, batch: Batch) -> tuple[dict[str, Mean], dict[str, Mean]]:
        inputs = task.inputs(batch, jnp.zeros((), jnp.int32))
        logits, intermediates = task.forward(params, inputs, batch["row"], make_key(0))
        sums = task.loss(logits, inputs)
        if not isinstance(sums, RowSums):
            raise InputError(f"{name_of_class}.loss: must return a RowSums, not {sums!r:.200}.")
        return sums.metrics(), task.metrics(logits, inputs, intermediates)

    losses, metrics = jax.eval_shape(means, params, task.batch_shapes(rows))
    for name, mean in (losses | metrics).items():
        where = f"{name_of_class}.{'metrics' if name in metrics else 'loss'}"
        if name in metrics and (name in RESERVED or "/" in name):
            raise InputError(f"{where}: {name} is a name of mlm's own; choose another.")
        if not (
            isinstance(mean, Mean)
            and all(part.shape == (rows,) and part.dtype == jnp.float32 for part in mean)
        ):
            raise InputError(
                f"{where}: {name} must be a Mean(sum, weight) of two float32 arrays [B], one entry for each of {rows} "
                f"rows, not {mean!r:.200}."
            )
    return [*losses, *metrics]
