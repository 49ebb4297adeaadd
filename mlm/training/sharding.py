"""Where every array lives: a mesh of data x fsdp x tensor, partition rules for parameters, rows for every host.

A batch is split into S blocks of rows, S = data x fsdp; block s of the array lies on the T = tensor devices of row s of
the mesh. The mesh follows the torus, where hosts interleave, so blocks are not in the order of the batch: they are
numbered so that the rows of each host are consecutive (`logical_rows`).
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mlm.data.order import lanes_of
from mlm.errors import InputError
from mlm.model.partition_rules import PartitionRules

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))  # both: a batch is replicated over an axis that is left out


def make_mesh(
    *, data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns the mesh over all devices of all hosts; an axis of -1 takes the devices that the others leave."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(data, fsdp, tensor, len(devices))
    is_tpu = devices[0].platform == "tpu"
    grid = _on_slices(shape, devices) if is_tpu else _by_host(shape, devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _by_host(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    by_host = sorted(devices, key=lambda device: (device.process_index, device.id))
    return np.array(by_host).reshape(shape)


def _on_slices(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices of TPU slices, which follow one another along the data axis.

    It is the only axis that crosses the network between them.
    """
    slices: defaultdict[int, list[jax.Device]] = defaultdict(list)
    for device in devices:
        slices[getattr(device, "slice_index", 0)].append(device)
    if shape[0] % len(slices):
        raise InputError(
            f"config.mesh: {len(slices)} slices can't share a data axis of {shape[0]}, the only one that crosses the "
            "network between them; set mesh.fsdp and mesh.tensor lower."
        )
    slice_shape = (shape[0] // len(slices), *shape[1:])
    return np.concatenate([_on_torus(slice_shape, slices[index]) for index in sorted(slices)])


def mesh_of(mesh: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of the config's group `mesh`: the batch is split over the devices that it leaves."""
    return make_mesh(data=-1, fsdp=mesh.fsdp, tensor=mesh.tensor, devices=devices)


def _on_torus(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """Returns the devices of one slice as jax.make_mesh lays them.

    They are sorted by host where jax has no layout, or one that splits tensor groups although a host has room for them.
    """
    by_host = _by_host(shape, devices)
    try:
        mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    except NotImplementedError:
        return by_host
    processes_SxT = processes_of(mesh)
    devices_per_host = processes_SxT.size // len(np.unique(processes_SxT))
    split = (processes_SxT != processes_SxT[:, :1]).any()
    return by_host if split and devices_per_host % shape[2] == 0 else mesh.devices


def mesh_shape(data: int, fsdp: int, tensor: int, count: int) -> tuple[int, ...]:
    """Returns the axes of a mesh of `count` devices; raises InputError if they do not multiply to it."""
    shape = [data, fsdp, tensor]
    if -1 in shape:
        others = -math.prod(shape)
        shape[shape.index(-1)] = count // others if count % others == 0 else 0
    if math.prod(shape) != count:
        axes = f"data {data} x fsdp {fsdp} x tensor {tensor}"
        raise InputError(
            f"config.mesh = {axes} does not fit {count} devices: their product must be that number."
        )
    return tuple(shape)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns [("roberta/embeddings/...", leaf), ...]."""
    leaves = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def param_specs(params: Any, mesh: Mesh, rules: PartitionRules) -> dict[str, P]:
    """Returns {"roberta/...": spec}; InputError unless every parameter has a rule, and every rule a parameter."""
    split = next((axis for axis in ("fsdp", "tensor") if mesh.shape[axis] > 1), "")
    if split and not any(any(spec) for _, spec in rules):
        raise InputError(
            f"config.mesh.{split} = {mesh.shape[split]}: the model has no partition rules, so its parameters can't be "
            "split; set mesh.fsdp and mesh.tensor to 1."
        )
    specs = {}
    used = set()
    for name, leaf in named_leaves(params):
        rule = next((rule for rule in rules if re.fullmatch(rule[0], name)), None)
        if rule is None:
            raise InputError(
                f"the model's partition_rules() have no rule for the parameter {name}; add one."
            )
        used.add(rule)
        specs[name] = rule[1]
        for size, axes in zip(leaf.shape, rule[1], strict=False):
            names = (axes,) if isinstance(axes, str) else axes or ()
            num_shards = math.prod(mesh.shape[axis] for axis in names)
            if size % num_shards:
                raise InputError(
                    f"config.mesh.{' x '.join(names)} = {num_shards} does not divide the {size} of {name}."
                )
    if unused := [name for name, spec in rules if (name, spec) not in used]:
        raise InputError(
            f"the model's partition_rules() name {unused[0]}, which no parameter matches; remove the rule."
        )
    return specs


def tree_shardings(tree: Any, mesh: Mesh, params: Any, rules: PartitionRules) -> Any:
    """Returns a NamedSharding for each leaf of a state, given its shapes and those of its parameters.

    A leaf with the name and shape of a parameter (its moments, say) is sharded like it; every other is replicated.
    """
    specs = param_specs(params, mesh, rules)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params)}

    def sharding(path: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        suffixes = ("/".join(parts[start:]) for start in range(len(parts)))
        return NamedSharding(
            mesh, next((specs[name] for name in suffixes if shapes.get(name) == leaf.shape), P())
        )

    return jax.tree_util.tree_map_with_path(sharding, tree)


@functools.lru_cache(maxsize=8)  # every step asks, and a pod has thousands of devices
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


def check_batch(mesh: Mesh | np.ndarray, *, rows: int, key: str) -> None:
    """Raises InputError if `rows`, of the config key `key`, can't be split over the mesh, or its processes [S, T]."""
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"] if isinstance(mesh, Mesh) else len(mesh)
    if rows % num_shards:
        over = f"{num_shards} devices (data x fsdp)"
        raise InputError(
            f"config.{key}: {rows} rows can't be split over {over}; make it a multiple of {num_shards}."
        )


def check_batches(mesh: Mesh | np.ndarray, config: ConfigDict) -> None:
    """`check_batch` of every size of a run's batches."""
    sizes = [("data.batch_stages", rows) for rows, _ in config.data.batch_stages]
    for key, rows in (*sizes, ("data.global_batch", config.data.global_batch)):
        check_batch(mesh, rows=rows // config.train.accumulate, key=f"{key} / train.accumulate")


def local_rows(mesh: Mesh | np.ndarray, rows: int, process: int | None = None) -> tuple[int, int]:
    """Returns [start, stop): the rows that a process feeds, this one by default; `mesh` is as in `check_batch`."""
    process = jax.process_index() if process is None else process
    processes_SxT = processes_of(mesh) if isinstance(mesh, Mesh) else mesh
    blocks = block_order(processes_SxT)[(processes_SxT == process).any(1)]
    # make_array_from_process_local_data fills a host's blocks in the order of the array
    if (np.diff(blocks) != 1).any():
        raise InputError(
            f"config.mesh.tensor = {processes_SxT.shape[1]} gives host {process} rows that are not consecutive; make "
            "it smaller, or a multiple of the devices of a host."
        )
    block = rows // len(processes_SxT)
    return int(blocks[0]) * block, (int(blocks[-1]) + 1) * block


def host_input(processes_SxT: np.ndarray, config: ConfigDict) -> dict[str, Any]:
    """Returns how a config feeds every host of a mesh, which need not exist.

    "count" of hosts; "rows_per_host" and "lanes_per_host" of a global batch (below 1 where hosts share a lane; None if
    undefined); "fed": whether every host is; "error": why not.
    """
    hosts = np.unique(processes_SxT)
    rows = config.data.global_batch
    lanes = config.data.lanes
    feeding = {"count": len(hosts), "rows_per_host": None, "lanes_per_host": None, "fed": False}
    try:
        check_batches(processes_SxT, config)
        check_batch(processes_SxT, rows=config.evaluate.batch, key="evaluate.batch")
        spans = [local_rows(processes_SxT, rows, host) for host in hosts]
        feeding["rows_per_host"] = max(stop - start for start, stop in spans)
        for span in spans:
            lanes_of(span, global_batch=rows, lanes=lanes)
    except InputError as error:
        return feeding | {"error": str(error)}
    return feeding | {"lanes_per_host": feeding["rows_per_host"] * lanes / rows, "fed": True}


def put_tree(tree: Any, shardings: Any) -> Any:
    """Returns global arrays from numpy arrays that are the same on every host."""
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__), tree, shardings
    )


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, rows: int) -> dict[str, jax.Array]:
    """Returns global arrays of `rows` rows from this host's rows of the batch, in the order of `logical_rows`.

    A further column, "row", is the number of each row in the batch, uint32.
    """
    sharding = NamedSharding(mesh, BATCH)
    first, _ = local_rows(mesh, rows)
    count = len(next(iter(batch.values())))
    batch = {"row": np.arange(first, first + count, dtype=np.uint32)} | batch
    return {
        name: jax.make_array_from_process_local_data(sharding, value, (rows, *value.shape[1:]))
        for name, value in batch.items()
    }


def shardings_of(tree: Any) -> Any:
    """Returns the shardings of a tree of arrays or abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
