"""Data parallelism: which rows of a batch every device holds, and the sum of their gradients.

A batch is split into S blocks of rows, S = data x fsdp; block s of the array lies on the T = tensor devices of row s of
the mesh. The mesh follows the torus, where hosts interleave, so blocks are not in the order of the batch: they are
numbered so that the rows of each host are consecutive (`logical_rows`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mlm.model.module import Params

# (parameters, inputs [B, ...], rows_B, key) -> (gradient summed over the rows, sums)
GradientSum = Callable[[Params, Any, jax.Array, jax.Array], tuple[Params, Any]]


@functools.lru_cache(maxsize=4)  # a pod has thousands of devices
def processes_of(mesh: Mesh) -> np.ndarray:
    """Returns the process of each device, int64 [S, T]."""
    processes = [device.process_index for device in mesh.devices.flat]
    return np.array(processes, np.int64).reshape(-1, mesh.shape["tensor"])


def block_order(processes_SxT: np.ndarray) -> np.ndarray:
    """Returns which block of the batch each block of the array holds: sorted by host, then as in the mesh."""
    order_S = np.empty(len(processes_SxT), np.int64)
    order_S[np.argsort(processes_SxT.min(1), kind="stable")] = np.arange(len(order_S))
    return order_S


def logical_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Returns the row of the batch that each row of a global array holds, uint32 [rows]."""
    order_S = block_order(processes_of(mesh))
    block = rows // len(order_S)
    return (order_S[:, None] * block + np.arange(block)).reshape(-1).astype(np.uint32)


def row_numbers(mesh: Mesh, rows: int) -> jax.Array:
    """Returns `logical_rows` inside a jitted function: an arange where the devices lie in the order of the batch."""
    rows_B = logical_rows(mesh, rows)
    in_order = (np.diff(rows_B) == 1).all()
    return jnp.arange(rows, dtype=jnp.uint32) if in_order else jnp.asarray(rows_B)


def microbatches(x_Bx: jax.Array, count: int) -> jax.Array:
    """Returns [A, B / A, ...]: microbatch a of A holds rows a, a + A, ..., which keeps every row on its device."""
    return jnp.moveaxis(x_Bx.reshape(-1, count, *x_Bx.shape[1:]), 1, 0)


def sum_over_data(gradient_sum: GradientSum, mesh: Mesh, *, matrix_dtype: str) -> GradientSum:
    """Returns `gradient_sum` over all devices: each takes its slice of the data axis, and one all-reduce adds them up.

    The compiler partitions the other axes. Gradients of matrices are sent in `matrix_dtype`, but on CPU, where XLA
    crashes on less than float32 (jax 0.10.2), all in float32.
    """
    if mesh.shape["data"] == 1:
        return gradient_sum
    dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else matrix_dtype

    def psum_grads(*inputs: Any) -> tuple[Params, Any]:
        local_grads, sums = gradient_sum(*inputs)
        cast = jax.tree.map(lambda g: g.astype(dtype) if g.ndim > 1 else g, local_grads)
        cast, sums = jax.lax.psum((cast, sums), "data")
        return jax.tree.map(lambda g, like: g.astype(like.dtype), cast, local_grads), sums

    # An axis left to the compiler, even one of size 1, costs fusions on a TPU: each norm is written to memory.
    manual_axes = {axis for axis, size in mesh.shape.items() if axis == "data" or size == 1}
    specs = (P(), P("data"), P("data"), P())
    return jax.shard_map(psum_grads, mesh=mesh, in_specs=specs, out_specs=P(), axis_names=manual_axes, check_vma=False)
