"""Where every array lives: a mesh of data x fsdp x tensor, rules over the names of parameters, rows for every host.

A batch is split into S blocks of rows, S = data x fsdp; block s of the array lies on the T = tensor devices of the
mesh's row s. The mesh follows the torus, which interleaves the hosts. So the array does not hold the rows in the order
of the batch: the blocks of a host, wherever they lie, hold consecutive rows of it, which `logical_rows` numbers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.data.order import lanes_of
from mlm.errors import InputError

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))  # rows are split over both: an axis left out would hold copies

# The first rule whose pattern matches a parameter's whole name holds.
RULES: tuple[tuple[str, P], ...] = (
    (r"roberta/embeddings/word_embeddings/embedding", P(("tensor", "fsdp"), None)),
    (r"roberta/embeddings/(position|token_type)_embeddings/embedding", P()),
    (r".*/attention/self/(query|key|value)/kernel", P("fsdp", "tensor")),
    (r".*/attention/self/(query|key|value)/bias", P("tensor")),
    (r".*/attention/output/dense/kernel", P("tensor", "fsdp")),
    (r".*/intermediate/dense/kernel", P("fsdp", "tensor")),
    (r".*/intermediate/dense/bias", P("tensor")),
    (r".*/layer/\d+/output/dense/kernel", P("tensor", "fsdp")),
    (r"lm_head/dense/kernel", P("fsdp", None)),
    (r"lm_head/bias", P("tensor")),
    (r".*(output|lm_head)/dense/bias", P()),
    (r".*(LayerNorm|layer_norm)/(scale|bias)", P()),
)
# A classifier's: its head, which is small, in the place of the other. Over the gradient of one that is split, XLA's
# partitioner ends the process on a mesh of three axes (jax 0.10.2, CPU).
CLASSIFIER_RULES = (*(rule for rule in RULES if not rule[0].startswith("lm_head")), (r"classifier/.*", P()))


def make_mesh(*, data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of all devices of all hosts; an axis of -1 takes the devices that the others leave.

    Several slices of a TPU follow one another along the data axis, the only one that crosses the network between them.

    Args:
      data, fsdp, tensor: devices along each axis.
      devices: others than those that are there.

    Raises:
      InputError: the axes do not multiply to the number of devices, or the slices do not divide the data axis.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(data, fsdp, tensor, len(devices))
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        index = getattr(device, "slice_index", None) if device.platform == "tpu" else None
        slices.setdefault(index or 0, []).append(device)
    if shape[0] % len(slices):
        raise InputError(
            f"config.mesh.data = {shape[0]} can't be split over {len(slices)} slices; make it a multiple of them: no "
            "other axis crosses the network between slices."
        )
    own = (shape[0] // len(slices), *shape[1:])
    blocks = [_slice_order(own, slices[index]) for index in sorted(slices)]
    return Mesh(np.concatenate(blocks), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slice_order(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """Returns the devices of one slice as jax.make_mesh lays them on the torus.

    Where jax has no order for this shape, or where it splits a tensor group over hosts although a host has room for
    whole groups, they are sorted by host instead.
    """
    by_host = np.array(sorted(devices, key=lambda device: (device.process_index, device.id))).reshape(shape)
    if devices[0].platform != "tpu":
        return by_host
    try:
        mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    except NotImplementedError:
        return by_host
    processes_SxT = processes_of(mesh)
    on_a_host = processes_SxT.size // len(np.unique(processes_SxT))
    split = (processes_SxT != processes_SxT[:, :1]).any()
    return by_host if split and on_a_host % shape[2] == 0 else mesh.devices


def mesh_shape(data: int, fsdp: int, tensor: int, count: int) -> tuple[int, ...]:
    """Returns the axes of a mesh of `count` devices; raises InputError as `make_mesh`."""
    shape = [data, fsdp, tensor]
    if -1 in shape:
        others = -int(np.prod(shape))
        shape[shape.index(-1)] = count // others if count % others == 0 else 0
    if int(np.prod(shape)) != count:
        raise InputError(
            f"config.mesh = data {data} x fsdp {fsdp} x tensor {tensor} does not fit {count} devices: "
            "their product must be the number of devices."
        )
    return tuple(shape)


def tree_shardings(tree: Any, mesh: Mesh, params: Any) -> Any:
    """Returns a NamedSharding for each leaf of a state.

    A leaf whose path ends in the name of a parameter and that has its shape (the parameter itself, its moments, its
    average) lives where the rule of the parameter says; every other leaf is on every device.

    Args:
      tree: the state, as shapes or arrays.
      mesh: of AXES.
      params: the parameters within it, as shapes or arrays.
    """
    specs = param_specs(params, mesh)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params)}

    def sharding(path: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        for start in range(len(parts)):
            name = "/".join(parts[start:])
            if name in specs and shapes[name] == leaf.shape:
                return NamedSharding(mesh, specs[name])
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def param_specs(params: Any, mesh: Mesh) -> dict[str, P]:
    """Returns {"roberta/...": spec}; every parameter has a rule and every rule a parameter.

    Raises:
      InputError: a dimension that the mesh does not divide.
      ValueError: a parameter without a rule, or a rule without a parameter.
    """
    specs, used, rules = {}, set(), CLASSIFIER_RULES if "classifier" in params else RULES
    for name, leaf in named_leaves(params):
        rule = next((r for r in rules if re.fullmatch(r[0], name)), None)
        if rule is None:
            raise ValueError(f"no rule in mlm/training/sharding.py matches the parameter {name}")
        used.add(rule)
        specs[name] = rule[1]
        for size, axes in zip(leaf.shape, rule[1], strict=False):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            ways = math.prod(mesh.shape[axis] for axis in axes)
            if size % ways:
                raise InputError(f"config.mesh.{' x '.join(axes)} = {ways} does not divide the {size} of {name}.")
    unused = [rule[0] for rule in rules if rule not in used]
    if unused:
        raise ValueError(f"the rule {unused[0]} in mlm/training/sharding.py matches no parameter")
    return specs


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns [("roberta/embeddings/...", leaf), ...]."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def check_batch(mesh: Mesh, *, rows: int, key: str) -> None:
    """Raises InputError if `rows`, the value of the config key `key`, can't be split over the mesh."""
    check_rows(mesh.shape["data"] * mesh.shape["fsdp"], rows=rows, key=key)


