"""Useful FLOPs of a model, from the shapes of its parameters, and of them MFU, from the peaks of devices.

plan reads the peaks before jax is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlm.model.module import Model, Params

LAYER = re.compile(r"/(\d+)/")
# of the last layer; the rest is its tail
READS_ALL_TOKENS = re.compile(r"/(query|key|value|Wqkv)/")
WORD_EMBEDDING = re.compile(r".*/(word|tok)_embeddings/embedding")
# Dense bfloat16 TFLOP/s of one device as jax counts devices, by device_kind (vendors' figures).
PEAK_TFLOPS = {
    "TPU v2": 23.0,  # a device is one of the chip's two TensorCores
    "TPU v3": 61.5,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU7x": 1153.5,  # a device is one of the chip's two TensorCores
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
}


def mean_keys(length: float, window: int) -> float:
    """Returns how many tokens of a row one attends to on average, `window` on each side, or all if that is 0."""
    return 2 * window + 1 - window * (window + 1) / length if 0 < window < length else length


def per_token(
    model: Model, params: Params, *, length: float, predicted_share: float, vocab_size: int
) -> float:
    """Returns the useful FLOPs of a training step (forward and backward) per token read, in rows of `length` tokens.

    Only matrix products count, a multiply-add as two, the backward pass as twice the forward pass, remat not at all
    (Chowdhery et al., 2022, appendix B); what follows the last layer's attention, on the share of the tokens that is
    predicted. The decoder of a language model is its word embedding.
    """
    from flax.traverse_util import flatten_dict

    from mlm.model.module import MASKED_LM

    shapes = {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}
    last = model.config.num_hidden_layers - 1
    body = tail = 0.0
    for name, shape in shapes.items():
        layer = LAYER.search(name)
        if model.head_name == MASKED_LM and WORD_EMBEDDING.fullmatch(name):
            tail += shape[-1] * vocab_size
        elif not name.endswith("kernel"):
            continue
        elif layer and (int(layer[1]) < last or READS_ALL_TOKENS.search(name)):
            body += math.prod(shape)
        else:
            tail += math.prod(shape)
    hidden = model.config.hidden_size
    attention = sum(2 * hidden * mean_keys(length, window) for window in model.windows())
    return 6.0 * (body + attention + predicted_share * tail)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak of one device in FLOP/s, None if it is unknown."""
    return PEAK_TFLOPS[device_kind] * 1e12 if device_kind in PEAK_TFLOPS else None


def mfu(useful_flops: float, devices: Sequence[Any]) -> float | None:
    """Returns the model FLOPs utilization of devices that do so many useful FLOP/s in all, None if it is unknown."""
    peak = peak_flops(devices[0].device_kind)
    return useful_flops / (peak * len(devices)) if peak else None
