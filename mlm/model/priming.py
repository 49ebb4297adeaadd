"""Initial parameters that spare a short run the plateaus at its beginning.

A small model first learns how frequent each token is, and only much later that attention can look at a neighbour:

- the output's bias starts as the log of the tokens' frequencies (the prior of Lin et al., 2017, Focal loss, 4.1);
- positions are sinusoids, and head h attends to the token at a fixed offset, -1, +1, -2, +2, ...: for sinusoids a shift
  is a rotation (Vaswani et al., 2017, 3.5), which the query's kernel holds. Values and their output are orthogonal.
  Such a structured start of attention is the idea of Trockman and Kolter, 2023, Mimetic initialization;
- embeddings of words and positions are larger, and that of the only token type is zero.

Dimensions: V entries of the padded vocabulary, P entries of the position table, H hidden size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import Array
from transformers import RobertaConfig

from mlm.model.network import Params

EMBEDDING_SCALE = 3.0  # of initializer_range; tuned on the quickstart, like SHARPNESS
SHARPNESS = 5.7  # score of a head for the token at its offset, without the noise of the tokens' contents


def prime(params: Params, config: RobertaConfig, counts_V: Array, key: Array) -> Params:
    """Returns transformers' initial parameters primed; `counts_V` says how often each token occurs in the text."""
    params = jax.tree.map(lambda leaf: leaf, params)  # new dictionaries around the same arrays
    embeddings = params["roberta"]["embeddings"]
    stddev = EMBEDDING_SCALE * config.initializer_range
    embeddings["position_embeddings"]["embedding"] = jnp.asarray(np.sqrt(2) * stddev * _sinusoids(config), jnp.float32)
    embeddings["word_embeddings"]["embedding"] *= EMBEDDING_SCALE
    embeddings["token_type_embeddings"]["embedding"] *= 0.0
    smoothed_V = counts_V.astype(jnp.float32) + 0.5
    params["lm_head"]["bias"] = jnp.log(smoothed_V / jnp.mean(smoothed_V))
    size = config.hidden_size
    sharpness = np.sqrt(2 * SHARPNESS / np.sqrt(size // config.num_attention_heads))
    for index, layer in params["roberta"]["encoder"]["layer"].items():
        attention = layer["attention"]["self"]
        attention["query"]["kernel"] += jnp.asarray(sharpness * _shifts(config), jnp.float32)
        attention["key"]["kernel"] += jnp.asarray(sharpness * np.eye(size), jnp.float32)
        value_key, output_key = jax.random.split(jax.random.fold_in(key, int(index)))
        attention["value"]["kernel"] = jax.random.orthogonal(value_key, size)
        layer["attention"]["output"]["dense"]["kernel"] = jax.random.orthogonal(output_key, size)
    return params


def _frequencies(config: RobertaConfig) -> np.ndarray:
    """Returns the angle per token of each pair of dimensions of a head: from pi down, almost to pi / longest row."""
    pairs = config.hidden_size // config.num_attention_heads // 2
    longest = config.max_position_embeddings - config.pad_token_id - 1
    return np.pi * float(longest) ** (-np.arange(pairs) / pairs)


def _sinusoids(config: RobertaConfig) -> np.ndarray:
    """Returns [P, H]: each head's dimensions hold (sin, cos) pairs of all frequencies, and 0 in an odd last one."""
    heads, size = config.num_attention_heads, config.hidden_size
    angles = np.arange(config.max_position_embeddings)[:, None] * _frequencies(config)
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), -1)
    return np.tile(np.pad(pairs, ((0, 0), (0, size // heads - pairs.shape[1]))), heads)


def _shifts(config: RobertaConfig) -> np.ndarray:
    """Returns [H, H]: head h's block turns the sinusoid of a position into that of the position at h's offset."""
    blocks, odd = [], config.hidden_size // config.num_attention_heads % 2
    for head in range(config.num_attention_heads):
        angles = (head // 2 + 1) * (-1 if head % 2 == 0 else 1) * _frequencies(config)
        rotations = [[[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]] for angle in angles]
        blocks += [*rotations, *[[[0.0]]] * odd]
    return scipy.linalg.block_diag(*blocks)
