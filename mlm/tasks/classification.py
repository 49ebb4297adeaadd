"""Classification as a task of the loop: the model under its head, the step, the batches and the evaluation.

Dimensions: B rows of a batch, L tokens in a row, N rows of a split.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from ml_collections import ConfigDict
from transformers import PretrainedConfig

from mlm import config as configs
from mlm.data import examples as data
from mlm.data.examples import Examples
from mlm.errors import InputError
from mlm.model import classifier
from mlm.model.attention import Attention, make_attention
from mlm.model.families import with_attention
from mlm.model.loss import RowSums
from mlm.model.module import Compute, Model, Params
from mlm.pretrained import warm_start
from mlm.tasks import scores
from mlm.training import evaluation, optimizer, recipe, sharding, state, step
from mlm.training.loop import Task


class Classification(Task):
    """The task of a config on labelled rows, for `loop.run_task`."""

    def __init__(
        self, config: ConfigDict, examples: Examples, body: PretrainedConfig, start: Callable[[], Params] | None
    ):
        """Builds everything; `start` returns parameters to start from, those of the padded `body` among them."""
        self.config, self.examples, self._start = config, examples, start
        self.mesh = sharding.make_mesh(**config.mesh.to_dict())
        self._run = run = configs.flatten(config) | {"data.batch_stages": ()}  # of pretraining
        sharding.check_batches(self.mesh, run)
        sharding.check_batch(self.mesh, rows=config.evaluate.batch, key="evaluate.batch")
        _check_data(config, examples, body)
        of_tokens = config.classify.kind == "tokens"
        self.model_config = classifier.make_config(body, examples.labels, of_tokens=of_tokens)
        self.module = make_module(config, self.model_config, examples, self.mesh)

        self._count = len(examples.splits["train"])
        self.steps = recipe.total_steps(run, self._count)
        recipe.check_schedule(run, self.steps)
        schedule = optimizer.make_schedule(run, self.steps)
        tx = optimizer.make_optimizer(run, schedule)

        def init(start: Params | None = None) -> state.TrainState:
            params = self.module.init_params(jax.random.key(config.train.seed))
            params = unflatten_dict(flatten_dict(params) | flatten_dict(start or {}))
            return state.TrainState.create(params, tx, ema=config.optimizer.ema_decay > 0)

        self._init, self.shapes = state.jit_init(init, self.mesh)

        def row_sums(params: Params, inputs: step.Inputs, rows_B: jax.Array, key: jax.Array) -> RowSums:
            logits = self.module.logits(params, inputs["input_ids"], inputs["attention_mask"], None, key, rows_B)
            return classifier.row_sums(logits, inputs["label"])

        names = ("input_ids", "attention_mask", "label")
        gradient = step.mean_gradient(run, lambda batch, _: {name: batch[name] for name in names}, row_sums, self.mesh)
        has_accuracy = bool(examples.labels)
        self.train_step = step.make_train_step(run, gradient, tx, schedule, self.shapes, has_accuracy=has_accuracy)
        shardings = state.shardings_of(self.shapes).params
        self.eval_step = make_eval_step(self.module, self.mesh, shardings, longest=examples.length)
        self._mean_length = float(np.mean(examples.splits["train"].lengths))
        self.expected_compiles = len(examples.lengths("train"))
        self.data_fingerprint = examples.fingerprint
        sizes = {"labels": examples.labels, "vocab_size": examples.vocab_size}
        self.metadata = {"model": self.model_config.to_dict()} | sizes

    def rows_at(self, step: int) -> int:
        """Returns the rows of the global batch of a step."""
        return self.config.data.global_batch

    def tokens_read(self, step: int) -> float:
        """Returns the tokens that the steps up to `step` read, by the mean length of a row."""
        return step * self.config.data.global_batch * self._mean_length

    def initial_state(self) -> state.TrainState:
        """Returns the state before the first step."""
        if self._start is None:
            return self._init()
        start, shardings = flatten_dict(self._start()), flatten_dict(state.shardings_of(self.shapes).params)
        start = {path: value for path, value in start.items() if path in shardings}  # without a pooler that none reads
        placed = sharding.put_tree(start, {path: shardings[path] for path in start})
        return self._init(unflatten_dict(placed))

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        """Returns this host's rows of the batches after step `start`."""
        order = {key: self.config.data[key] for key in ("seed", "global_batch", "lanes")}
        rows = sharding.local_rows(self.mesh, self.config.data.global_batch)
        return data.train_batches(self.examples, start_step=start, rows=rows, **order)

    def evaluate(self, params: Params) -> dict[str, Any]:
        """Returns the scores of the validation split."""
        return evaluate(self.config, self.examples, self.mesh, self.eval_step, params, "validation")[0]

    def is_epoch_end(self, step: int) -> bool:
        """Returns whether an epoch ends within this step."""
        rows = self.config.data.global_batch
        return step * rows // self._count > (step - 1) * rows // self._count

    def minimized_metric(self, found: dict[str, Any]) -> float:
        """Returns one less the mean of config.classify.metric; the loss if there is none."""
        metrics = self.config.classify.metric
        return 1 - scores.selected(found, metrics) if metrics else found["loss"]

    def flops_per_token(self, step: int) -> float:
        """Returns the useful FLOPs of a step per token; the head reads one token of a row, or all."""
        length = self._mean_length
        of_tokens = classifier.kind(self.model_config) == "tokens"
        rate, no_dense = 1.0 if of_tokens else 1 / length, of_tokens and self.config.model.family != "modernbert"
        found = recipe.flops_per_token(self._run, self.model_config.num_labels, length=length, rate=rate)
        return found - 6 * self.config.model.hidden_size**2 * no_dense  # which the language model's head has


