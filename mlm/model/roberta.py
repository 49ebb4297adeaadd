"""RoBERTa (Liu et al., 2019, arXiv 1907.11692), post-norm and with pre-norm (Ott et al., 2019), as linen modules.

They are BERT's parts under RoBERTa's names: positions count from the padding id + 1, and the heads differ.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, N = B x K.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from transformers import PretrainedConfig

from mlm.model import layers
from mlm.model import partition_rules as rules
from mlm.model.bert import Body, Layer, PreNormLayer, classifier_dropout, normal
from mlm.model.layers import Dense, Dropout, LayerNorm, Logits, Noise
from mlm.model.module import MASKED_LM, SEQUENCES, Model, vocabulary_logits


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


class ClassificationHead(nn.Module):
    config: PretrainedConfig

    @nn.compact
    def __call__(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        config, rate = self.config, classifier_dropout(self.config)
        x_BxKxH = Dropout(rate, name="first_dropout")(x_BxKxH, noise)
        x_BxKxH = jnp.tanh(Dense(config.hidden_size, normal(config), name="dense")(x_BxKxH))
        x_BxKxH = Dropout(rate, name="last_dropout")(x_BxKxH, noise)
        return Logits(config.num_labels, normal(config), name="out_proj")(x_BxKxH)


class RobertaModule(Model):
    """RoBERTa under any head."""

    body_name = "roberta"
    layer_class = Layer

    def setup(self) -> None:
        self.body = Body(self.config, self.dtype, self.compute, self.layer_type, name=self.body_name)
        if self.head_name == MASKED_LM:
            self.lm_head = LMHead(self.config)
        elif self.head_name == SEQUENCES:
            self.classifier = ClassificationHead(self.config)
        else:
            self.dropout = Dropout(classifier_dropout(self.config))
            self.classifier = Logits(self.config.num_labels, normal(self.config))

    @property
    def first_position(self) -> int:
        return self.config.pad_token_id + 1

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        if self.head_name == MASKED_LM:
            return self.lm_head(x_BxKxH, self.body.embeddings.word_embeddings.embedding)
        if self.head_name == SEQUENCES:
            return self.classifier(x_BxKxH, noise)
        return self.classifier(self.dropout(x_BxKxH, noise))

    @nn.nowrap
    def partition_rules(self) -> rules.PartitionRules:
        return rules.BERT + (rules.ROBERTA_LM_HEAD if self.head_name == MASKED_LM else rules.CLASSIFIER)


class PreNormModule(RobertaModule):
    """RoBERTa with pre-norm under any head."""

    body_name = "roberta_prelayernorm"
    layer_class = PreNormLayer

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        return super().predict(self.body.LayerNorm(x_BxKxH), noise)
