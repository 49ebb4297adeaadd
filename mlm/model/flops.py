"""Useful FLOPs of a model, for MFU, from the shapes of its parameters."""

import math
import re
from collections.abc import Mapping, Sequence

from flax.traverse_util import flatten_dict

from mlm.model.module import MASKED_LM, Model, Params

LAYER = re.compile(r"/(\d+)/")
# of the last layer; the rest is its tail
READS_ALL_TOKENS = re.compile(r"/(query|key|value|Wqkv)/")
WORD_EMBEDDING = re.compile(r".*/(word|tok)_embeddings/embedding")


def mean_keys(length: float, window: int) -> float:
    """Returns how many tokens of a row one attends to on average, `window` on each side, or all if that is 0."""
    return 2 * window + 1 - window * (window + 1) / length if 0 < window < length else length


def per_token(
    model: Model, params: Params, *, length: float, predicted_share: float, vocab_size: int
) -> float:
    """Returns `train_flops_per_token` of a model on rows of `length` tokens."""
    return train_flops_per_token(
        {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()},
        hidden=model.config.hidden_size,
        keys=[mean_keys(length, window) for window in model.windows()],
        predicted_share=predicted_share,
        vocab_size=vocab_size if model.head_name == MASKED_LM else 0,
    )


def train_flops_per_token(
    shapes: Mapping[str, Sequence[int]],
    *,
    hidden: int,
    keys: Sequence[float],
    predicted_share: float,
    vocab_size: int = 0,
) -> float:
    """Returns the useful FLOPs of a training step (forward and backward) per token read.

    Only matrix products count, a multiply-add as two, the backward pass as twice the forward pass, remat not at all
    (Chowdhery et al., 2022, appendix B); what follows the last layer's attention, on the predicted tokens alone.

    Args:
      shapes: of the parameters, by name; each kernel is a product with every token.
      keys: for each layer, the mean number of tokens that one attends to.
      predicted_share: of the tokens that are read.
      vocab_size: of a language model, whose decoder is the word embedding; 0 for a classifier.
    """
    kernels = {name: math.prod(shape) for name, shape in shapes.items() if name.endswith("kernel")}
    layer_of = {name: int(match[1]) for name in kernels if (match := LAYER.search(name))}
    last = max(layer_of.values(), default=0)
    body = tail = 0.0
    for name, size in kernels.items():
        if name in layer_of and (layer_of[name] < last or READS_ALL_TOKENS.search(name)):
            body += size
        else:
            tail += size
    if vocab_size:
        width = next(shape[-1] for name, shape in shapes.items() if WORD_EMBEDDING.fullmatch(name))
        tail += width * vocab_size
    attention = sum(2 * hidden * attended for attended in keys)
    return 6.0 * (body + attention + predicted_share * tail)
