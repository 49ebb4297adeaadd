"""transformers' FlaxRobertaForMaskedLM: its configuration, its parameter tree, its numbers.

The head reads the masked positions only, attention is one of several kernels, and positions come from the attention
mask, so that no replacement token can shift them.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, I intermediate size, V padded vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from transformers import FlaxRobertaForMaskedLM, RobertaConfig

from mlm.model import layers
from mlm.model.attention import Attention, make_kernel

Params = dict[str, Any]


def make_config(model: Mapping[str, Any], vocab_size: int, special_ids: Mapping[str, int]) -> RobertaConfig:
    """Returns transformers' config of the config's group `model`, the tokenizer's vocabulary padded."""
    return RobertaConfig(
        architectures=["RobertaForMaskedLM"],
        vocab_size=-(-vocab_size // model["vocab_multiple"]) * model["vocab_multiple"],
        hidden_size=model["hidden_size"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["heads"],
        intermediate_size=model["intermediate_size"],
        max_position_embeddings=model["positions"] + special_ids["pad"] + 1,  # RoBERTa counts from pad id + 1
        type_vocab_size=1,
        hidden_act=model["activation"],
        hidden_dropout_prob=model["hidden_dropout"],
        attention_probs_dropout_prob=model["attention_dropout"],
        layer_norm_eps=model["layer_norm_eps"],
        initializer_range=model["init_stddev"],
        pad_token_id=special_ids["pad"],
        bos_token_id=special_ids["cls"],
        eos_token_id=special_ids["sep"],
    )


def init_params(config: RobertaConfig, key: Array) -> Params:
    """Returns float32 parameters as transformers initialises them."""
    return FlaxRobertaForMaskedLM(config, _do_init=False).init_weights(key, (1, 1))


def position_ids(attention_BxL: Array, pad_id: int) -> Array:
    """Returns RoBERTa's positions: pad id + 1, + 2, ... on real tokens, pad id on padding."""
    attention_BxL = attention_BxL.astype(jnp.int32)
    return jnp.cumsum(attention_BxL, axis=-1) * attention_BxL + pad_id


def segment_and_position_ids(
    ids_BxL: Array, attention_BxL: Array, pad_id: int, cls_id: int | None = None
) -> tuple[Array, Array]:
    """Returns segments_BxL (documents from 1 up, 0 for padding) and positions_BxL, which start again at `cls_id`."""
    segments_BxL, positions_BxL = attention_BxL.astype(jnp.int32), position_ids(attention_BxL, pad_id)
    if cls_id is None:
        return segments_BxL, positions_BxL
    starts_BxL = (ids_BxL == cls_id) & (segments_BxL > 0)
    before_BxL = jax.lax.cummax(jnp.where(starts_BxL, positions_BxL - pad_id - 1, 0), axis=1)
    documents_BxL = segments_BxL * (1 + jnp.cumsum(starts_BxL, axis=1))
    return documents_BxL, positions_BxL - segments_BxL * before_BxL


@dataclasses.dataclass(frozen=True)
class Network:
    """The forward pass, equal to transformers' module on the same parameters."""

    config: RobertaConfig
    dtype: str = "float32"
    remat: bool = False
    remat_feed_forward: int = 0  # so many layers, the first ones, recompute only their feed-forward block
    attention: Attention | None = None  # None for the kernel that runs on any device
    cls_id: int | None = None  # starts a document that is read as if alone in its row; `attention` isolates it too

    def masked_logits(self, params: Params, *inputs: Array | None) -> Array:
        """Returns logits_BxKxV of the full head at the positions, at K / L of its cost; `inputs` as for `encode`."""
        return self.head(params, self.encode(params, *inputs))

    def encode(
        self,
        params: Params,
        ids_BxL: Array,
        attention_BxL: Array,
        positions_BxK: Array | None = None,
        dropout_key: Array | None = None,
        rows_B: Array | None = None,
    ) -> Array:
        """Returns the last layer's output, [B, K, H] in the computation's type.

        Args:
          positions_BxK: the tokens to return, which the last layer computes alone; None for all, [B, L, H].
          dropout_key: None for no dropout.
          rows_B: uint32, index of each row in the global batch, which its dropout depends on; None for 0, 1, ...
        """
        config, last = self.config, self.config.num_hidden_layers - 1
        body, pad_id, dropouts = params["roberta"], config.pad_token_id, 3 * config.num_hidden_layers + 1
        seeds = [None] * dropouts if dropout_key is None else list(jax.random.bits(dropout_key, (dropouts,)))
        segments_BxL, position_ids_BxL = segment_and_position_ids(ids_BxL, attention_BxL, pad_id, self.cls_id)
        x_BxLxH = self._embed(body["embeddings"], ids_BxL, position_ids_BxL, seeds[0], rows_B)
        layer = jax.checkpoint(self._layer, static_argnums=6) if self.remat else self._layer
        for index in range(config.num_hidden_layers):
            layer_params, layer_seeds = body["encoder"]["layer"][str(index)], seeds[3 * index + 1 : 3 * index + 4]
            positions = positions_BxK if index == last else None
            remat_feed_forward = index < self.remat_feed_forward and not self.remat
            with jax.named_scope(f"roberta/encoder/layer/{index}"):
                x_BxLxH = layer(layer_params, x_BxLxH, segments_BxL, layer_seeds, rows_B, positions, remat_feed_forward)
        return x_BxLxH

    @jax.named_scope("lm_head")
    def head(self, params: Params, hidden_BxKxH: Array) -> Array:
        """Returns the logits of the vocabulary, [B, K, V] in the computation's type."""
        head = params["lm_head"]
        hidden_NxH = hidden_BxKxH.reshape(-1, hidden_BxKxH.shape[-1])  # three axes cost the TPU a copy of the logits
        x_NxH = layers.gelu(layers.dense(head["dense"], hidden_NxH))
        x_NxH = layers.layer_norm(head["layer_norm"], x_NxH, self.config.layer_norm_eps)
        embedding_VxH = params["roberta"]["embeddings"]["word_embeddings"]["embedding"].astype(self.dtype)
        logits_NxV = layers.add_bias(layers.product(x_NxH, embedding_VxH.T), head["bias"])
        return logits_NxV.reshape(*hidden_BxKxH.shape[:2], -1)

    @jax.named_scope("roberta/embeddings")
    def _embed(self, params, ids_BxL, position_ids_BxL, seed, rows_B):
        x_BxLxH = (
            params["word_embeddings"]["embedding"][ids_BxL].astype(self.dtype)
            + params["position_embeddings"]["embedding"][position_ids_BxL].astype(self.dtype)
            + params["token_type_embeddings"]["embedding"][0].astype(self.dtype)
        )
        x_BxLxH = layers.layer_norm(params["LayerNorm"], x_BxLxH, self.config.layer_norm_eps)
        return self._dropout(x_BxLxH, seed, rows_B)

    def _layer(self, params, x_BxLxH, segments_BxL, seeds, rows_B, positions_BxK, remat_feed_forward):
        """Transformer layer; `seeds` are those of its three dropouts."""
        attention, isolated = params["attention"], self.cls_id is not None
        with jax.named_scope("attention/self"):
            q, k, v = (layers.dense(attention["self"][name], x_BxLxH) for name in ("query", "key", "value"))
            length, rate = x_BxLxH.shape[1], self.config.attention_probs_dropout_prob
            dropout_mask_LxL = None
            if seeds[0] is not None and rate > 0:
                dropout_mask_LxL = layers.dropout(jnp.ones((1, length, length), self.dtype), rate, seeds[0])[0]
            attend = self.attention or make_kernel("xla", heads=self.config.num_attention_heads, isolated=isolated)
            context_BxLxH = attend(q, k, v, segments_BxL, dropout_mask_LxL)
        if positions_BxK is not None:
            context_BxLxH, x_BxLxH = (
                jnp.take_along_axis(each, positions_BxK[..., None], axis=1) for each in (context_BxLxH, x_BxLxH)
            )
        with jax.named_scope("attention/output"):
            projected_BxLxH = layers.dense(attention["output"]["dense"], context_BxLxH)
            sum_BxLxH = x_BxLxH + self._dropout(projected_BxLxH, seeds[1], rows_B, positions_BxK)
        feed_forward = jax.checkpoint(self._feed_forward) if remat_feed_forward else self._feed_forward
        sum_BxLxH = feed_forward(params, sum_BxLxH, seeds[2], rows_B, positions_BxK)
        with jax.named_scope("output"):
            return layers.layer_norm(params["output"]["LayerNorm"], sum_BxLxH, self.config.layer_norm_eps)

    def _feed_forward(self, params, sum_BxLxH, seed, rows_B, positions_BxK):
        """Feed-forward block: residual sum before its layer norm in, residual sum before the next layer norm out."""
        with jax.named_scope("attention/output"):
            norm = params["attention"]["output"]["LayerNorm"]
            x_BxLxH = layers.layer_norm(norm, sum_BxLxH, self.config.layer_norm_eps)
        with jax.named_scope("intermediate"):
            inner_BxLxI = layers.dense(params["intermediate"]["dense"], x_BxLxH)
            inner_BxLxI = layers.ACTIVATIONS[self.config.hidden_act](inner_BxLxI)
        with jax.named_scope("output"):
            projected_BxLxH = layers.dense(params["output"]["dense"], inner_BxLxI)
            return x_BxLxH + self._dropout(projected_BxLxH, seed, rows_B, positions_BxK)

    def _dropout(self, x_BxLxH: Array, seed: Array | None, *rows_and_tokens: Array | None) -> Array:
        return layers.dropout(x_BxLxH, self.config.hidden_dropout_prob, seed, *rows_and_tokens)
