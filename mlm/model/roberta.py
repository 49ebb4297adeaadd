"""RoBERTa (Liu et al., 2019, arXiv 1907.11692) as linen modules, from the embeddings to the head.

Parameters have transformers' names. BERT (Devlin et al., 2019) has the same embeddings and layers, under other heads.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, I intermediate size, V vocabulary,
N = B x K.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from transformers import PretrainedConfig

from mlm.model import classifier_heads as heads
from mlm.model import layers
from mlm.model import partition_rules as rules
from mlm.model.layers import Dense, Dropout, Embedding, LayerNorm, Noise
from mlm.model.module import (
    MASKED_LM,
    AttentionKernel,
    Compute,
    Layers,
    Model,
    RowInfo,
    take_tokens,
    vocabulary_logits,
)


def normal(config: PretrainedConfig) -> layers.Initializer:
    """Returns how kernels and embeddings are drawn, as in PyTorch; transformers' Flax classes draw some heads wider."""
    return nn.initializers.normal(config.initializer_range)


class Embeddings(nn.Module):
    config: PretrainedConfig
    dtype: Any

    def setup(self) -> None:
        config = self.config
        init = normal(config)
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size, init, self.dtype)
        self.position_embeddings = Embedding(
            config.max_position_embeddings, config.hidden_size, init, self.dtype
        )
        self.token_type_embeddings = Embedding(
            config.type_vocab_size, config.hidden_size, init, self.dtype
        )
        self.LayerNorm = LayerNorm(config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def __call__(self, ids_BxL: Array, rows: RowInfo) -> Array:
        types = 0 if rows.token_types_BxL is None else rows.token_types_BxL.astype(jnp.int32)
        x_BxLxH = self.word_embeddings(ids_BxL) + self.position_embeddings(rows.positions)
        x_BxLxH = x_BxLxH + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(x_BxLxH), rows.noise)


class SelfAttention(nn.Module):
    config: PretrainedConfig
    compute: Compute

    def setup(self) -> None:
        self.query = Dense(self.config.hidden_size, normal(self.config))
        self.key = Dense(self.config.hidden_size, normal(self.config))
        self.value = Dense(self.config.hidden_size, normal(self.config))
        self.kernel = AttentionKernel(self.config, self.compute)

    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> Array:
        return self.kernel(self.query(x_BxLxH), self.key(x_BxLxH), self.value(x_BxLxH), rows)


class ResidualOutput(nn.Module):
    """Dense, dropout and the residual sum; `LayerNorm` is for whoever reads the sum."""

    config: PretrainedConfig

    def setup(self) -> None:
        self.dense = Dense(self.config.hidden_size, normal(self.config))
        self.dropout = Dropout(self.config.hidden_dropout_prob)
        self.LayerNorm = LayerNorm(self.config.layer_norm_eps)

    def __call__(self, x_BxLxI: Array, residual_BxLxH: Array, rows: RowInfo) -> Array:
        return residual_BxLxH + self.dropout(self.dense(x_BxLxI), rows.noise, rows.tokens_BxK)


class AttentionBlock(nn.Module):
    config: PretrainedConfig
    compute: Compute
    self_attention_class = SelfAttention

    def setup(self) -> None:
        self.self = self.self_attention_class(self.config, self.compute)
        self.output = ResidualOutput(self.config)
        self.LayerNorm = LayerNorm(self.config.layer_norm_eps)  # of pre-norm

    def __call__(self, x_BxLxH: Array, residual_BxLxH: Array, rows: RowInfo) -> Array:
        """Returns the residual sum of `rows.tokens_BxK`."""
        context_BxLxH = take_tokens(rows.tokens_BxK, self.self(x_BxLxH, rows))
        return self.output(context_BxLxH, take_tokens(rows.tokens_BxK, residual_BxLxH), rows)


class Intermediate(nn.Module):
    config: PretrainedConfig

    def setup(self) -> None:
        self.dense = Dense(self.config.intermediate_size, normal(self.config))
        self.LayerNorm = LayerNorm(self.config.layer_norm_eps)  # of pre-norm

    def __call__(self, x_BxLxH: Array) -> Array:
        return layers.ACTIVATIONS[self.config.hidden_act](self.dense(x_BxLxH))


class Layer(nn.Module):
    """Post-norm: each norm follows a residual sum."""

    config: PretrainedConfig
    compute: Compute
    index: int
    attention_class = AttentionBlock
    intermediate_class = Intermediate

    def setup(self) -> None:
        self.attention = self.attention_class(self.config, self.compute)
        self.intermediate = self.intermediate_class(self.config)
        self.output = ResidualOutput(self.config)

    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> Array:
        sum_BxLxH = self.attention(x_BxLxH, x_BxLxH, rows)
        return self.output.LayerNorm(self.compute.feed_forward(self, sum_BxLxH, rows))

    def feed_forward(self, sum_BxLxH: Array, rows: RowInfo) -> Array:
        """Feed-forward block with the norm before it: residual sum in, residual sum out."""
        x_BxLxH = self.attention.output.LayerNorm(sum_BxLxH)
        return self.output(self.intermediate(x_BxLxH), x_BxLxH, rows)


class Encoder(nn.Module):
    config: PretrainedConfig
    compute: Compute
    layer_class: type[Layer]

    @nn.compact
    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> list[Array]:
        return Layers(self.config, self.compute, self.layer_class, name="layer")(x_BxLxH, rows)


class Body(nn.Module):
    """Embeddings and layers, which all heads share."""

    config: PretrainedConfig
    dtype: Any
    compute: Compute
    layer_class: type[Layer]

    def setup(self) -> None:
        self.embeddings = Embeddings(self.config, self.dtype)
        self.encoder = Encoder(self.config, self.compute, self.layer_class)
        self.LayerNorm = LayerNorm(self.config.layer_norm_eps)  # of pre-norm, after the last layer

    def __call__(self, ids_BxL: Array, rows: RowInfo) -> list[Array]:
        return self.encoder(self.embeddings(ids_BxL, rows), rows)


class LMHead(nn.Module):
    config: PretrainedConfig

    def setup(self) -> None:
        self.dense = Dense(self.config.hidden_size, normal(self.config))
        self.layer_norm = LayerNorm(self.config.layer_norm_eps)
        self.bias = self.param("bias", nn.initializers.zeros, (self.config.vocab_size,))

    def __call__(self, x_BxKxH: Array, embedding_VxH: Array) -> Array:
        return vocabulary_logits(self.transform, x_BxKxH, embedding_VxH, self.bias)

    def transform(self, x_NxH: Array) -> Array:
        return self.layer_norm(layers.gelu(self.dense(x_NxH)))


class RobertaModule(Model):
    body_name = "roberta"
    layer_class = Layer

    def setup(self) -> None:
        name = self.body_name
        self.body = Body(self.config, self.dtype, self.compute, self.layer_type, name=name)
        if self.head_name == MASKED_LM:
            self.lm_head = LMHead(self.config)
        else:
            heads.add_classifier(self, rows=heads.ClassificationHead)

    @property
    def first_position(self) -> int:
        return self.config.pad_token_id + 1

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        if self.head_name == MASKED_LM:
            return self.lm_head(x_BxKxH, self.body.embeddings.word_embeddings.embedding)
        return heads.classify(self, x_BxKxH, noise)

    @nn.nowrap
    def partition_rules(self) -> rules.PartitionRules:
        is_lm = self.head_name == MASKED_LM
        return rules.BERT + (rules.ROBERTA_LM_HEAD if is_lm else rules.CLASSIFIER)
