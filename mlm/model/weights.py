"""Parameters under transformers' two sets of names: Flax's tree, and PyTorch's flat state dict. Needs no PyTorch."""

from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mlm.model.roberta import Params


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Returns float32 arrays under PyTorch's names, kernels transposed, without the tied decoder."""
    tensors = {}
    for (*scope, leaf), value in flatten_dict(params).items():
        value = np.asarray(value, np.float32)
        name = ".".join([*scope, "bias" if leaf == "bias" else "weight"])
        tensors[name] = np.ascontiguousarray(value.T if leaf == "kernel" else value)
    return tensors


def from_torch(tensors: dict[str, np.ndarray]) -> Params:
    """Returns Flax's tree, float32, from arrays under PyTorch's names, without the tied decoder and buffers."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in tensors.items():
        if name.startswith("lm_head.decoder.") or name.endswith((".position_ids", ".token_type_ids")):
            continue
        *scope, leaf = name.split(".")
        value = np.asarray(value, np.float32)
        if leaf == "weight":
            norm, table = name.endswith(("LayerNorm.weight", "layer_norm.weight")), name.endswith("_embeddings.weight")
            leaf, value = ("scale", value) if norm else ("embedding", value) if table else ("kernel", value.T)
        flat[(*scope, leaf)] = value
    return unflatten_dict(flat)


def resize_vocabulary(params: Params, size: int) -> Params:
    """Returns the parameters with `size` rows in the word embedding and the decoder's bias: cut off, or zeros added."""
    flat = flatten_dict(params)
    for path in {("roberta", "embeddings", "word_embeddings", "embedding"), ("lm_head", "bias")} & flat.keys():
        value = np.asarray(flat[path])[:size]
        flat[path] = np.pad(value, [(0, size - len(value))] + [(0, 0)] * (value.ndim - 1))
    return unflatten_dict(flat)
