"""Initialization that spares short runs the loss plateaus at the start.

A small model first learns token frequencies, and only much later to attend to neighbouring tokens:

- the output bias is the log of the tokens' frequencies (the prior of Lin et al., 2017, Focal loss, 4.1);
- head h attends to a fixed offset: -1, +1, -2, +2, ... A position table holds sinusoids (Vaswani et al., 2017, 3.5) in
  the first entries, where the word embeddings are zero: query and key kernels read these alone, so that what a token is
  does not blur where it is, and the query is rotated by the offset. With rotary positions, the first entry of every
  embedding is the same constant, from which the kernels make a constant query and key, and the query is rotated by the
  offset. Value and output kernels are orthogonal. To structure attention at initialisation is the idea of Trockman and
  Kolter, 2023, Mimetic initialization;
- word and position embeddings are scaled up, and the only token type's embedding is zero.

Dimensions: V entries of the padded vocabulary, P entries of the position table, H hidden size, F planes that positions
rotate.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from transformers import ModernBertConfig, PretrainedConfig, RobertaConfig

from mlm.model.families import at_path, family_of, first_position
from mlm.model.module import Params

EMBEDDING_SCALE = 3.0  # of initializer_range; tuned on the quickstart, like the others
# attention score of the token at a head's offset, apart from the noise of token contents
SHARPNESS = 11.0
# the same, for a plane that is rotated by 1 a token; slower planes have less
ROTARY_SHARPNESS = 4.0
SHARED = 0.5  # norm of the entry that all embeddings share, relative to the norm of the rest


def prime(params: Params, config: PretrainedConfig, counts_V: Array, key: Array) -> Params:
    """Returns transformers' initial parameters primed; `counts_V` says how often each token occurs in the text."""
    params = jax.tree.map(lambda leaf: leaf, params)  # new dictionaries around the same arrays
    family = family_of(config)
    words = at_path(params, family.embedding[:-1])
    decoder = at_path(params, family.decoder_bias[:-1])
    words["embedding"] *= EMBEDDING_SCALE
    smoothed_V = counts_V.astype(jnp.float32) + 0.5
    # Added to zeros, so that a changed model without this bias, or with one of another shape, is an error here.
    decoder["bias"] = 0 * decoder["bias"] + jnp.log(smoothed_V / jnp.mean(smoothed_V))
    embeddings = params[family.body]["embeddings"]
    prime_positions = _prime_rotary if isinstance(config, ModernBertConfig) else _prime_table
    stddev = EMBEDDING_SCALE * config.initializer_range
    prime_attention = prime_positions(embeddings, config, stddev)
    for index, layer in at_path(params, family.stack).items():
        keys = jax.random.split(jax.random.fold_in(key, int(index)))
        value, output = (jax.random.orthogonal(layer_key, config.hidden_size) for layer_key in keys)
        prime_attention(int(index), layer, value, output)
    return params


def _offsets(config: RobertaConfig | ModernBertConfig) -> list[int]:
    """Returns the offset that each head attends to."""
    heads = range(config.num_attention_heads)
    return [head // 2 + 1 if head % 2 else -(head // 2 + 1) for head in heads]


def _prime_table(embeddings: Params, config: RobertaConfig, stddev: float) -> Callable[..., None]:
    """Primes the position table; returns the function that primes a layer, given value and output kernels."""
    per_token_F = _frequencies(config)
    size = config.hidden_size
    heads = config.num_attention_heads
    width = 2 * len(per_token_F)
    head_size = size // heads
    angles_PxF = np.arange(config.max_position_embeddings)[:, None] * per_token_F
    sinusoids = np.stack([np.sin(angles_PxF), np.cos(angles_PxF)], axis=-1)
    sinusoids = sinusoids.reshape(len(angles_PxF), width)
    table_PxH = np.sqrt(2) * stddev * np.pad(sinusoids, ((0, 0), (0, size - width)))
    embeddings["position_embeddings"]["embedding"] = jnp.asarray(table_PxH, jnp.float32)
    words = embeddings["word_embeddings"]
    words["embedding"] = words["embedding"].at[:, :width].set(0.0)
    embeddings["token_type_embeddings"]["embedding"] *= 0.0
    sharpness = np.sqrt(SHARPNESS * np.sqrt(head_size) / width)
    query, key = np.zeros((2, width, heads, head_size))
    for head, offset in enumerate(_offsets(config)):
        query[:, head, :width] = sharpness * _rotation(offset * per_token_F)
        key[:, head, :width] = sharpness * np.eye(width)

    def prime_attention(index: int, layer: Params, value: Array, output: Array) -> None:
        attention = layer["attention"]["self"]
        for name, kernel in (("query", query), ("key", key)):
            added = jnp.asarray(kernel.reshape(width, size), jnp.float32)
            attention[name]["kernel"] = attention[name]["kernel"].at[:width].add(added)
        attention["value"]["kernel"] = value
        layer["attention"]["output"]["dense"]["kernel"] = output

    return prime_attention


def _prime_rotary(
    embeddings: Params, config: ModernBertConfig, stddev: float
) -> Callable[..., None]:
    """As `_prime_table`, for rotary positions, with a first entry that all embeddings share (see the module)."""
    words = embeddings["tok_embeddings"]
    size = config.hidden_size
    words["embedding"] = words["embedding"].at[:, 0].set(SHARED * np.sqrt(size) * stddev)
    shared = SHARED * np.sqrt(size / (1 + SHARED**2))  # after the norm

    def prime_attention(index: int, layer: Params, value: Array, output: Array) -> None:
        is_global = index % config.global_attn_every_n_layers == 0
        theta = config.global_rope_theta if is_global else config.local_rope_theta
        head_size = size // config.num_attention_heads
        # radians, as modernbert.py rotates
        per_token_F = theta ** (-np.arange(0, head_size, 2) / head_size)
        length_F = np.sqrt(ROTARY_SHARPNESS * np.sqrt(head_size) * per_token_F) / shared
        ahead = [
            (length_F * np.cos(by * per_token_F), length_F * np.sin(by * per_token_F))
            for by in _offsets(config)
        ]
        plain = [(length_F, 0 * length_F)] * config.num_attention_heads
        query_H, key_H = (
            jnp.asarray(np.concatenate(planes, axis=None), jnp.float32) for planes in (ahead, plain)
        )
        kernel = layer["attn"]["Wqkv"]["kernel"].at[0, 0].add(query_H).at[0, 1].add(key_H)
        layer["attn"]["Wqkv"]["kernel"] = kernel.at[:, 2].set(value)
        layer["attn"]["Wo"]["kernel"] = output

    return prime_attention


def _frequencies(config: RobertaConfig) -> np.ndarray:
    """Returns the angle per token of each plane: from pi down, almost to pi / longest row. A quarter of H at most."""
    pairs = min(config.hidden_size // config.num_attention_heads, config.hidden_size // 4) // 2
    longest = config.max_position_embeddings - first_position(config)
    return np.pi * float(longest) ** (-np.arange(pairs) / pairs)


def _rotation(angles_F: np.ndarray) -> np.ndarray:
    """Returns [2F, 2F], whose blocks turn each (sin, cos) pair by its angle."""
    count = len(angles_F)
    cos, sin = np.cos(angles_F), np.sin(angles_F)
    blocks = np.zeros((count, 2, count, 2))
    blocks[range(count), :, range(count)] = np.moveaxis([[cos, -sin], [sin, cos]], 2, 0)
    return blocks.reshape(2 * count, 2 * count)
