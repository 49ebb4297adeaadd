"""transformers' RoBERTa and RoBERTa-PreLayerNorm: their configurations, their parameter trees, their numbers.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, I intermediate size, C classes, N = B x K.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from transformers import RobertaConfig, RobertaPreLayerNormConfig

from mlm.model import layers
from mlm.model.network import Network, Params, segment_and_position_ids


class Roberta(Network):
    """RoBERTa (Liu et al., 2019, arXiv 1907.11692), as transformers' FlaxRobertaForMaskedLM."""

    config_class = RobertaConfig
    name = "Roberta"
    body = "roberta"
    lm_head = ("lm_head",)
    stack = ("roberta", "encoder", "layer")
    embedding = ("roberta", "embeddings", "word_embeddings", "embedding")
    decoder_bias = ("lm_head", "bias")
    architecture = Network.architecture | {"activation": "hidden_act", "layer_norm_eps": "layer_norm_eps"}

    @staticmethod
    def _settings(model: Mapping[str, Any], special_ids: Mapping[str, int]) -> dict[str, int]:
        positions = model["positions"] + special_ids["pad"] + 1  # RoBERTa counts from pad id + 1
        return {"max_position_embeddings": positions, "type_vocab_size": 1}

    @staticmethod
    def set_dropout(config: RobertaConfig, model: Mapping[str, Any]) -> None:
        """Sets the dropout rates to those of the config's group `model`, of the classification head too."""
        config.hidden_dropout_prob = model["hidden_dropout"]
        config.attention_probs_dropout_prob = model["attention_dropout"]
        config.classifier_dropout = None  # as in the layers

    @classmethod
    def init_params(cls, config: RobertaConfig, key: Array, head: str = "MaskedLM") -> Params:
        """Returns float32 parameters as transformers initialises them, with a head as `flax_class` names it."""
        return cls.flax_class(head)(config, _do_init=False).init_weights(key, (1, 1))

    def _positions(self, ids_BxL: Array, attention_BxL: Array) -> tuple[Array, Array]:
        return segment_and_position_ids(ids_BxL, attention_BxL, self.config.pad_token_id + 1, self.cls_id)

    def _embed(self, params, ids_BxL, positions_BxL, seed, rows_B):
        x_BxLxH = (
            params["word_embeddings"]["embedding"][ids_BxL].astype(self.dtype)
            + params["position_embeddings"]["embedding"][positions_BxL].astype(self.dtype)
            + params["token_type_embeddings"]["embedding"][0].astype(self.dtype)
        )
        return self._dropout(self._norm(params["LayerNorm"], x_BxLxH), seed, rows_B)

    def _layer(self, index, params, x_BxLxH, segments_BxL, positions_BxL, seeds, rows_B, wanted_BxK):
        sum_BxLxH = self._attention(params["attention"], x_BxLxH, x_BxLxH, segments_BxL, seeds, rows_B, wanted_BxK)
        sum_BxLxH = self._remat(index, self._feed_forward)(params, sum_BxLxH, seeds[2], rows_B, wanted_BxK)
        with jax.named_scope("output"):
            return self._norm(params["output"]["LayerNorm"], sum_BxLxH)

    def _attention(self, params, x_BxLxH, residual_BxLxH, segments_BxL, seeds, rows_B, wanted_BxK):
        """Returns the residual sum, given what attention reads and the residual."""
        with jax.named_scope("attention/self"):
            q, k, v = (layers.dense(params["self"][name], x_BxLxH) for name in ("query", "key", "value"))
            context_BxLxH = self._attend((q, k, v), segments_BxL, seeds[0])
        context_BxLxH, residual_BxLxH = self._at(wanted_BxK, context_BxLxH, residual_BxLxH)
        with jax.named_scope("attention/output"):
            projected_BxLxH = layers.dense(params["output"]["dense"], context_BxLxH)
            return residual_BxLxH + self._dropout(projected_BxLxH, seeds[1], rows_B, wanted_BxK)

    def _feed_forward(self, params, sum_BxLxH, seed, rows_B, wanted_BxK):
        """Feed-forward block: residual sum before its layer norm in, residual sum before the next layer norm out."""
        with jax.named_scope("attention/output"):
            x_BxLxH = self._norm(params["attention"]["output"]["LayerNorm"], sum_BxLxH)
        return x_BxLxH + self._transform(params, x_BxLxH, seed, rows_B, wanted_BxK)

    def _transform(self, params, x_BxLxH, seed, rows_B, wanted_BxK):
        with jax.named_scope("intermediate"):
            inner_BxLxI = layers.dense(params["intermediate"]["dense"], x_BxLxH)
            inner_BxLxI = layers.ACTIVATIONS[self.config.hidden_act](inner_BxLxI)
        with jax.named_scope("output"):
            return self._dropout(layers.dense(params["output"]["dense"], inner_BxLxI), seed, rows_B, wanted_BxK)

    def _head(self, params, x_NxH):
        x_NxH = layers.gelu(layers.dense(params["lm_head"]["dense"], x_NxH))
        return self._norm(params["lm_head"]["layer_norm"], x_NxH)

    def classify(self, params, x_BxKxH, seeds, rows_B, *, of_tokens):
        """Returns logits_BxKxC of the classification head, float32."""
        head, x_BxKxH = params["classifier"], self._dropout(x_BxKxH, seeds[0], rows_B)
        if of_tokens:
            return layers.logits(x_BxKxH, head["kernel"], head["bias"])
        x_BxKxH = jnp.tanh(layers.dense(head["dense"], x_BxKxH))
        x_BxKxH = self._dropout(x_BxKxH, seeds[1], rows_B)
        return layers.logits(x_BxKxH, head["out_proj"]["kernel"], head["out_proj"]["bias"])

    def _norm(self, params: Params, x_BxLxH: Array) -> Array:
        return layers.layer_norm(params, x_BxLxH, self.config.layer_norm_eps)

    def _dropout(self, x_BxLxH: Array, seed: Array | None, *rows_and_tokens: Array | None) -> Array:
        return layers.dropout(x_BxLxH, self.config.hidden_dropout_prob, seed, *rows_and_tokens)


