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
from mlm.model.module import MASKED_LM, SEQUENCES, Encoded, Inputs, Model, vocabulary_logits


class PreNormBody(Body):
    """With a norm after the last layer."""

    def setup(self) -> None:
        super().setup()
        self.LayerNorm = LayerNorm(self.config.layer_norm_eps)

    def __call__(self, inputs: Inputs, tokens_BxK: Array | None) -> Encoded:
        encoded = super().__call__(inputs, tokens_BxK)
        return encoded._replace(last_BxKxH=self.LayerNorm(encoded.last_BxKxH))


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

    def setup(self) -> None:
        self.dense = Dense(self.config.hidden_size, normal(self.config))
        self.out_proj = Logits(self.config.num_labels, normal(self.config))
        self.first_dropout = Dropout(classifier_dropout(self.config))
        self.last_dropout = Dropout(classifier_dropout(self.config))

    def __call__(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        x_BxKxH = jnp.tanh(self.dense(self.first_dropout(x_BxKxH, noise)))
        return self.out_proj(self.last_dropout(x_BxKxH, noise))


class RobertaModule(Model):
    """RoBERTa under any head."""

    layer_class = Layer

    def setup(self) -> None:
        first = self.config.pad_token_id + 1
        self.roberta = Body(self.config, self.dtype, self.settings, self.layer_class, first)
        self.setup_head()

    @property
    def body(self) -> Body:
        return self.roberta

    def setup_head(self) -> None:
        if self.head_name == MASKED_LM:
            self.lm_head = LMHead(self.config)
        elif self.head_name == SEQUENCES:
            self.classifier = ClassificationHead(self.config)
        else:
            self.dropout = Dropout(classifier_dropout(self.config))
            self.classifier = Logits(self.config.num_labels, normal(self.config))

    def encode(self, inputs: Inputs, tokens_BxK: Array | None) -> Encoded:
        return self.body(inputs, tokens_BxK)

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

    layer_class = PreNormLayer

    def setup(self) -> None:
        first = self.config.pad_token_id + 1
        self.roberta_prelayernorm = PreNormBody(self.config, self.dtype, self.settings, self.layer_class, first)
        self.setup_head()

    @property
    def body(self) -> Body:
        return self.roberta_prelayernorm
