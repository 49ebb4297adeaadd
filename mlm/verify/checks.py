"""The checks of `verify`, in their order."""

from mlm.verify import kernels, speed, step
from mlm.verify.session import Check

CHECKS: dict[str, Check] = {
    "kernels": kernels.check,
    "step": step.check,
    "speed": speed.check,
}
