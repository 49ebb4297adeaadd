"""The training step in several dtypes and on several meshes, on the same rows and masks.

It is that of the run but for its size: at most a few layers and rows, so that the host's CPU can follow.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.verify.session import (
    Result,
    Session,
    compared,
    cpu,
    host_rows,
    made_up_rows,
    one_device,
    roundoff,
)

LAYERS, LAYERS_QUICK = 4, 2  # at most; both hold local and global layers of ModernBERT
ROWS = 8  # at least
METRICS = ("loss", "accuracy", "grad_norm")


def check(session: Session) -> Iterator[Result]:
    """The devices in the run's dtype, in float32, one of them, and again, and the host's CPU in float32."""
    changes = small(session)
    task, dtype, device = session.task(changes), session.config.model.dtype, jax.local_devices()[0]
    batch, exact = made_up_rows(task), {"model.dtype": "float32", "model.attention": "xla"}
    of = f"{changes['model.layers']} of {session.config.model.layers} layers, {changes['data.global_batch']} rows"
    state, here = _step(task, batch)
    again, second = _step(task, batch)
    differs = _differs(state, again) or here != second
    hint = "; XLA_FLAGS=--xla_gpu_deterministic_ops=true makes it so" if device.platform == "gpu" else ""
    measured = f"not the same numbers{hint}" if differs else f"the same {len(jax.tree.leaves(state))} arrays"
    yield compared(f"{dtype} a second time, {of}", measured, "the same to the bit", not differs)
    del state, again

    float32 = _step(session.task(changes | exact), batch, "highest")[1]
    yield _compare(
        f"{dtype} and float32 here, {of}", here, float32, _tolerance(session, changes, roundoff(dtype, device))
    )
    if jax.device_count() > 1:
        alone = _step(session.task(changes, one_device(device)), batch)[1]
        what = f"all {jax.device_count()} devices and one, {dtype}, {of}"
        yield _compare(what, here, alone, _tolerance(session, changes, roundoff(dtype, device)))
    if (host := cpu()) is None:
        yield Result("float32 here and on the host's CPU", "JAX_PLATFORMS leaves the CPU out: add ,cpu to it")
        return
    with jax.default_device(host):
        there = _step(session.task(changes | exact, one_device(host)), batch, "highest")[1]
    tolerance = _tolerance(session, changes, float(jnp.finfo(jnp.float32).eps) / 2)
    yield _compare(f"float32 here and on the host's CPU, {of}", float32, there, tolerance)


def small(session: Session) -> dict[str, Any]:
    """Returns the changes of the config: few layers, and a few rows on each device."""
    model, mesh = session.config.model, sharding.mesh_of(session.config.mesh)
    layers, shards = (
        min(model.layers, LAYERS_QUICK if session.quick else LAYERS),
        mesh.shape["data"] * mesh.shape["fsdp"],
    )
    rows = min(session.rows, shards * -(-ROWS // shards))
    feed_forward = min(model.remat_feed_forward, layers)
    return {"model.layers": layers, "model.remat_feed_forward": feed_forward, "data.global_batch": rows}


def _step(
    task: Pretraining, batch: dict[str, np.ndarray], precision: str | None = None
) -> tuple[Any, dict[str, float]]:
    """Returns the state and the metrics after the first step."""
    put = sharding.put_batch(host_rows(batch, task.mesh), task.mesh, len(batch["record_id"]))
    with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
        state, metrics = task.train_step(task.init(), put)
    return state, {name: float(metrics[name]) for name in METRICS if name in metrics}


def _differs(one: Any, other: Any) -> bool:
    """Returns whether any array of two states differs in any bit."""

    @jax.jit
    def is_same(one: Any, other: Any) -> jax.Array:
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return jnp.stack([jnp.array_equal(a, b, equal_nan=True) for a, b in pairs]).all()

    return not bool(is_same(one, other))


def _tolerance(session: Session, changes: dict[str, Any], rounding: float) -> float:
    """Returns how far two metrics may lie apart.

    The errors of the roundings on the way, 12 a layer and 10 around them, add up as a random walk; each is one rounding
    of the dtype, and those within a product of so many float32 terms.
    """
    terms = session.config.model.intermediate_size
    return (12 * changes["model.layers"] + 10) ** 0.5 * (rounding + terms**0.5 * 2.0**-24)


def _compare(what: str, metrics: dict[str, float], expected: dict[str, float], tolerance: float) -> Result:
    """Compares the gradient's norm relatively, the others as they are: a new model's logits differ by a nat."""
    errors = {name: abs(metrics[name] - expected[name]) for name in metrics}
    errors["grad_norm"] /= max(abs(expected["grad_norm"]), 1e-30)
    values = {"tolerance": tolerance, "errors": errors}
    measured = ", ".join(f"{name} {metrics[name]:.6g} and {expected[name]:.6g}" for name in metrics)
    is_right = all(error <= tolerance for error in errors.values())  # false for NaN
    return compared(what, measured, f"at most {tolerance:.2g} apart", is_right, values)
