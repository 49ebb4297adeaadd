"""transformers' FlaxRobertaForSequenceClassification: its configuration, its parameter tree, its numbers.

The body is mlm/model/roberta.py's Network, whose last layer works on the first token alone: the head reads no other.

Dimensions: B rows, L tokens in a row, H hidden size, C classes (1 for regression).
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import jax
import jax.numpy as jnp
from transformers import FlaxRobertaForSequenceClassification, RobertaConfig

from mlm.model import layers
from mlm.model.loss import RowSums
from mlm.model.roberta import Network, Params

PROBLEMS = {"classes": "single_label_classification", "regression": "regression"}  # transformers' names


class RowScores(NamedTuple):
    """What an evaluation needs of each row."""

    loss_B: jax.Array  # float32: cross entropy in nats, or the squared error
    prediction_B: jax.Array  # float32: the number of the class, or the predicted value


def make_config(body: RobertaConfig, labels: tuple[str, ...]) -> RobertaConfig:
    """Returns transformers' config of a classifier.

    Args:
      body: of the model under the head; its hidden dropout is the head's too.
      labels: names of the classes by their number; none for regression.
    """
    config = copy.deepcopy(body)
    config.architectures = ["RobertaForSequenceClassification"]
    config.problem_type = PROBLEMS["classes" if labels else "regression"]
    config.id2label = dict(enumerate(labels or ("LABEL_0",)))  # sets num_labels
    config.label2id = {label: number for number, label in config.id2label.items()}
    return config


def class_names(config: RobertaConfig) -> tuple[str, ...]:
    """Returns the names of the classes by their number; none for regression."""
    if config.problem_type == PROBLEMS["regression"] or config.num_labels == 1:
        return ()
    return tuple(config.id2label[number] for number in range(config.num_labels))


def init_params(config: RobertaConfig, key: jax.Array) -> Params:
    """Returns float32 parameters as transformers initialises them."""
    return FlaxRobertaForSequenceClassification(config, _do_init=False).init_weights(key, (1, 1))


def logits(
    network: Network,
    params: Params,
    ids_BxL: jax.Array,
    attention_BxL: jax.Array,
    dropout_key: jax.Array | None = None,
    rows_B: jax.Array | None = None,
) -> jax.Array:
    """Returns logits_BxC, float32, of the first token of each row; the arguments are those of `Network.encode`."""
    first_Bx1 = jnp.zeros((len(ids_BxL), 1), jnp.int32)
    x_Bx1xH = network.encode(params, ids_BxL, attention_BxL, dropout_key, first_Bx1, rows_B)
    seeds = [None, None]
    if dropout_key is not None:
        seeds = list(jax.random.bits(jax.random.fold_in(dropout_key, 1), (2,)))
    rate, own = network.config.hidden_dropout_prob, params["classifier"]
    with jax.named_scope("classifier"):
        x_Bx1xH = layers.dropout(x_Bx1xH, rate, seeds[0], rows_B)
        x_Bx1xH = jnp.tanh(layers.dense(own["dense"], x_Bx1xH))
        x_Bx1xH = layers.dropout(x_Bx1xH, rate, seeds[1], rows_B)
        return layers.dense(own["out_proj"], x_Bx1xH)[:, 0].astype(jnp.float32)


def row_sums(logits_BxC: jax.Array, label_B: jax.Array) -> RowSums:
    """Returns the loss of each row: cross entropy in nats, or, of one logit, the squared error; float32."""
    weight_B = jnp.ones(label_B.shape, jnp.float32)
    if logits_BxC.shape[-1] == 1:
        return RowSums((logits_BxC[:, 0] - label_B) ** 2, weight_B, jnp.zeros_like(weight_B))
    own_BxC = jnp.arange(logits_BxC.shape[-1]) == label_B[:, None]  # few classes: no gather, which a mesh has to split
    loss_B = -jnp.sum(jnp.where(own_BxC, jax.nn.log_softmax(logits_BxC), 0), axis=-1)
    return RowSums(loss_B, weight_B, (jnp.argmax(logits_BxC, axis=-1) == label_B).astype(jnp.float32))


def row_scores(logits_BxC: jax.Array, label_B: jax.Array) -> RowScores:
    """Returns the loss and the prediction of each row; of classes of the same logit the first."""
    value_B = logits_BxC[:, 0] if logits_BxC.shape[-1] == 1 else jnp.argmax(logits_BxC, axis=-1)
    return RowScores(row_sums(logits_BxC, label_B).loss_B, value_B.astype(jnp.float32))
