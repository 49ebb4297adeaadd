"""Parameters under transformers' two sets of names: our tree (Flax's), and PyTorch's flat state dict. Needs no PyTorch.

Where PyTorch fuses several kernels into one of [parts x output, input], ours is [input, parts, output].
"""

from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mlm.model.module import Params

PARTS = {"Wqkv": 3, "Wi": 2}  # kernels that PyTorch fuses
TIED = ("lm_head.decoder.", "cls.predictions.decoder.", "decoder.weight")
NEXT_SENTENCE = "cls.seq_relationship."  # BERT's other head, which no masked language model reads
OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of norms, in early models
BUFFERS = (".position_ids", ".token_type_ids", ".inv_freq")


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Returns float32 arrays under PyTorch's names, kernels transposed, without the tied decoder."""
    tensors = {}
    for (*scope, leaf), value in flatten_dict(params).items():
        value = np.asarray(value, np.float32)
        name = ".".join([*scope, "bias" if leaf == "bias" else "weight"])
        if leaf == "kernel":
            value = value.reshape(len(value), -1).T
        tensors[name] = np.ascontiguousarray(value)
    return tensors


def from_torch(tensors: dict[str, np.ndarray]) -> Params:
    """Returns our tree, float32, from arrays under PyTorch's names, without the tied decoder and buffers."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in _with_one_bias(tensors).items():
        if name.startswith((*TIED, NEXT_SENTENCE)) or name.endswith(BUFFERS):
            continue
        *scope, leaf = name.split(".")
        leaf = OLD_NAMES.get(leaf, leaf)
        value = np.asarray(value, np.float32)
        if leaf == "weight":
            if scope[-1].lower().endswith("norm"):
                leaf = "scale"
            elif scope[-1].endswith("_embeddings"):
                leaf = "embedding"
            else:
                leaf = "kernel"
                value = value.T
            if scope[-1] in PARTS:
                value = value.reshape(len(value), PARTS[scope[-1]], -1)
        flat[(*scope, leaf)] = value
    return unflatten_dict(flat)


def _with_one_bias(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors with one bias of the decoder: of two, one may be left over from another vocabulary."""
    words = [name for name in tensors if name.endswith("word_embeddings.weight")]
    embedding = tensors[words[0]] if words else ()
    for head in ("lm_head", "cls.predictions"):
        for name in (f"{head}.bias", f"{head}.decoder.bias"):
            if name in tensors and len(tensors[name]) == len(embedding):
                return tensors | {f"{head}.bias": tensors[name]}
    return tensors