class RobertaPreLayerNorm(Roberta):
    """RoBERTa with pre-norm (Ott et al., 2019, fairseq), as transformers' FlaxRobertaPreLayerNormForMaskedLM."""

    config_class = RobertaPreLayerNormConfig
    name = "RobertaPreLayerNorm"
    body = "roberta_prelayernorm"
    stack: ClassVar = ("roberta_prelayernorm", "encoder", "layer")
    embedding: ClassVar = ("roberta_prelayernorm", "embeddings", "word_embeddings", "embedding")

    def _layer(self, index, params, x_BxLxH, segments_BxL, positions_BxL, seeds, rows_B, wanted_BxK):
        attention = params["attention"]
        with jax.named_scope("attention"):
            normed_BxLxH = self._norm(attention["LayerNorm"], x_BxLxH)
        sum_BxLxH = self._attention(attention, normed_BxLxH, x_BxLxH, segments_BxL, seeds, rows_B, wanted_BxK)
        return self._remat(index, self._feed_forward)(params, sum_BxLxH, seeds[2], rows_B, wanted_BxK)

    def _feed_forward(self, params, sum_BxLxH, seed, rows_B, wanted_BxK):
        with jax.named_scope("intermediate"):
            x_BxLxH = self._norm(params["intermediate"]["LayerNorm"], sum_BxLxH)
        return sum_BxLxH + self._transform(params, x_BxLxH, seed, rows_B, wanted_BxK)

    def _last_norm(self, params, x_BxLxH):
        return self._norm(params["LayerNorm"], x_BxLxH)