def check_rows(num_shards: int, *, rows: int, key: str) -> None:
    """As `check_batch`, of a mesh that splits a batch into `num_shards`."""
    if rows % num_shards:
        raise InputError(
            f"config.{key}: {rows} rows can't be split over {num_shards} devices (mesh.data x mesh.fsdp); make it a "
            f"multiple of {num_shards}."
        )


@functools.lru_cache(maxsize=4)  # the devices of a pod are many, and asked for again and again
def processes_of(mesh: Mesh) -> np.ndarray:
    """Returns the process of each device, int64 [S, T]."""
    processes = [device.process_index for device in mesh.devices.flat]
    return np.array(processes, np.int64).reshape(-1, mesh.shape["tensor"])


def _block_order(processes_SxT: np.ndarray) -> np.ndarray:
    """Returns which block of the batch each block of the array holds: hosts in order, then as in the mesh."""
    order_S = np.empty(len(processes_SxT), np.int64)
    order_S[np.argsort(processes_SxT.min(1), kind="stable")] = np.arange(len(order_S))
    return order_S


def logical_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Returns the row of the batch that each row of a global array of `rows` rows holds, uint32 [rows]."""
    order_S = _block_order(processes_of(mesh))
    each = rows // len(order_S)
    return (order_S[:, None] * each + np.arange(each)).reshape(-1).astype(np.uint32)


def local_rows(mesh: Mesh, rows: int, process: int | None = None) -> tuple[int, int]:
    """Returns [start, stop): the rows of a batch of `rows` that a process feeds, this one unless another is named.

    Raises:
      InputError: its devices hold rows that do not follow on one another.
    """
    return _rows_of(processes_of(mesh), rows, jax.process_index() if process is None else process)


def _rows_of(processes_SxT: np.ndarray, rows: int, process: int) -> tuple[int, int]:
    """As `local_rows`, of the processes of a mesh."""
    own = _block_order(processes_SxT)[(processes_SxT == process).any(1)]
    if (np.diff(own) != 1).any():  # make_array_from_process_local_data fills a host's blocks in the order of the array
        raise InputError(
            f"config.mesh.tensor = {processes_SxT.shape[1]} gives host {process} rows that do not follow on one "
            "another; make it smaller, or a multiple of the devices of a host."
        )
    each = rows // len(processes_SxT)
    return int(own[0]) * each, (int(own[-1]) + 1) * each


def host_input(
    processes_SxT: np.ndarray, *, global_batch: int, accumulate: int, eval_batch: int, lanes: int
) -> dict[str, Any]:
    """Returns how every host of a mesh is fed, those included that are not there.

    Args:
      processes_SxT: of `processes_of`.
      global_batch, accumulate, eval_batch, lanes: data.global_batch, train.accumulate, evaluate.batch and data.lanes.

    Returns:
      "count" of hosts; "rows_per_host" and "lanes_per_host" of a global batch, below 1 where hosts share a lane, None
      where there is no such number; "fed", whether all are; "error", why not, where one is not.
    """
    hosts = np.unique(processes_SxT)
    found = {"count": len(hosts), "rows_per_host": None, "lanes_per_host": None, "fed": False}
    try:
        key = "data.global_batch / train.accumulate"
        check_rows(len(processes_SxT), rows=global_batch // accumulate, key=key)
        check_rows(len(processes_SxT), rows=eval_batch, key="evaluate.batch")
        spans = [_rows_of(processes_SxT, global_batch, host) for host in hosts]
        found["rows_per_host"] = rows = max(stop - start for start, stop in spans)
        for span in spans:
            lanes_of(span, global_batch=global_batch, lanes=lanes)
    except InputError as error:
        return found | {"error": str(error)}
    share = rows * lanes / global_batch
    return found | {"lanes_per_host": int(share) if share >= 1 else share, "fed": True}


def put_tree(tree: Any, shardings: Any) -> Any:
    """Returns global arrays from numpy's, the same on every host; `shardings` says where each lives."""

    def put(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(put, tree, shardings)


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, rows: int) -> dict[str, jax.Array]:
    """Returns global arrays of `rows` rows from this host's rows of the batch, in the order of `logical_rows`."""
    sharding = NamedSharding(mesh, BATCH)
    return {
        name: jax.make_array_from_process_local_data(sharding, value, (rows, *value.shape[1:]))
        for name, value in batch.items()
    }
