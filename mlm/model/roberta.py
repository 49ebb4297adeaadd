"""transformers' FlaxRobertaForMaskedLM: its configuration, its parameter tree, its numbers.

What is ours is the way through it: the head runs on the masked positions only, and positions come from the attention
mask, so that no replacement token can shift them.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, V entries of the padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from transformers import FlaxRobertaForMaskedLM, RobertaConfig
from transformers.models.roberta.modeling_flax_roberta import FlaxRobertaForMaskedLMModule

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


def make_module(config: RobertaConfig, *, dtype: str = "float32", remat: bool = False) -> FlaxRobertaForMaskedLMModule:
    """Returns the flax module; `dtype` is that of the computation, parameters are float32."""
    return FlaxRobertaForMaskedLMModule(config, dtype=jnp.dtype(dtype), gradient_checkpointing=remat)


def init_params(config: RobertaConfig, key: jax.Array) -> Params:
    """Returns float32 parameters as transformers initialises them."""
    model = FlaxRobertaForMaskedLM(config, _do_init=False)
    return model.init_weights(key, (1, 1))


def position_ids(attention_BxL: jax.Array, pad_id: int) -> jax.Array:
    """Returns RoBERTa's positions: pad id + 1, + 2, ... on real tokens, pad id on padding."""
    attention_BxL = attention_BxL.astype(jnp.int32)
    return jnp.cumsum(attention_BxL, axis=-1) * attention_BxL + pad_id


def masked_logits(
    module: FlaxRobertaForMaskedLMModule,
    params: Params,
    ids_BxL: jax.Array,
    attention_BxL: jax.Array,
    positions_BxK: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns logits_BxKxV at `positions_BxK`: equal to the stock full head's there, at K / L of its cost.

    Dropout is on where a `dropout_key` is given.
    """

    def forward(module: FlaxRobertaForMaskedLMModule) -> jax.Array:
        hidden_BxLxH = module.roberta(
            ids_BxL,
            attention_BxL,
            jnp.zeros_like(ids_BxL),
            position_ids(attention_BxL, module.config.pad_token_id),
            None,
            deterministic=dropout_key is None,
        )[0]
        hidden_BxKxH = jnp.take_along_axis(hidden_BxLxH, positions_BxK[..., None], axis=1)
        embedding = module.roberta.variables["params"]["embeddings"]["word_embeddings"]["embedding"]
        return module.lm_head(hidden_BxKxH, shared_embedding=embedding)

    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    return module.apply({"params": params}, rngs=rngs, method=forward)
