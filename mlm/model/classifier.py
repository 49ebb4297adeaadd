"""Classifiers, transformers' ForSequenceClassification and ForTokenClassification: config, classes, loss.

Dimensions: B rows, L tokens in a row, H hidden size, C classes (1 for regression).
"""

import copy

import jax
import jax.numpy as jnp
from jax import Array
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from mlm.data.tokenizer_checks import marks_second_text
from mlm.model.families import family_of
from mlm.model.loss import RowSums
from mlm.model.module import SEQUENCES, TOKENS, Model


def make_config(
    body: PretrainedConfig, labels: tuple[str, ...], *, of_tokens: bool = False
) -> PretrainedConfig:
    """Returns the config of a classifier with these labels, or of a regression if there are none."""
    config = copy.deepcopy(body)
    config.architectures = [f"{family_of(config).name}For{TOKENS if of_tokens else SEQUENCES}"]
    if hasattr(config, "classifier_pooling"):
        config.classifier_pooling = "cls"  # ModernBERT's head reads the first token, or the mean
    of_rows = "single_label_classification" if labels else "regression"
    config.problem_type = None if of_tokens else of_rows
    config.id2label = dict(enumerate(labels or ("LABEL_0",)))  # sets num_labels
    config.label2id = {label: index for index, label in config.id2label.items()}
    return config


def class_names(config: PretrainedConfig) -> tuple[str, ...]:
    """Returns the names of the classes in order; none for regression."""
    if kind(config) == "regression":
        return ()
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))


def kind(config: PretrainedConfig) -> str:
    """Returns what a classifier predicts, as config.classify.kind names it."""
    if TOKENS in str(config.architectures):  # a folder's list may hold anything
        return "tokens"
    is_number = config.problem_type == "regression" or config.num_labels == 1
    return "regression" if is_number else "classes"


def head_name(config: PretrainedConfig) -> str:
    """Returns what transformers' classes call the head."""
    return TOKENS if kind(config) == "tokens" else SEQUENCES


def set_pairs(
    config: PretrainedConfig, tok: PreTrainedTokenizerFast, *, has_types: bool = True
) -> None:
    """Notes in a BERT's config whether its tokenizer gives the second text of a pair another type, if it gives any."""
    marks = has_types and marks_second_text(tok.backend_tokenizer, tok.sep_token_id)
    config.sep_token_id = tok.sep_token_id if marks else None


def make_module(config: PretrainedConfig, dtype: str = "float32") -> Model:
    """Returns the linen module of a classifier."""
    return family_of(config).make_module(config, head_name(config), dtype)


def row_sums(logits_BxC: Array, label_B: Array) -> RowSums:
    """Returns the loss of each row: cross entropy in nats, or the squared error of a single logit; float32.

    Of tokens, logits_BxLxC and label_BxL, it is the sum over those whose label is not -1.
    """
    if logits_BxC.shape[-1] == 1:
        error_B = logits_BxC[:, 0] - label_B
        return RowSums(error_B**2, jnp.ones_like(error_B), None)
    classes_C = jnp.arange(logits_BxC.shape[-1], dtype=jnp.int32)
    one_hot_BxC = classes_C == label_B[..., None]  # a mesh would have to split a gather
    loss_B = -jnp.sum(jnp.where(one_hot_BxC, jax.nn.log_softmax(logits_BxC), 0), axis=-1)  # 0 at -1
    columns = (loss_B, label_B >= 0, jnp.argmax(logits_BxC, axis=-1) == label_B)
    return RowSums(
        *(jnp.sum(column.reshape(len(column), -1), axis=1, dtype=jnp.float32) for column in columns)
    )


def row_scores(logits_BxC: Array, label_B: Array) -> tuple[Array, Array]:
    """Returns (loss_B, prediction_B, of tokens prediction_BxL), float32: a number, or the index of a class."""
    value_B = logits_BxC[:, 0] if logits_BxC.shape[-1] == 1 else jnp.argmax(logits_BxC, axis=-1)
    return row_sums(logits_BxC, label_B).loss_B, value_B.astype(jnp.float32)
