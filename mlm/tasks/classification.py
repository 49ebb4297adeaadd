"""Classification as a task of the loop: the model under its head, the step, the batches and the evaluation.

Dimensions: B rows of a batch, L tokens in a row, N rows of a split.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict
from transformers import PretrainedConfig

from mlm.data import examples as data
from mlm.data.examples import Examples
from mlm.data.stages import Stage, Stages, rows_of_epochs
from mlm.errors import InputError
from mlm.model import classifier, families, flops
from mlm.model.attention import make_attention
from mlm.model.loss import RowSums
from mlm.model.module import Model, Params
from mlm.pretrained import warm_start
from mlm.tasks import scores
from mlm.training import evaluation, optimizer, sharding, train
from mlm.training.task import Batch, Task, TrainState


class Classification(Task):
    """The task of a config on labelled rows, for `train.train`."""

    def __init__(
        self,
        config: ConfigDict,
        examples: Examples,
        body: PretrainedConfig,
        read_params: Callable[[], Params] | None,
    ):
        """Builds everything; `read_params` returns parameters to start from, those of the padded `body` among them."""
        self.config = config
        self.examples = examples
        self._read_params = read_params
        self.mesh = sharding.mesh_of(config.mesh)
        sharding.check_batches(self.mesh, config)
        sharding.check_batch(self.mesh, rows=config.evaluate.batch, key="evaluate.batch")
        _check_data(config, examples, body)
        self._of_tokens = config.classify.kind == "tokens"
        self.model_config = classifier.make_config(body, examples.labels, of_tokens=self._of_tokens)
        self.module = make_module(config, self.model_config, examples, self.mesh)

        self._count = len(examples.splits["train"])
        rows = config.data.global_batch
        steps = config.train.steps or math.ceil(rows_of_epochs(config, self._count) / rows)
        self.stages = Stages([Stage(1, math.inf, rows, examples.length, 1, 0)], steps)
        optimizer.check_schedule(config, steps)
        self.schedule = optimizer.make_schedule(config, steps)
        self.optimizer = optimizer.make_optimizer(config.optimizer, self.schedule)
        self.init, self.abstract_state = train.make_init(self)
        self.train_step = train.make_train_step(self)
        shardings = sharding.shardings_of(self.abstract_state).params
        self.eval_step = make_eval_step(self.module, self.mesh, shardings, longest=examples.length)
        self._mean_length = float(np.mean(examples.splits["train"].lengths))
        # what else there is chooses nothing
        self.data_fingerprint = examples.fingerprint("train", "validation")
        self.metadata = {
            "model": self.model_config.to_dict(),
            "labels": examples.labels,
            "vocab_size": examples.vocab_size,
        }

    def init_params(self, key: Array, start: Params | None = None) -> Params:
        """Returns random parameters, with those of `start` in their place."""
        params = self.module.init_params(key)
        return unflatten_dict(flatten_dict(params) | flatten_dict(start or {}))

    def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        ids = jax.ShapeDtypeStruct((rows, max(self.examples.lengths("train"))), jnp.int32)
        label = jax.ShapeDtypeStruct(
            ids.shape if self._of_tokens else (rows,),
            jnp.int32 if self.examples.labels else jnp.float32,
        )
        row = jax.ShapeDtypeStruct((rows,), jnp.uint32)
        return {"input_ids": ids, "attention_mask": ids, "label": label, "row": row}

    def inputs(self, batch: Batch, step: Array) -> dict[str, Array]:
        return {name: batch[name] for name in ("input_ids", "attention_mask", "label")}

    def forward(
        self, params: Params, inputs: dict[str, Array], rows_B: Array, dropout_key: Array
    ) -> tuple[Array, dict[str, Any]]:
        """Returns logits_BxC, of tokens logits_BxLxC, and what modules have sown."""
        columns = (inputs["input_ids"], inputs["attention_mask"])
        return self.module.forward(params, *columns, None, dropout_key, rows_B)

    def loss(self, logits: Array, inputs: dict[str, Array]) -> RowSums:
        return classifier.row_sums(logits, inputs["label"])

    def initial_state(self) -> TrainState:
        if self._read_params is None:
            return self.init()
        shardings = flatten_dict(sharding.shardings_of(self.abstract_state).params)
        read = flatten_dict(self._read_params())
        start = {path: read[path] for path in read.keys() & shardings.keys()}
        on_devices = sharding.put_tree(start, {path: shardings[path] for path in start})
        return self.init(unflatten_dict(on_devices))

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        return data.train_batches(
            self.examples,
            start_step=start,
            rows=sharding.local_rows(self.mesh, self.config.data.global_batch),
            seed=self.config.data.seed,
            global_batch=self.config.data.global_batch,
            lanes=self.config.data.lanes,
        )

    def evaluate(self, params: Params) -> dict[str, Any]:
        return evaluate(
            self.config, self.examples, self.mesh, self.eval_step, params, "validation"
        )[0]

    def is_epoch_end(self, step: int) -> bool:
        rows = self.config.data.global_batch
        return step * rows // self._count > (step - 1) * rows // self._count

    def minimized_metric(self, values: dict[str, Any]) -> float:
        """Returns one less the mean of config.classify.metric; the loss if there is none."""
        metrics = self.config.classify.metric
        return 1 - scores.selected(values, metrics) if metrics else values["loss"]

    def tokens_read(self, step: int) -> float:
        """Returns the tokens that the steps up to `step` read, by the mean length of a row."""
        return self.stages.rows_read(step) * self._mean_length

    def flops_per_token(self, length: int) -> float:
        """Returns the useful FLOPs of a step per token, on rows of the mean length; a head reads one token, or all."""
        return flops.per_token(
            self.module,
            self.abstract_state.params,
            length=self._mean_length,
            predicted_share=1.0 if self._of_tokens else 1 / self._mean_length,
            vocab_size=0,
        )

    def describe(self) -> dict[str, str]:
        """Returns what is read: rows of each split, what was cut off, and what is predicted."""
        sources = {**self.config.classify, **dict(self.config.classify.predict)}
        lines = {}
        for name, split in self.examples.splits.items():
            lines[name] = f"{len(split):,} rows of {sources[name]}"
            if split.truncated:
                lines[name] += (
                    f", {split.truncated:,} of them truncated to {self.examples.length} tokens"
                )
            if split.words:
                words_cut = np.sum(split.words.token_W < 0)
                lines[name] += f", {len(split.labels_N):,} words, {words_cut:,} of them cut off"
        classes = len(self.examples.labels)
        lines["predicts"] = f"{classes} classes" if classes else "a number"
        lines["starts from"] = self.config.train.init_from or "random values"
        return lines

    def epoch(self, step: int) -> float:
        return self.stages.rows_read(step) / self._count

    def useful_flops(self, step: int) -> float:
        return self.tokens_read(step) * self.flops_per_token(self.examples.length)


def _check_data(config: ConfigDict, examples: Examples, body: PretrainedConfig) -> None:
    warm_start.refuse_unfit_rows(
        body, length=examples.length, vocab_size=examples.vocab_size, pad_id=examples.pad_id
    )
    if "f1_positive" in config.classify.metric and len(examples.labels) != 2:
        raise InputError(
            f"config.classify.metric: f1_positive is of two classes, the rows have {len(examples.labels)}."
        )
    count = len(examples.splits["train"])
    if count < config.data.lanes:
        raise InputError(
            f"config.data.lanes = {config.data.lanes}: there are only {count} training rows; lower it."
        )


def make_module(
    config: ConfigDict, model_config: PretrainedConfig, examples: Examples, mesh: Mesh
) -> Model:
    """Returns the linen module, with the kernel of config.model.attention for each row length."""
    model = config.model
    module = families.recomputed(classifier.make_module(model_config, model.dtype), model)
    attend = make_attention(
        model.attention,
        model_config,
        lengths={length for split in examples.splits for length in examples.lengths(split)},
        windows=set(module.windows()),
        mesh=mesh,
        dtype=model.dtype,
        padding="end",
    )
    return module.clone(compute=dataclasses.replace(module.compute, attend=attend))


def make_eval_step(module: Model, mesh: Mesh, param_shardings: Params, *, longest: int) -> Callable:
    """Returns the jitted `(params, batch) -> (loss_B, prediction_B)`, without dropout.

    Of tokens, the predictions are padded to the `longest` row, so that those of all batches fit together.
    """

    def eval_step(params: Params, batch: Batch) -> tuple[Array, Array]:
        logits_BxC = module.logits(params, batch["input_ids"], batch["attention_mask"])
        loss_B, predicted = classifier.row_scores(logits_BxC, batch["label"])
        if predicted.ndim > 1:
            predicted = jnp.pad(predicted, [(0, 0), (0, longest - predicted.shape[1])])
        return loss_B, predicted

    return evaluation.jit_eval_step(eval_step, mesh, param_shardings)


def evaluate(
    config: ConfigDict,
    examples: Examples,
    mesh: Mesh,
    eval_step: Callable,
    params: Params,
    split: str,
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the scores of a split (loss, those of mlm/tasks/scores.py, rows) and the predictions, float32 [N].

    The loss is the cross entropy in nats, or the mean squared error. Rows without a label are predicted alone. With
    labels of words, the predictions are [W], and -1 where a word was cut off.
    """
    rows = config.evaluate.batch
    batches = data.eval_batches(
        examples, split=split, batch=rows, rows=sharding.local_rows(mesh, rows)
    )
    order = data.eval_order(examples, split)
    total = math.ceil(len(order) / rows)
    columns = evaluation.per_row(eval_step, params, batches, mesh=mesh, rows=rows, total=total)
    rows_of_split = examples.splits[split]
    labels_N = rows_of_split.labels_N
    words = rows_of_split.words
    loss_N, predicted_N = (values[np.argsort(order)] for values in columns)
    if words:
        predicted_N = np.where(words.token_W < 0, -1, predicted_N[words.row_W, words.token_W])
    known_N = labels_N >= 0 if examples.labels else ~np.isnan(labels_N)
    if not known_N.any():
        return {}, predicted_N
    pair = (labels_N[known_N], predicted_N[known_N])
    count = len(examples.labels)
    if words:
        row_W = words.row_W[known_N]
        read = int(np.count_nonzero(words.token_W[known_N] >= 0))  # a number that JSON takes
        return {
            "loss": float(np.sum(loss_N, dtype=np.float64)) / max(read, 1),
            **scores.score_words(*pair, row_W, examples.labels),
            "words": len(row_W),
            "words_cut": len(row_W) - read,
            "rows": len(np.unique(row_W)),
        }, predicted_N
    by_kind = scores.score_classes(*pair, count) if count else scores.score_numbers(*pair)
    loss = float(np.mean(loss_N[known_N], dtype=np.float64))
    return {"loss": loss} | by_kind | {"rows": len(pair[0])}, predicted_N
