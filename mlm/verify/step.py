"""The training step in several dtypes and on several meshes, on the same rows and masks.

It is that of the run but for its size: at most a few layers and rows, so that the host's CPU can follow.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.verify.kernels import roundoff
from mlm.verify.session import Columns, Result, Session, Values, cpu, is_same, made_up_rows, one_device, put

LAYERS, LAYERS_QUICK = 4, 2  # at most; both hold local and global layers of ModernBERT
ROWS = 8  # at least, if the config has so many
METRICS = ("loss", "accuracy", "grad_norm")


def check(session: Session) -> Iterator[Result]:
    """The devices in the run's dtype, again, in float32, one of them alone, and the host's CPU in float32."""
    changes, dtype = small(session), session.config.model.dtype
    exact = changes | {"model.dtype": "float32", "model.attention": "xla"}
    batch = made_up_rows(session.task(changes))
    layers, rows = changes["model.layers"], changes["data.global_batch"]
    of = f"{layers} of {session.config.model.layers} layers, {rows} rows"
    state, here = _step(session.task(changes), batch)
    again, second = _step(session.task(changes), batch)
    repeats = bool(is_same(state, again)) and here == second
    measured = f"the same {len(jax.tree.leaves(state))} arrays" if repeats else "other numbers"
    if not repeats and jax.devices()[0].platform == "gpu":
        measured += "; XLA_FLAGS=--xla_gpu_deterministic_ops=true would give the same"
    yield Result(f"{dtype} twice, {of}", measured, "the same to the bit", repeats)
    del state, again
    # 12 roundings a layer and 10 around them add up as a random walk; a product of so many float32 terms is one, too.
    walk, sums = (12 * layers + 10) ** 0.5, session.config.model.intermediate_size**0.5 * 2.0**-24
    float32 = _step(session.task(exact), batch, "highest")[1]
    yield _compare(f"{dtype} and float32 here, {of}", here, float32, walk * (roundoff(dtype) + sums))
    if jax.device_count() > 1:
        alone = _step(session.task(changes, one_device(jax.local_devices()[0])), batch)[1]
        what = f"all {jax.device_count()} devices and one, {dtype}, {of}"
        yield _compare(what, here, alone, walk * (roundoff(dtype) + sums))
    if (host := cpu()) is None:
        yield Result("float32 here and on the host's CPU", "JAX_PLATFORMS leaves the CPU out: add ,cpu to it")
        return
    with jax.default_device(host):
        there = _step(session.task(exact, one_device(host)), batch, "highest")[1]
    yield _compare(f"float32 here and on the host's CPU, {of}", float32, there, walk * (2.0**-24 + sums))


def small(session: Session) -> Values:
    """Returns the changes of the config: few layers, and a few rows on each device."""
    model, mesh = session.config.model, sharding.mesh_of(session.config.mesh)
    layers = min(model.layers, LAYERS_QUICK if session.quick else LAYERS)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    changes = {"model.layers": layers, "model.remat_feed_forward": min(model.remat_feed_forward, layers)}
    return changes | {"data.global_batch": min(session.rows, shards * -(-ROWS // shards))}


def _step(task: Pretraining, batch: Columns, precision: str | None = None) -> tuple[Any, dict[str, float]]:
    """Returns the state and the metrics after the first step."""
    with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
        state, metrics = task.train_step(task.init(), put(batch, task))
    return state, {name: float(metrics[name]) for name in METRICS if name in metrics}


def _compare(what: str, metrics: dict[str, float], expected: dict[str, float], tolerance: float) -> Result:
    """Compares the gradient's norm relatively, the others as they are: a new model's logits differ by a nat."""
    errors = {name: abs(metrics[name] - expected[name]) for name in metrics}
    errors["grad_norm"] /= max(abs(expected["grad_norm"]), 1e-30)
    measured = ", ".join(f"{name} {metrics[name]:.6g} and {expected[name]:.6g}" for name in metrics)
    is_right = all(error <= tolerance for error in errors.values())  # false for NaN
    return Result(what, measured, f"at most {tolerance:.2g} apart", is_right, {"errors": errors, "limit": tolerance})
