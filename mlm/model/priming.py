"""Initial parameters that already know what a short run would otherwise spend most of its updates to find out.

From transformers' own initialisation, a small model first learns how frequent each token is, then which tokens occur
together, and only much later that attention can look at a neighbour. Primed parameters start behind those plateaus:

- the output's bias is the log of the tokens' frequencies, so that the first updates need not push every hidden state
  towards the frequent tokens (the prior of Lin et al., 2017, Focal loss, 4.1);
- positions are sinusoids, and head h attends to the token at a fixed offset, -1, +1, -2, +2, ...: for sinusoids a shift
  is a rotation (Vaswani et al., 2017, 3.5), which the query's kernel holds. Values and their output are orthogonal, so
  that what a head looks at comes through. Attention that starts with a structure instead of noise is the idea of
  Trockman and Kolter, 2023, Mimetic initialization;
- embeddings of words and positions are larger, and that of the only token type, which all tokens share, is zero.

Only where training starts is changed: not the model, its tree, or anything that is computed.

Dimensions: V entries of the padded vocabulary, P entries of the position table, H hidden size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from transformers import RobertaConfig

from mlm.model.roberta import Params

EMBEDDING_SCALE = 3.0  # of initializer_range; found on the quickstart, as is SHARPNESS
SHARPNESS = 5.7  # score of a head for the token at its offset, before the contents of the tokens disturb it


def prime(params: Params, config: RobertaConfig, counts_V: jax.Array, key: jax.Array) -> Params:
    """Returns `params`, of transformers' initialisation, primed.

    Args:
      params: the tree of FlaxRobertaForMaskedLM; not changed.
      config: of the model.
      counts_V: how often each token occurs in a sample of the text; 0 is allowed.
      key: of the orthogonal kernels.
    """
    params = jax.tree.map(lambda leaf: leaf, params)  # new dictionaries around the same arrays
    embeddings = params["roberta"]["embeddings"]
    stddev = EMBEDDING_SCALE * config.initializer_range
    table_PxH = np.sqrt(2) * stddev * _sinusoids(config)
    embeddings["position_embeddings"]["embedding"] = jnp.asarray(table_PxH, jnp.float32)
    embeddings["word_embeddings"]["embedding"] *= EMBEDDING_SCALE
    embeddings["token_type_embeddings"]["embedding"] *= 0.0
    smoothed_V = counts_V.astype(jnp.float32) + 0.5
    params["lm_head"]["bias"] = jnp.log(smoothed_V / jnp.mean(smoothed_V))

    size = config.hidden_size
    sharpness = np.sqrt(2 * SHARPNESS / np.sqrt(size // config.num_attention_heads))
    for number, layer in params["roberta"]["encoder"]["layer"].items():
        attention = layer["attention"]["self"]
        attention["query"]["kernel"] += jnp.asarray(sharpness * _shifts(config), jnp.float32)
        attention["key"]["kernel"] += jnp.asarray(sharpness * np.eye(size), jnp.float32)
        value_key, output_key = jax.random.split(jax.random.fold_in(key, int(number)))
        attention["value"]["kernel"] = jax.random.orthogonal(value_key, size)
        layer["attention"]["output"]["dense"]["kernel"] = jax.random.orthogonal(output_key, size)
    return params


def _frequencies(config: RobertaConfig) -> np.ndarray:
    """Returns the angle per token of each pair of dimensions of a head: from half a turn down to 1 / longest row."""
    pairs = config.hidden_size // config.num_attention_heads // 2
    longest = config.max_position_embeddings - config.pad_token_id - 1
    return np.pi * float(longest) ** (-np.arange(pairs) / pairs)


def _sinusoids(config: RobertaConfig) -> np.ndarray:
    """Returns [P, H]: in each head's dimensions (sin, cos) pairs of all frequencies; an odd one left over is 0."""
    heads, size = config.num_attention_heads, config.hidden_size
    angles = np.arange(config.max_position_embeddings)[:, None] * _frequencies(config)
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), -1)
    head = np.pad(pairs, ((0, 0), (0, size // heads - pairs.shape[1])))
    return np.tile(head, heads)


def _shifts(config: RobertaConfig) -> np.ndarray:
    """Returns [H, H]: head h's block turns the sinusoid of a position into that of the position at h's offset."""
    heads = config.num_attention_heads
    width = config.hidden_size // heads
    kernel = np.zeros((config.hidden_size, config.hidden_size))
    for head in range(heads):
        offset = (head // 2 + 1) * (-1 if head % 2 == 0 else 1)
        for pair, angle in enumerate(offset * _frequencies(config)):
            at = head * width + 2 * pair
            kernel[at : at + 2, at : at + 2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return kernel