def _check_data(config: ConfigDict, examples: Examples, body: PretrainedConfig) -> None:
    warm_start.refuse_unfit_rows(body, length=examples.length, vocab_size=examples.vocab_size, pad_id=examples.pad_id)
    if "f1_positive" in config.classify.metric and (classes := len(examples.labels)) != 2:
        raise InputError(f"config.classify.metric: f1_positive is of two classes, the rows have {classes}.")
    count = len(examples.splits["train"])
    if count < config.data.lanes:
        raise InputError(f"config.data.lanes = {config.data.lanes}: there are only {count} training rows; lower it.")


def make_module(config: ConfigDict, model_config: PretrainedConfig, examples: Examples, mesh: Mesh) -> Model:
    """Returns the linen module, with the kernel of config.model.attention for each row length."""
    model = config.model
    lengths = sorted({length for split in examples.splits for length in examples.lengths(split)})

    def make(window: int) -> Attention:
        shared = {"mesh": mesh, "dtype": model.dtype, "window": window}
        kernels = {length: make_attention(model.attention, model_config, length=length, **shared) for length in lengths}
        return lambda q_BxLxH, *rest: kernels[q_BxLxH.shape[1]](q_BxLxH, *rest)

    compute = Compute(recompute_layers=model.remat, recomputed_feed_forwards=model.remat_feed_forward)
    return with_attention(classifier.make_module(model_config, model.dtype, compute=compute), make)


def make_eval_step(module: Model, mesh: Mesh, param_shardings: Params, *, longest: int) -> Callable:
    """Returns the jitted `(params, batch) -> (loss_B, prediction_B)`, without dropout.

    Of tokens, the predictions are padded to the `longest` row, so that those of all batches fit together.
    """

    def eval_step(params: Params, batch: step.Batch) -> tuple[jax.Array, jax.Array]:
        logits_BxC = module.logits(params, batch["input_ids"], batch["attention_mask"])
        loss_B, predicted = classifier.row_scores(logits_BxC, batch["label"])
        if predicted.ndim > 1:
            predicted = jnp.pad(predicted, [(0, 0), (0, longest - predicted.shape[1])])
        return loss_B, predicted

    return step.jit_eval_step(eval_step, mesh, param_shardings)


def evaluate(
    config: ConfigDict, examples: Examples, mesh: Mesh, eval_step: Callable, params: Params, split: str
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the scores of a split (loss, those of mlm/tasks/scores.py, rows) and the predictions, float32 [N].

    The loss is the cross entropy in nats, or the mean squared error. Rows without a label are predicted alone. With
    labels of words, the predictions are [W], and -1 where a word was cut off.
    """
    rows = config.evaluate.batch
    batches = data.eval_batches(examples, split=split, batch=rows, rows=sharding.local_rows(mesh, rows))
    columns = evaluation.per_row(eval_step, params, batches, mesh=mesh, rows=rows)
    order, own = data.eval_order(examples, split), examples.splits[split]
    loss_N, predicted_N = (values[np.argsort(order)] for values in columns)
    if own.words:
        predicted_N = np.where(own.words.token_W < 0, -1, predicted_N[own.words.row_W, own.words.token_W])
    known_N = own.labels_N >= 0 if examples.labels else ~np.isnan(own.labels_N)
    if not known_N.any():
        return {}, predicted_N
    pair, count = (own.labels_N[known_N], predicted_N[known_N]), len(examples.labels)
    if own.words:
        row_W, read_W = own.words.row_W[known_N], own.words.token_W[known_N] >= 0
        found = scores.score_words(*pair, row_W, examples.labels)
        found |= {"words": len(row_W), "words_cut": int(np.sum(~read_W)), "rows": len(np.unique(row_W))}
        return {"loss": float(np.sum(loss_N, dtype=np.float64)) / max(int(read_W.sum()), 1), **found}, predicted_N
    found = scores.score_classes(*pair, count) if count else scores.score_numbers(*pair)
    return {"loss": float(np.mean(loss_N[known_N], dtype=np.float64)), **found, "rows": len(pair[0])}, predicted_N
