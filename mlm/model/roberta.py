"""transformers' FlaxRobertaForMaskedLM: its configuration, its parameter tree, its numbers.

What is ours is the way through it, function by function (mlm/model/layers.py, mlm/model/attention.py): the head runs on
the masked positions only, attention goes through a kernel of choice, and positions come from the attention mask, so
that no replacement token can shift them.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, V entries of the padded vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from transformers import FlaxRobertaForMaskedLM, RobertaConfig

from mlm.model import attention, layers

Params = dict[str, Any]


def make_config(
    *,
    vocab_size: int,
    special_ids: dict[str, int],
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    positions: int,
    activation: str,
    hidden_dropout: float,
    attention_dropout: float,
    layer_norm_eps: float,
    init_stddev: float,
    vocab_multiple: int,
) -> RobertaConfig:
    """Returns transformers' config of the model.

    RoBERTa counts positions from `pad id + 1`, so the table has `positions + pad id + 1` entries: 514 for 512 tokens
    and pad id 1. The vocabulary is padded up to a multiple of `vocab_multiple`.

    Args:
      vocab_size: entries of the tokenizer.
      special_ids: the tokenizer's ids of "pad", "cls" and "sep".
      hidden_size, layers, heads, intermediate_size, positions, activation, hidden_dropout, attention_dropout,
        layer_norm_eps, init_stddev, vocab_multiple: the keys of the same name in configs/base.py.
    """
    return RobertaConfig(
        architectures=["RobertaForMaskedLM"],
        vocab_size=-(-vocab_size // vocab_multiple) * vocab_multiple,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=positions + special_ids["pad"] + 1,
        type_vocab_size=1,
        hidden_act=activation,
        hidden_dropout_prob=hidden_dropout,
        attention_probs_dropout_prob=attention_dropout,
        layer_norm_eps=layer_norm_eps,
        initializer_range=init_stddev,
        pad_token_id=special_ids["pad"],
        bos_token_id=special_ids["cls"],
        eos_token_id=special_ids["sep"],
    )


def init_params(config: RobertaConfig, key: jax.Array) -> Params:
    """Returns float32 parameters as transformers initialises them."""
    model = FlaxRobertaForMaskedLM(config, _do_init=False)
    return model.init_weights(key, (1, 1))


def position_ids(attention_BxL: jax.Array, pad_id: int) -> jax.Array:
    """Returns RoBERTa's positions: pad id + 1, + 2, ... on real tokens, pad id on padding."""
    attention_BxL = attention_BxL.astype(jnp.int32)
    return jnp.cumsum(attention_BxL, axis=-1) * attention_BxL + pad_id


