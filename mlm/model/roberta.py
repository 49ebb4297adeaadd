"""RoBERTa (Liu et al., 2019, arXiv 1907.11692), post-norm and with pre-norm (Ott et al., 2019), as linen modules.

They are BERT's parts under RoBERTa's names: positions count from the padding id + 1, and the heads differ.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, N = B x K.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from transformers import (
    FlaxRobertaForMaskedLM,
    FlaxRobertaForSequenceClassification,
    FlaxRobertaForTokenClassification,
    FlaxRobertaPreLayerNormForMaskedLM,
    FlaxRobertaPreLayerNormForSequenceClassification,
    FlaxRobertaPreLayerNormForTokenClassification,
    PretrainedConfig,
)
from transformers.modeling_flax_outputs import FlaxSequenceClassifierOutput

from mlm.model import layers
from mlm.model.bert import Body, PreNormLayer, TokenClassification, classifier_dropout, normal
from mlm.model.layers import Dense, Dropout, LayerNorm, Logits
from mlm.model.module import Encoded, Inputs, Model, vocabulary_logits


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
        self.dropout = Dropout(classifier_dropout(self.config))

    def __call__(self, x_Bx1xH: Array, rows_B: Array | None) -> Array:
        x_Bx1xH = jnp.tanh(self.dense(self.dropout(x_Bx1xH[:, :1], rows_B)))
        return self.out_proj(self.dropout(x_Bx1xH, rows_B))[:, 0]


class RobertaModule(Model):
    """RoBERTa under any head."""

    def setup(self) -> None:
        self.roberta = Body(self.config, self.dtype, self.settings, first_position=self.config.pad_token_id + 1)
        self.setup_head()

    @property
    def body(self) -> Body:
        return self.roberta

    def encode(self, inputs: Inputs, tokens_BxK: Array | None) -> Encoded:
        return self.body(inputs, tokens_BxK)


class PreNormModule(RobertaModule):
    """RoBERTa with pre-norm under any head."""

    def setup(self) -> None:
        first = self.config.pad_token_id + 1
        self.roberta_prelayernorm = PreNormBody(self.config, self.dtype, self.settings, PreNormLayer, first)
        self.setup_head()

    @property
    def body(self) -> Body:
        return self.roberta_prelayernorm


class MaskedLM:
    """The language-model head."""

    def setup_head(self) -> None:
        self.lm_head = LMHead(self.config)

    def predict(self, x_BxKxH: Array, rows_B: Array | None) -> Array:
        return self.lm_head(x_BxKxH, self.body.embeddings.word_embeddings.embedding)


class SequenceClassification:
    """The head that classifies a row by its first token."""

    output_class = FlaxSequenceClassifierOutput
    reads_first_token = True

    def setup_head(self) -> None:
        self.classifier = ClassificationHead(self.config)

    def predict(self, x_Bx1xH: Array, rows_B: Array | None) -> Array:
        return self.classifier(x_Bx1xH, rows_B)


class RobertaForMaskedLMModule(MaskedLM, RobertaModule):
    """FlaxRobertaForMaskedLM's."""


class RobertaForSequenceClassificationModule(SequenceClassification, RobertaModule):
    """FlaxRobertaForSequenceClassification's."""


class RobertaForTokenClassificationModule(TokenClassification, RobertaModule):
    """FlaxRobertaForTokenClassification's."""


class RobertaPreLayerNormForMaskedLMModule(MaskedLM, PreNormModule):
    """FlaxRobertaPreLayerNormForMaskedLM's."""


class RobertaPreLayerNormForSequenceClassificationModule(SequenceClassification, PreNormModule):
    """FlaxRobertaPreLayerNormForSequenceClassification's."""


class RobertaPreLayerNormForTokenClassificationModule(TokenClassification, PreNormModule):
    """FlaxRobertaPreLayerNormForTokenClassification's."""


class RobertaForMaskedLM(FlaxRobertaForMaskedLM):
    module_class = RobertaForMaskedLMModule


class RobertaForSequenceClassification(FlaxRobertaForSequenceClassification):
    module_class = RobertaForSequenceClassificationModule


class RobertaForTokenClassification(FlaxRobertaForTokenClassification):
    module_class = RobertaForTokenClassificationModule


class RobertaPreLayerNormForMaskedLM(FlaxRobertaPreLayerNormForMaskedLM):
    module_class = RobertaPreLayerNormForMaskedLMModule


class RobertaPreLayerNormForSequenceClassification(FlaxRobertaPreLayerNormForSequenceClassification):
    module_class = RobertaPreLayerNormForSequenceClassificationModule


class RobertaPreLayerNormForTokenClassification(FlaxRobertaPreLayerNormForTokenClassification):
    module_class = RobertaPreLayerNormForTokenClassificationModule
