"""Peak FLOP/s of devices, for MFU. It imports nothing: plan and doctor read it before jax is there."""

from collections.abc import Sequence
from typing import Any

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


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak of one device in FLOP/s, None if it is unknown."""
    return PEAK_TFLOPS[device_kind] * 1e12 if device_kind in PEAK_TFLOPS else None


def mfu(useful_flops: float, devices: Sequence[Any]) -> float | None:
    """Returns the model FLOPs utilization of devices that do so many useful FLOP/s in all, None if it is unknown."""
    peak = peak_flops(devices[0].device_kind)
    return useful_flops / (peak * len(devices)) if peak else None
