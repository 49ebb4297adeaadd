"""Useful FLOPs of the model and peak FLOP/s of devices, for MFU."""

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


def train_flops_per_token(
    *, hidden: int, layers: int, intermediate: int, length: int, vocab_size: int, predicted_share: float
) -> float:
    """Returns the useful FLOPs of a training step (forward and backward) per token read.

    Only matrix products count, a multiply-add as two, the backward pass as twice the forward pass, remat not at all
    (Chowdhery et al., 2022, appendix B); the tail, which follows the last layer's attention, on predicted positions.
    """
    layer = 2 * (4 * hidden * hidden + 2 * hidden * intermediate) + 4 * length * hidden
    behind_attention = 2 * (hidden * hidden + 2 * hidden * intermediate) if layers else 0
    tail = behind_attention + 2 * hidden * hidden + 2 * hidden * vocab_size
    return 3.0 * (layers * layer - behind_attention + predicted_share * tail)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak of one device in FLOP/s, None if it is unknown."""
    return PEAK_TFLOPS[device_kind] * 1e12 if device_kind in PEAK_TFLOPS else None
