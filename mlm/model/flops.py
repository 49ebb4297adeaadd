"""Useful FLOPs of the model and peak FLOP/s of devices, for MFU."""

from collections.abc import Sequence

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


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak of one device in FLOP/s, None if it is unknown."""
    return PEAK_TFLOPS[device_kind] * 1e12 if device_kind in PEAK_TFLOPS else None
