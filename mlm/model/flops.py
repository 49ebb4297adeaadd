"""Useful FLOPs of the model, for MFU."""

from collections.abc import Sequence


def mean_keys(length: int, window: int) -> float:
    """Returns how many tokens one attends to on average, given the row and how far it sees to each side."""
    return 2 * window + 1 - window * (window + 1) / length if window < length else length


def train_flops_per_token(
    *, hidden: int, keys: Sequence[float], intermediate: int, gated: bool, vocab_size: int, predicted_share: float
) -> float:
    """Returns the useful FLOPs of a training step (forward and backward) per token read.

    `keys` has the mean number of tokens that one attends to in each layer. Only matrix products count, a multiply-add
    as two, the backward pass as twice the forward pass, remat not at all (Chowdhery et al., 2022, appendix B); the
    tail, which follows the last layer's attention, on predicted positions.
    """
    feed_forward = (3 if gated else 2) * hidden * intermediate
    layers = sum(2 * (4 * hidden * hidden + feed_forward) + 4 * each * hidden for each in keys)
    behind_attention = 2 * (hidden * hidden + feed_forward) if keys else 0
    tail = behind_attention + 2 * hidden * hidden + 2 * hidden * vocab_size
    return 3.0 * (layers - behind_attention + predicted_share * tail)
