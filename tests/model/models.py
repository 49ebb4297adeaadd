"""Small models of every family, with parameters that hide no mistake, and rows for them."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 40, "pad_token_id": 1, "initializer_range": 0.1}


def sizes_of(name: str) -> dict:
    """Returns sizes of a small model; two token types, or a window that is a quarter of the row."""
    if "ModernBert" in name:
        return SIZES | {"num_hidden_layers": 4, "local_attention": 8, "global_rope_theta": 100.0}
    return SIZES | {"type_vocab_size": 2}


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of four rows, one with padding."""
    ids = np.random.default_rng(0).integers(5, 100, (4, 32)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, 20:] = 0
    return np.where(mask > 0, ids, 1), mask


def numbered(params):
    """Returns random parameters that depend on names and shapes alone; none is 0 or 1, scales of norms are about 1."""

    def draw(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        values = np.random.RandomState(zlib.crc32(name.encode())).randn(*leaf.shape)
        return jnp.asarray(0.2 * values + ("scale" in name), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, params)
