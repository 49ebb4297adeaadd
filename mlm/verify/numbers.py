"""What a step reads and computes, on every host: rows, masks, dropout's bits, logits and gradients.

It is the run's step but for its size, so that the host's CPU can follow.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlm.bench.steps import put
from mlm.cluster import distributed
from mlm.model import layers
from mlm.model.keys import make_key
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.training.train import make_gradient
from mlm.verify.compare import Result, compare, roundoff
from mlm.verify.session import Session, made_up_rows, one_device


def check_rows(session: Session) -> Iterator[Result]:
    """Rows, masks and dropout's bits are those of the host's CPU."""
    task = session.task(session.small())
    there = on_host(_read, session, session.small())
    rows_B = sharding.logical_rows(task.mesh, task.config.data.global_batch)
    for what, arrays in _read(task).items():
        yield compare(what, arrays, jax.tree.map(lambda column: column[rows_B], there[what]))


def _read(task: Pretraining) -> dict[str, Any]:
    """Returns the batch on the devices of a task, the masked batch, and bits of dropout for its rows."""
    batch = made_up_rows(task)
    rows = put(task, batch)
    shape = (len(batch["record_id"]), task.info.length, 8)
    bits = jax.jit(lambda rows_B: layers.random_bits(jnp.uint32(7), shape, rows_B))
    return {
        "rows of a batch": rows,
        "masks": jax.jit(lambda rows: task.inputs(rows, jnp.int32(0)))(rows),
        "dropout's bits": bits(rows["record_id"]),
    }


def check_step(session: Session) -> Iterator[Result]:
    """Logits and gradients in float32 are those of the host's CPU, and in the run's dtype those in float32."""
    changes = session.small()
    exact = changes | {"model.dtype": "float32", "model.attention": "xla"}
    dtype = session.config.model.dtype
    task = session.task(changes)
    rows_B = sharding.logical_rows(task.mesh, task.config.data.global_batch)
    with jax.default_matmul_precision("highest"):
        there = on_host(_compute, session, exact)
        float32 = _compute(session.task(exact))
    # A value passes 12 roundings a layer and 10 around them, which add up as a random walk; a
    # product of so many float32 terms is one, too.
    model = task.config.model
    roundings = (12 * model.layers + 10) ** 0.5
    sums = model.intermediate_size**0.5 * 2.0**-24
    of = f"{model.layers} of {session.config.model.layers} layers"
    of += ", without dropout" if "model.hidden_dropout" in changes else ""
    expected = there | {"logits": there["logits"][rows_B]}
    checked = [("float32", float32, 2.0**-24)]
    if dtype != "float32":
        checked.append((dtype, _compute(task), roundoff(dtype, jax.local_devices()[0])))
    for name, computed, rounding in checked:
        for what, arrays in computed.items():
            limit = roundings * (rounding + sums)
            yield compare(f"{what} in {name}, {of}", arrays, expected[what], limit)


def _compute(task: Pretraining) -> dict[str, Any]:
    """Returns the logits of a batch, and the gradient."""
    params = task.init().params
    batch = put(task, made_up_rows(task))

    @jax.jit
    def logits(params: Any, batch: Any) -> jax.Array:
        inputs = task.inputs(batch, jnp.int32(0))
        return task.forward(params, inputs, batch["row"], make_key(0))[0]

    @jax.jit
    def gradients(params: Any, batch: Any) -> Any:
        return make_gradient(task)(params, batch, jnp.int32(0))[0]

    for function in (logits, gradients):
        distributed.compile_together(function, params, batch)
    return {"logits": logits(params, batch), "gradients": gradients(params, batch)}


def on_host(compute: Any, session: Session, changes: dict[str, Any]) -> Any:
    """Returns what `compute` makes of the task on the host's CPU alone, as numpy arrays."""
    host = jax.local_devices(backend="cpu")[0]
    with jax.default_device(host):
        return jax.tree.map(np.asarray, compute(session.task(changes, one_device(host))))
