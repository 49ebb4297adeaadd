"""Initialization that spares short runs the loss plateaus at the start.

A small model first learns token frequencies, and only much later to attend to neighbouring tokens:

- the output bias is the log of the tokens' frequencies (the prior of Lin et al., 2017, Focal loss, 4.1);
- head h attends to a fixed offset: -1, +1, -2, +2, ... A position table holds sinusoids (Vaswani et al., 2017, 3.5),
  and the query kernel rotates them by the offset. With rotary positions, the first entry of every embedding is the same
  constant, from which the kernels make a constant query and key, and the query is rotated by the offset. Value and
  output kernels are orthogonal. To structure attention at initialisation is the idea of Trockman and Kolter, 2023,
  Mimetic initialization;
- word and position embeddings are scaled up, and the only token type's embedding is zero.

Dimensions: V entries of the padded vocabulary, P entries of the position table, H hidden size, F planes of a head that
positions rotate.
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
SHARPNESS = 5.7  # attention score of the token at a head's offset, apart from the noise of token contents
ROTARY_SHARPNESS = 4.0  # the same, for a plane that is rotated by 1 a token; slower planes have less
SHARED = 0.5  # norm of the entry that all embeddings share, relative to the norm of the rest


def prime(params: Params, config: PretrainedConfig, counts_V: Array, key: Array) -> Params:
    """Returns transformers' initial parameters primed; `counts_V` says how often each token occurs in the text."""
    params = jax.tree.map(lambda leaf: leaf, params)  # new dictionaries around the same arrays
    family = family_of(config)
    words, decoder = at_path(params, family.embedding[:-1]), at_path(params, family.decoder_bias[:-1])
    words["embedding"] *= EMBEDDING_SCALE
    smoothed_V = counts_V.astype(jnp.float32) + 0.5
    decoder["bias"] = jnp.log(smoothed_V / jnp.mean(smoothed_V))
    embeddings = params[family.body]["embeddings"]
    prime_positions = _prime_rotary if isinstance(config, ModernBertConfig) else _prime_table
    prime_attention = prime_positions(embeddings, config, EMBEDDING_SCALE * config.initializer_range)
    for index, layer in at_path(params, family.stack).items():
        keys = jax.random.split(jax.random.fold_in(key, int(index)))
        value, output = (jax.random.orthogonal(layer_key, config.hidden_size) for layer_key in keys)
        prime_attention(int(index), layer, value, output)
    return params


def _offsets(config: RobertaConfig | ModernBertConfig) -> list[int]:
    """Returns the offset that each head attends to."""
    return [(head // 2 + 1) * (-1 if head % 2 == 0 else 1) for head in range(config.num_attention_heads)]


def _prime_table(embeddings: Params, config: RobertaConfig, stddev: float) -> Callable[..., None]:
    """Primes the position table; returns the function that primes a layer, given value and output kernels."""
    embeddings["position_embeddings"]["embedding"] = jnp.asarray(np.sqrt(2) * stddev * _sinusoids(config), jnp.float32)
    embeddings["token_type_embeddings"]["embedding"] *= 0.0
    size = config.hidden_size
    sharpness = np.sqrt(2 * SHARPNESS / np.sqrt(size // config.num_attention_heads))

    def prime_attention(index: int, layer: Params, value: Array, output: Array) -> None:
        attention = layer["attention"]["self"]
        attention["query"]["kernel"] += jnp.asarray(sharpness * _shifts(config), jnp.float32)
        attention["key"]["kernel"] += jnp.asarray(sharpness * np.eye(size), jnp.float32)
        attention["value"]["kernel"], layer["attention"]["output"]["dense"]["kernel"] = value, output

    return prime_attention


def _prime_rotary(embeddings: Params, config: ModernBertConfig, stddev: float) -> Callable[..., None]:
    """As `_prime_table`, for rotary positions, with a first entry that all embeddings share (see the module)."""
    words, size = embeddings["tok_embeddings"], config.hidden_size
    words["embedding"] = words["embedding"].at[:, 0].set(SHARED * np.sqrt(size) * stddev)
    shared = SHARED * np.sqrt(size / (1 + SHARED**2))  # after the norm

    def prime_attention(index: int, layer: Params, value: Array, output: Array) -> None:
        is_global = index % config.global_attn_every_n_layers == 0
        theta = config.global_rope_theta if is_global else config.local_rope_theta
        head_size = size // config.num_attention_heads
        per_token_F = theta ** (-np.arange(0, head_size, 2) / head_size)  # radians, as modernbert.py rotates
        length_F = np.sqrt(ROTARY_SHARPNESS * np.sqrt(head_size) * per_token_F) / shared
        ahead = [(length_F * np.cos(by * per_token_F), length_F * np.sin(by * per_token_F)) for by in _offsets(config)]
        plain = [(length_F, 0 * length_F)] * config.num_attention_heads
        query_H, key_H = (jnp.asarray(np.concatenate(planes, axis=None), jnp.float32) for planes in (ahead, plain))
        kernel = layer["attn"]["Wqkv"]["kernel"].at[0, 0].add(query_H).at[0, 1].add(key_H)
        layer["attn"]["Wqkv"]["kernel"], layer["attn"]["Wo"]["kernel"] = kernel.at[:, 2].set(value), output

    return prime_attention


def _frequencies(config: RobertaConfig) -> np.ndarray:
    """Returns the angle per token of each pair of dimensions of a head: from pi down, almost to pi / longest row."""
    pairs = config.hidden_size // config.num_attention_heads // 2
    longest = config.max_position_embeddings - first_position(config)
    return np.pi * float(longest) ** (-np.arange(pairs) / pairs)


def _sinusoids(config: RobertaConfig) -> np.ndarray:
    """Returns [P, H]: each head's dimensions hold (sin, cos) pairs of all frequencies, and 0 in an odd last one."""
    heads, size = config.num_attention_heads, config.hidden_size
    angles = np.arange(config.max_position_embeddings)[:, None] * _frequencies(config)
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), -1)
    return np.tile(np.pad(pairs, ((0, 0), (0, size // heads - pairs.shape[1]))), heads)


def _shifts(config: RobertaConfig) -> np.ndarray:
    """Returns [H, H]: head h's block turns the sinusoid of a position into that of the position at h's offset."""
    from scipy.linalg import block_diag  # a fifth of a second of every start

    blocks, unpaired = [], [[[0.0]]] if config.hidden_size // config.num_attention_heads % 2 else []
    for offset in _offsets(config):
        rotations = [
            [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]] for angle in offset * _frequencies(config)
        ]
        blocks += rotations + unpaired
    return block_diag(*blocks)
