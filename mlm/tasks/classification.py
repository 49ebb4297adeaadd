"""Classification as a task of the loop: the model under its head, the step, the batches and the evaluation.

Dimensions: B rows of a batch, L tokens in a row, N rows of a split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict
from transformers import RobertaConfig

from mlm.cluster import watch
from mlm.data import examples as data
from mlm.data.examples import Examples
from mlm.errors import InputError
from mlm.model import classifier, flops
from mlm.model.loss import RowSums
from mlm.model.roberta import Network, Params
from mlm.tasks import class_scores
from mlm.training import build, evaluation, sharding, state, step
from mlm.training.sharding import BATCH
from mlm.training.task import Task


def build_task(config: ConfigDict, examples: Examples, body: RobertaConfig, start: Callable[[], Params] | None) -> Task:
    """Returns the task of a config.

    Args:
      config: of the run.
      examples: the data.
      body: config of the model under the head, its vocabulary padded.
      start: gives parameters of the body, on the host; None for random values. The head starts from random ones.

    Raises:
      InputError: rows that the model can't read, or a batch or a parameter that the mesh can't split.
    """
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    rows, count = config.data.global_batch, len(examples.splits["train"].labels_N)
    accumulate = config.train.accumulate
    sharding.check_batch(mesh, rows=rows // accumulate, key="data.global_batch / train.accumulate")
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    _check_data(config, examples, body)
    model_config = classifier.make_config(body, examples.labels)
    network = make_network(config, model_config, examples, mesh)
    steps = config.train.steps or math.ceil(config.train.epochs * count / rows)
    tx = build.build_optimizer(config, steps)

    def init(start: Params | None = None) -> state.TrainState:
        params = classifier.init_params(model_config, jax.random.key(config.train.seed))
        params = params if start is None else params | {"roberta": start}
        return state.fresh_state(params, tx, ema=config.optimizer.ema_decay > 0)

    make_state, shapes = state.placed(init, mesh)
    shardings = state.shardings_of(shapes)
    body_shardings = shardings.params["roberta"]
    gradient = make_gradient(network, seed=config.train.seed, accumulate=accumulate, mesh=mesh)
    train_step = build.build_train_step(config, gradient, tx, steps, mesh, shardings, bool(examples.labels))
    eval_step = make_eval_step(network, mesh, shardings.params)
    mean_length = float(np.mean(examples.splits["train"].lengths))
    return Task(
        mesh=mesh,
        steps=steps,
        shapes=shapes,
        step_of=lambda step: train_step,
        fresh=lambda: make_state() if start is None else make_state(sharding.put_tree(start(), body_shardings)),
        batches=lambda first: _train_batches(config, examples, mesh, first),
        evaluate=lambda params: evaluate(config, examples, mesh, eval_step, params, "validation")[0],
        ends_epoch=lambda step: step * rows // count > (step - 1) * rows // count,
        badness=lambda scores: 1 - scores["accuracy"] if examples.labels else scores["loss"],
        facts={"model": model_config.to_dict(), "labels": examples.labels, "vocab_size": examples.vocab_size},
        data_fingerprint=examples.fingerprint,
        tokens_per_step=round(rows * mean_length),
        flops_per_token=lambda step: _flops_per_token(model_config, mean_length),
        programs=len(examples.lengths("train")),
    )


def _check_data(config: ConfigDict, examples: Examples, body: RobertaConfig) -> None:
    reads = body.max_position_embeddings - body.pad_token_id - 1
    if examples.length > reads:
        raise InputError(f"config.classify.length = {examples.length}: the model reads {reads} tokens; lower it.")
    if body.vocab_size < examples.vocab_size or body.pad_token_id != examples.pad_id:
        raise InputError(
            f"config.train.init_from: its model has {body.vocab_size} vocabulary entries and pad id "
            f"{body.pad_token_id}, its tokenizer {examples.vocab_size} and {examples.pad_id}; take those of one model."
        )
    count = len(examples.splits["train"].labels_N)
    if count < config.data.lanes:
        raise InputError(f"config.data.lanes = {config.data.lanes}: there are only {count} training rows; lower it.")


def make_network(config: ConfigDict, model_config: RobertaConfig, examples: Examples, mesh: Mesh) -> Network:
    """Returns the network; its attention is the kernel that config.model.attention chooses for each length of rows.

    Raises:
      InputError: the kernel can't do one of them.
    """
    lengths = sorted({length for split in examples.splits for length in examples.lengths(split)})
    kernels = {length: build.build_attention(config, model_config, length, mesh) for length in lengths}

    def attend(q_BxLxH: jax.Array, *rest: jax.Array | None) -> jax.Array:
        return kernels[q_BxLxH.shape[1]](q_BxLxH, *rest)

    return Network(model_config, config.model.dtype, config.model.remat, config.model.remat_feed_forward, attend)


def make_gradient(network: Network, *, seed: int, accumulate: int, mesh: Mesh) -> Callable:
    """Returns the gradient of the mean loss of the rows, as `step.mean_gradient` does."""

    def prepare(batch: step.Batch, step: jax.Array) -> step.Inputs:
        return {name: batch[name] for name in ("input_ids", "attention_mask", "label")}

    def loss_sum(params: Params, inputs: step.Inputs, rows_B: jax.Array, key: jax.Array) -> tuple[jax.Array, RowSums]:
        ids_BxL, attention_BxL = inputs["input_ids"], inputs["attention_mask"]
        logits_BxC = classifier.logits(network, params, ids_BxL, attention_BxL, key, rows_B)
        rows = classifier.row_sums(logits_BxC, inputs["label"])
        return jnp.sum(rows.loss_B), jax.tree.map(jnp.sum, rows)

    return step.mean_gradient(
        prepare=prepare, loss_sum=loss_sum, seed=seed, accumulate=accumulate, mesh=mesh, dtype=network.dtype
    )


def make_eval_step(network: Network, mesh: Mesh, param_shardings: Params) -> Callable:
    """Returns the jitted `(params, batch) -> classifier.RowScores`, on every host, without dropout."""

    def eval_step(params: Params, batch: step.Batch) -> classifier.RowScores:
        logits_BxC = classifier.logits(network, params, batch["input_ids"], batch["attention_mask"])
        return classifier.row_scores(logits_BxC, batch["label"])

    shardings = (param_shardings, NamedSharding(mesh, BATCH))
    return jax.jit(eval_step, in_shardings=shardings, out_shardings=NamedSharding(mesh, P()))


def evaluate(
    config: ConfigDict, examples: Examples, mesh: Mesh, eval_step: Callable, params: Params, split: str
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the scores of a split, every row of it once, and what was predicted for each row, float32 [N].

    The scores are loss (cross entropy in nats, or mean squared error), those of mlm/tasks/class_scores.py, and rows.
    """
    rows = config.evaluate.batch
    batches = data.eval_batches(examples, split=split, batch=rows, rows=sharding.local_rows(mesh, rows))
    found = evaluation.of_rows(eval_step, params, watch.beats(batches), mesh=mesh, rows=rows)
    order, own = data.eval_order(examples, split), examples.splits[split]
    loss_N, predicted_N = (np.empty(len(order), np.float32) for _ in range(2))
    for column_N, values in zip((loss_N, predicted_N), found, strict=True):
        column_N[order] = values[: len(order)]
    if examples.labels:
        scores = class_scores.of_classes(own.labels_N, predicted_N, len(examples.labels))
    else:
        scores = class_scores.of_numbers(own.labels_N, predicted_N)
    return {"loss": float(np.mean(loss_N, dtype=np.float64)), **scores, "rows": len(order)}, predicted_N


def _train_batches(config: ConfigDict, examples: Examples, mesh: Mesh, first: int) -> Iterator[dict[str, np.ndarray]]:
    rows = config.data.global_batch
    return data.train_batches(
        examples,
        seed=config.data.seed,
        global_batch=rows,
        lanes=config.data.lanes,
        start_step=first,
        rows=sharding.local_rows(mesh, rows),
    )


def _flops_per_token(config: RobertaConfig, length: float) -> float:
    """Returns the useful FLOPs of a training step per token read: the head, like the last layer's tail, reads one."""
    return flops.train_flops_per_token(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=config.intermediate_size,
        length=length,
        vocab_size=config.num_labels,
        predicted_share=1 / length,
    )