def places_of(
    ids_BxL: jax.Array, attention_BxL: jax.Array, pad_id: int, cls_id: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (segments_BxL, positions_BxL): the document of each token from 1 up, 0 for padding, and its position.

    Args:
      ids_BxL: int32.
      attention_BxL: int32, 1 for a token, 0 for padding.
      pad_id: of the model.
      cls_id: the token that begins a document, whose positions begin anew; None for rows of one document each.
    """
    segments_BxL, positions_BxL = attention_BxL.astype(jnp.int32), position_ids(attention_BxL, pad_id)
    if cls_id is None:
        return segments_BxL, positions_BxL
    begins_BxL = (ids_BxL == cls_id) & (segments_BxL > 0)
    before_BxL = jax.lax.cummax(jnp.where(begins_BxL, positions_BxL - pad_id - 1, 0), axis=1)
    documents_BxL = segments_BxL * (1 + jnp.cumsum(begins_BxL, axis=1))
    return documents_BxL, positions_BxL - segments_BxL * before_BxL


@dataclasses.dataclass(frozen=True)
class Network:
    """The forward pass, equal to transformers' module on the same parameters.

    Attributes:
      config: transformers' config of the model.
      dtype: of the computation; parameters are float32.
      remat: recompute each layer's activations in the backward pass.
      remat_feed_forward: layers, the first ones, whose feed-forward part alone is recomputed: its activations are more
        than half of a layer's, and its first product is all that costs time.
      attention: a kernel of mlm/model/attention.py, by default the one for any device.
      cls_id: the token that begins a document, where documents are isolated: each is read as if it stood alone in its
        row, and a kernel that is given isolates them too. None where a row is read as a whole, as transformers does.
        An export does not change by it: a text that stands alone in its row is read the same way.
    """

    config: RobertaConfig
    dtype: str = "float32"
    remat: bool = False
    remat_feed_forward: int = 0
    attention: attention.Attention | None = None
    cls_id: int | None = None

    def masked_logits(
        self,
        params: Params,
        ids_BxL: jax.Array,
        attention_BxL: jax.Array,
        positions_BxK: jax.Array,
        dropout_key: jax.Array | None = None,
        rows_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits_BxKxV at `positions_BxK`: equal to the stock full head's there, at K / L of its cost.

        Dropout is on where a `dropout_key` is given. The arguments are those of `encode`.
        """
        return self.head(params, self.encode(params, ids_BxL, attention_BxL, dropout_key, positions_BxK, rows_B))

    def encode(
        self,
        params: Params,
        ids_BxL: jax.Array,
        attention_BxL: jax.Array,
        dropout_key: jax.Array | None = None,
        positions_BxK: jax.Array | None = None,
        rows_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns what the last layer makes of the tokens, [B, K, H] in the type of the computation.

        Behind its attention, the last layer works on the tokens at `positions_BxK` alone: nobody reads the others.

        Args:
          params: transformers' tree, float32.
          ids_BxL: int32.
          attention_BxL: int32, 1 for a token, 0 for padding.
          dropout_key: a jax key; None for no dropout.
          positions_BxK: int32; None for all tokens, [B, L, H].
          rows_B: uint32, which row of the batch each is: dropout follows from it. None for 0, 1, ...
        """
        config, last = self.config, self.config.num_hidden_layers - 1
        seeds = [None] * (3 * config.num_hidden_layers + 1)
        if dropout_key is not None:
            seeds = list(jax.random.bits(dropout_key, (len(seeds),)))
        segments_BxL, places_BxL = places_of(ids_BxL, attention_BxL, config.pad_token_id, self.cls_id)
        x_BxLxH = self._embed(params["roberta"]["embeddings"], ids_BxL, places_BxL, seeds[0], rows_B)
        layer = jax.checkpoint(self._layer, static_argnums=6) if self.remat else self._layer
        for index in range(config.num_hidden_layers):
            own = params["roberta"]["encoder"]["layer"][str(index)]
            wanted_BxK = positions_BxK if index == last else None
            with jax.named_scope(f"roberta/encoder/layer/{index}"):
                own_seeds = seeds[3 * index + 1 :][:3]
                again = index < self.remat_feed_forward and not self.remat
                x_BxLxH = layer(own, x_BxLxH, segments_BxL, own_seeds, rows_B, wanted_BxK, again)
        return x_BxLxH

    @jax.named_scope("lm_head")
    def head(self, params: Params, hidden_BxKxH: jax.Array) -> jax.Array:
        """Returns the logits of the vocabulary, [B, K, V] in the type of the computation."""
        own = params["lm_head"]
        hidden_NxH = hidden_BxKxH.reshape(-1, hidden_BxKxH.shape[-1])  # three axes cost the TPU a copy of the logits
        x_NxH = layers.gelu(layers.dense(own["dense"], hidden_NxH))
        x_NxH = layers.layer_norm(own["layer_norm"], x_NxH, self.config.layer_norm_eps)
        embedding_VxH = params["roberta"]["embeddings"]["word_embeddings"]["embedding"].astype(self.dtype)
        logits_NxV = layers.add_bias(layers.product(x_NxH, embedding_VxH.T), own["bias"])
        return logits_NxV.reshape(*hidden_BxKxH.shape[:2], -1)

    @jax.named_scope("roberta/embeddings")
    def _embed(
        self,
        params: Params,
        ids_BxL: jax.Array,
        places_BxL: jax.Array,
        seed: jax.Array | None,
        rows_B: jax.Array | None,
    ) -> jax.Array:
        x_BxLxH = (
            params["word_embeddings"]["embedding"][ids_BxL].astype(self.dtype)
            + params["position_embeddings"]["embedding"][places_BxL].astype(self.dtype)
            + params["token_type_embeddings"]["embedding"][0].astype(self.dtype)
        )
        x_BxLxH = layers.layer_norm(params["LayerNorm"], x_BxLxH, self.config.layer_norm_eps)
        return self._dropout(x_BxLxH, seed, rows_B)

    def _layer(
        self,
        params: Params,
        x_BxLxH: jax.Array,
        segments_BxL: jax.Array,
        seeds: list,
        rows_B: jax.Array | None,
        wanted_BxK: jax.Array | None,
        again: bool,
    ) -> jax.Array:
        """Returns what the layer makes of x.

        Args:
          params: of the layer.
          x_BxLxH: of the layer below.
          segments_BxL: int32, the tokens' documents.
          seeds: three, of the dropouts; None for none.
          rows_B: of `encode`.
          wanted_BxK: positions_BxK of `encode`, where this is the last layer.
          again: compute the feed-forward part again in the backward pass.
        """
        own = params["attention"]
        with jax.named_scope("attention/self"):
            q, k, v = (layers.dense(own["self"][name], x_BxLxH) for name in ("query", "key", "value"))
            keep_LxL = self._kept_shares(x_BxLxH.shape[1], seeds[0])
            attend = self.attention or attention.make(
                "xla", heads=self.config.num_attention_heads, isolated=self.cls_id is not None
            )
            context_BxLxH = attend(q, k, v, segments_BxL, keep_LxL)
        if wanted_BxK is not None:
            context_BxLxH, x_BxLxH = (
                jnp.take_along_axis(each, wanted_BxK[..., None], axis=1) for each in (context_BxLxH, x_BxLxH)
            )
        with jax.named_scope("attention/output"):
            update_BxLxH = layers.dense(own["output"]["dense"], context_BxLxH)
            sum_BxLxH = x_BxLxH + self._dropout(update_BxLxH, seeds[1], rows_B, wanted_BxK)
        feed_forward = jax.checkpoint(self._feed_forward) if again else self._feed_forward
        sum_BxLxH = feed_forward(params, sum_BxLxH, seeds[2], rows_B, wanted_BxK)
        with jax.named_scope("output"):
            return layers.layer_norm(params["output"]["LayerNorm"], sum_BxLxH, self.config.layer_norm_eps)

    def _feed_forward(
        self,
        params: Params,
        sum_BxLxH: jax.Array,
        seed: jax.Array | None,
        rows_B: jax.Array | None,
        wanted_BxK: jax.Array | None,
    ) -> jax.Array:
        """Returns what the layer's last norm is taken of, from what its first one is taken of."""
        with jax.named_scope("attention/output"):
            norm = params["attention"]["output"]["LayerNorm"]
            x_BxLxH = layers.layer_norm(norm, sum_BxLxH, self.config.layer_norm_eps)
        with jax.named_scope("intermediate"):
            inner_BxLxI = layers.dense(params["intermediate"]["dense"], x_BxLxH)
            inner_BxLxI = layers.activation(self.config.hidden_act, inner_BxLxI)
        with jax.named_scope("output"):
            update_BxLxH = layers.dense(params["output"]["dense"], inner_BxLxI)
            return x_BxLxH + self._dropout(update_BxLxH, seed, rows_B, wanted_BxK)

    def _dropout(self, x_BxLxH: jax.Array, seed: jax.Array | None, *places: jax.Array | None) -> jax.Array:
        return layers.dropout(x_BxLxH, self.config.hidden_dropout_prob, seed, *places)

    def _kept_shares(self, length: int, seed: jax.Array | None) -> jax.Array | None:
        """Returns what attention is multiplied by, keys x queries; None for no dropout."""
        rate = self.config.attention_probs_dropout_prob
        if seed is None or rate == 0:
            return None
        return layers.dropout(jnp.ones((1, length, length), self.dtype), rate, seed)[0]
