"""Small models of every family, with parameters that hide no mistake, and rows for them."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

import mlm.model

PAD = 3  # RoBERTa's positions start behind it
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "initializer_range": 0.1,
}


def config_of(name: str, **settings):
    """Returns the config of a small model; two token types, or a window that is a quarter of the row."""
    of_family = {"type_vocab_size": 2}
    if "ModernBert" in name:
        of_family = {"num_hidden_layers": 4, "local_attention": 8, "global_rope_theta": 100.0}
    return class_of(name).config_class(**SIZES | of_family | settings)


def class_of(name: str, head: str = "MaskedLM"):
    """Returns our class of transformers, by the name that it has there, "Roberta" as well as "RobertaForMaskedLM"."""
    family, _, named_head = name.partition("For")
    return getattr(mlm.model, f"Flax{family}For{named_head or head}")


def make(name: str, **settings):
    """Returns a model with parameters as of `numbered`."""
    model = class_of(name)(config_of(name, **settings), _do_init=False)
    params = numbered(model.params_shape_tree)
    model._is_initialized = True  # as after init_weights, which compiles each draw
    model._missing_keys = set()
    model.params = params
    return model


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of four rows, one with padding."""
    ids = np.random.default_rng(0).integers(5, 100, (4, 32)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, 20:] = 0
    return np.where(mask > 0, ids, PAD), mask


def numbered(params):
    """Returns random parameters that depend on names and shapes alone; none is 0 or 1, scales of norms are about 1."""

    def draw(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        values = np.random.RandomState(zlib.crc32(name.encode())).randn(*leaf.shape)
        return jnp.asarray(0.2 * values + ("scale" in name), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, params)
