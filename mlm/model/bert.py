"""BERT (Devlin et al., 2019) as linen modules: RoBERTa's embeddings and layers, under BERT's heads.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, V vocabulary, N = B x K.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from transformers import PretrainedConfig

from mlm.model import classifier_heads as heads
from mlm.model import layers
from mlm.model import partition_rules as rules
from mlm.model.layers import Dense, LayerNorm, Noise
from mlm.model.module import MASKED_LM, SEQUENCES, Model, RowInfo, vocabulary_logits
from mlm.model.roberta import Body, Intermediate, Layer, normal

# the last three to subclass and to use in a subclass
__all__ = ["BertModule", "Intermediate", "Layer", "normal"]


class Pooler(nn.Module):
    config: PretrainedConfig

    @nn.compact
    def __call__(self, x_BxKxH: Array) -> Array:
        return jnp.tanh(Dense(self.config.hidden_size, normal(self.config), name="dense")(x_BxKxH))


class BertBody(Body):
    def setup(self) -> None:
        super().setup()
        self.pooler = Pooler(self.config)  # of classifiers of rows


class PredictionTransform(nn.Module):
    config: PretrainedConfig

    @nn.compact
    def __call__(self, x_NxH: Array) -> Array:
        x_NxH = Dense(self.config.hidden_size, normal(self.config), name="dense")(x_NxH)
        x_NxH = layers.ACTIVATIONS[self.config.hidden_act](x_NxH)
        return LayerNorm(self.config.layer_norm_eps, name="LayerNorm")(x_NxH)


class Predictions(nn.Module):
    config: PretrainedConfig

    @nn.compact
    def __call__(self, x_BxKxH: Array, embedding_VxH: Array) -> Array:
        bias_V = self.param("bias", nn.initializers.zeros, (self.config.vocab_size,))
        transform = PredictionTransform(self.config, name="transform")
        return vocabulary_logits(transform, x_BxKxH, embedding_VxH, bias_V)


class LMHead(nn.Module):
    config: PretrainedConfig

    @nn.compact
    def __call__(self, x_BxKxH: Array, embedding_VxH: Array) -> Array:
        return Predictions(self.config, name="predictions")(x_BxKxH, embedding_VxH)


class BertModule(Model):
    layer_class = Layer

    def setup(self) -> None:
        self.body = BertBody(self.config, self.dtype, self.compute, self.layer_type, name="bert")
        if self.head_name == MASKED_LM:
            self.cls = LMHead(self.config)
        else:
            heads.add_classifier(self)

    def make_rows(
        self, ids_BxL: Array, attention_BxL: Array, token_types_BxL: Array | None, *rest: Any
    ) -> RowInfo:
        sep_id = self.config.sep_token_id
        if self.head_name == SEQUENCES and token_types_BxL is None and sep_id is not None:
            token_types_BxL = second_texts(ids_BxL, attention_BxL, sep_id)
        return super().make_rows(ids_BxL, attention_BxL, token_types_BxL, *rest)

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        if self.head_name == MASKED_LM:
            return self.cls(x_BxKxH, self.body.embeddings.word_embeddings.embedding)
        x_BxKxH = self.body.pooler(x_BxKxH) if self.head_name == SEQUENCES else x_BxKxH
        return heads.classify(self, x_BxKxH, noise)

    @nn.nowrap
    def partition_rules(self) -> rules.PartitionRules:
        if self.head_name == MASKED_LM:
            return rules.BERT + rules.BERT_LM_HEAD
        pooler = rules.BERT_POOLER if self.head_name == SEQUENCES else ()
        return rules.BERT + pooler + rules.CLASSIFIER


def second_texts(ids_BxL: Array, attention_BxL: Array, sep_id: int) -> Array:
    """Returns token types: 1 behind a row's first sep, as BERT's tokenizer marks the second text of a pair."""
    is_sep_BxL = (ids_BxL == sep_id).astype(jnp.int32)
    return (jnp.cumsum(is_sep_BxL, axis=1, dtype=jnp.int32) > is_sep_BxL) & (attention_BxL > 0)
