"""Parameters under transformers' two sets of names: Flax's tree, and PyTorch's flat state dict. Needs no PyTorch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mlm.model.roberta import Params

_EMBEDDING = re.compile(r"(word|position|token_type)_embeddings\.weight$")
_NORM = re.compile(r"(LayerNorm|layer_norm)\.weight$")


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Returns float32 arrays under PyTorch's names: kernels transposed, as `torch.nn.Linear` keeps them.

    The tied decoder is left out, as transformers leaves it out.
    """
    tensors = {}
    for path, value in flatten_dict(params).items():
        *scope, leaf = path
        value = np.asarray(value, np.float32)
        if leaf == "kernel":
            value = value.T
        name = "bias" if leaf == "bias" else "weight"
        tensors[".".join([*scope, name])] = np.ascontiguousarray(value)
    return tensors


def from_torch(tensors: dict[str, np.ndarray]) -> Params:
    """Returns Flax's tree, float32, from arrays under PyTorch's names; the tied decoder and buffers are left out."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in tensors.items():
        if name.startswith("lm_head.decoder.") or name.endswith((".position_ids", ".token_type_ids")):
            continue
        *scope, leaf = name.split(".")
        value = np.asarray(value, np.float32)
        if leaf == "weight":
            if _EMBEDDING.search(name):
                leaf = "embedding"
            elif _NORM.search(name):
                leaf = "scale"
            else:
                leaf, value = "kernel", value.T
        flat[(*scope, leaf)] = value
    return unflatten_dict(flat)


def resize_vocabulary(params: Params, size: int) -> Params:
    """Returns the parameters with `size` rows in the word embedding and, if there is one, the decoder's bias.

    Rows from `size` up are cut off; missing ones are zero, and belong to entries that the loss never predicts.
    """
    flat = flatten_dict(params)
    for path in {("roberta", "embeddings", "word_embeddings", "embedding"), ("lm_head", "bias")} & flat.keys():
        value = np.asarray(flat[path])
        rows = min(size, value.shape[0])
        flat[path] = np.concatenate([value[:rows], np.zeros((size - rows, *value.shape[1:]), value.dtype)])
    return unflatten_dict(flat)
