"""Where every array lives: a mesh of data x fsdp x tensor, partition rules for parameters, rows for every host.

A batch is split into S blocks of rows, S = data x fsdp; block s of the array lies on the T = tensor devices of row s of
the mesh. The mesh follows the torus, where hosts interleave, so blocks are not in the order of the batch: they are
numbered so that the rows of each host are consecutive (`logical_rows`).
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.data.order import lanes_of
from mlm.errors import InputError

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))  # both: a batch is replicated over an axis that is left out

# The first rule whose pattern matches the full name of a parameter applies.
Rules = tuple[tuple[str, P], ...]
ROBERTA: Rules = (
    (r"\w+/embeddings/word_embeddings/embedding", P(("tensor", "fsdp"), None)),
    (r"\w+/embeddings/(position|token_type)_embeddings/embedding", P()),
    (r".*/attention/self/(query|key|value)/kernel", P("fsdp", "tensor")),
    (r".*/attention/self/(query|key|value)/bias", P("tensor")),
    (r".*/attention/output/dense/kernel", P("tensor", "fsdp")),
    (r".*/intermediate/dense/kernel", P("fsdp", "tensor")),
    (r".*/intermediate/dense/bias", P("tensor")),
    (r".*/layer/\d+/output/dense/kernel", P("tensor", "fsdp")),
    (r"(lm_head|cls/predictions/transform)/dense/kernel", P("fsdp", None)),
    (r"(lm_head|cls/predictions)/bias", P("tensor")),
    (r".*(output|lm_head|transform)/dense/bias", P()),
    (r".*(LayerNorm|layer_norm)/(scale|bias)", P()),
)
MODERNBERT: Rules = (
    (r"model/embeddings/tok_embeddings/embedding", P(("tensor", "fsdp"), None)),
    (r".*/attn/Wqkv/kernel", P("fsdp", None, "tensor")),
    (r".*/mlp/Wi/kernel", P("fsdp", None, "tensor")),
    (r".*/(attn|mlp)/Wo/kernel", P("tensor", "fsdp")),
    (r"head/dense/kernel", P("fsdp", None)),
    (r"decoder/bias", P("tensor")),
    (r".*norm/scale", P()),
)


def make_mesh(*, data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over all devices of all hosts; an axis of -1 takes the devices that the others leave.

    TPU slices follow one another along the data axis, the only one that crosses the network between them.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(data, fsdp, tensor, len(devices))
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) if device.platform == "tpu" else 0, []).append(device)
    if shape[0] % len(slices):
        fix = f"make it a multiple of {len(slices)}, since no other axis crosses the network between slices"
        raise InputError(f"config.mesh.data = {shape[0]} can't be split over {len(slices)} slices; {fix}.")
    slice_shape = (shape[0] // len(slices), *shape[1:])
    blocks = [_slice_devices(slice_shape, slices[index]) for index in sorted(slices)]
    return Mesh(np.concatenate(blocks), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slice_devices(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """Returns the devices of one slice as jax.make_mesh lays them on the torus.

    They are sorted by host where jax has no layout, or one that splits tensor groups although a host has room for them.
    """
    by_host = np.array(sorted(devices, key=lambda device: (device.process_index, device.id))).reshape(shape)
    if devices[0].platform != "tpu":
        return by_host
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
        raise InputError(f"config.mesh = {axes} does not fit {count} devices: their product must be that number.")
    return tuple(shape)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns [("roberta/embeddings/...", leaf), ...]."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def rules_for(params: Any) -> Rules:
    """Returns the partition rules of a model.

    A classification head is small and replicated: with a sharded one, XLA's partitioner crashes on the gradient on a
    mesh of three axes (jax 0.10.2, CPU).
    """
    rules = MODERNBERT if "model" in params else ROBERTA
    if "classifier" not in params:
        return rules
    body = [rule for rule in rules if not rule[0].startswith(("(lm_head", "head", "decoder"))]
    pooler = [(r"bert/pooler/.*", P())] if "pooler" in params.get("bert", ()) else []
    return (*body, *pooler, (r"(head|classifier)/.*", P()))


def param_specs(params: Any, mesh: Mesh) -> dict[str, P]:
    """Returns {"roberta/...": spec}; every parameter needs a rule, and every rule a parameter."""
    specs, used, rules = {}, set(), rules_for(params)
    for name, leaf in named_leaves(params):
        rule = next((r for r in rules if re.fullmatch(r[0], name)), None)
        if rule is None:
            raise ValueError(f"no rule in mlm/training/sharding.py matches the parameter {name}")
        used.add(rule)
        specs[name] = rule[1]
        for size, axes in zip(leaf.shape, rule[1], strict=False):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            num_shards = math.prod(mesh.shape[axis] for axis in axes)
            if size % num_shards:
                raise InputError(f"config.mesh.{' x '.join(axes)} = {num_shards} does not divide the {size} of {name}.")
    unused = [rule[0] for rule in rules if rule not in used]
    if unused:
        raise ValueError(f"the rule {unused[0]} in mlm/training/sharding.py matches no parameter")
    return specs


def tree_shardings(tree: Any, mesh: Mesh, params: Any) -> Any:
    """Returns a NamedSharding for each leaf of a state, given its shapes and those of its parameters.

    A leaf with the name and shape of a parameter (its moments, say) is sharded like it; every other is replicated.
    """
    specs = param_specs(params, mesh)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params)}

    def sharding(path: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        suffixes = ("/".join(parts[start:]) for start in range(len(parts)))
        return NamedSharding(mesh, next((specs[name] for name in suffixes if shapes.get(name) == leaf.shape), P()))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def check_batch(mesh: Mesh | np.ndarray, *, rows: int, key: str) -> None:
    """Raises InputError if `rows`, of the config key `key`, can't be split over the mesh, or its processes [S, T]."""
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"] if isinstance(mesh, Mesh) else len(mesh)
    if rows % num_shards:
        over = f"{num_shards} devices (mesh.data x mesh.fsdp)"
        raise InputError(f"config.{key}: {rows} rows can't be split over {over}; make it a multiple of {num_shards}.")


def check_batches(mesh: Mesh | np.ndarray, run: Mapping[str, Any]) -> None:
    """`check_batch` of every size of a run's batches, from its flattened config."""
    sizes = [("data.batch_stages", rows) for rows, _ in run.get("data.batch_stages", ())]
    for key, rows in (*sizes, ("data.global_batch", run["data.global_batch"])):
        check_batch(mesh, rows=rows // run["train.accumulate"], key=f"{key} / train.accumulate")


@functools.lru_cache(maxsize=4)  # a pod has thousands of devices
def processes_of(mesh: Mesh) -> np.ndarray:
    """Returns the process of each device, int64 [S, T]."""
    processes = [device.process_index for device in mesh.devices.flat]
    return np.array(processes, np.int64).reshape(-1, mesh.shape["tensor"])


def _block_order(processes_SxT: np.ndarray) -> np.ndarray:
    """Returns which block of the batch each block of the array holds: sorted by host, then as in the mesh."""
    order_S = np.empty(len(processes_SxT), np.int64)
    order_S[np.argsort(processes_SxT.min(1), kind="stable")] = np.arange(len(order_S))
    return order_S


def logical_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Returns the row of the batch that each row of a global array holds, uint32 [rows]."""
    order_S = _block_order(processes_of(mesh))
    block = rows // len(order_S)
    return (order_S[:, None] * block + np.arange(block)).reshape(-1).astype(np.uint32)


def local_rows(mesh: Mesh | np.ndarray, rows: int, process: int | None = None) -> tuple[int, int]:
    """Returns [start, stop): the rows that a process feeds, this one by default; `mesh` is as in `check_batch`."""
    process = jax.process_index() if process is None else process
    processes_SxT = processes_of(mesh) if isinstance(mesh, Mesh) else mesh
    own = _block_order(processes_SxT)[(processes_SxT == process).any(1)]
    if (np.diff(own) != 1).any():  # make_array_from_process_local_data fills a host's blocks in the order of the array
        what = f"config.mesh.tensor = {processes_SxT.shape[1]} gives host {process} rows that are not consecutive"
        raise InputError(f"{what}; make it smaller, or a multiple of the devices of a host.")
    block = rows // len(processes_SxT)
    return int(own[0]) * block, (int(own[-1]) + 1) * block


def host_input(processes_SxT: np.ndarray, run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how a flattened config feeds every host of a mesh, which need not exist.

    "count" of hosts; "rows_per_host" and "lanes_per_host" of a global batch (below 1 where hosts share a lane; None if
    undefined); "fed": whether every host is; "error": why not.
    """
    hosts, rows, lanes = np.unique(processes_SxT), run["data.global_batch"], run["data.lanes"]
    found = {"count": len(hosts), "rows_per_host": None, "lanes_per_host": None, "fed": False}
    try:
        check_batches(processes_SxT, run)
        check_batch(processes_SxT, rows=run["evaluate.batch"], key="evaluate.batch")
        spans = [local_rows(processes_SxT, rows, host) for host in hosts]
        found["rows_per_host"] = max(stop - start for start, stop in spans)
        for span in spans:
            lanes_of(span, global_batch=rows, lanes=lanes)
    except InputError as error:
        return found | {"error": str(error)}
    share = found["rows_per_host"] * lanes / rows
    return found | {"lanes_per_host": int(share) if share >= 1 else share, "fed": True}


def put_tree(tree: Any, shardings: Any) -> Any:
    """Returns global arrays from numpy arrays that are the same on every host."""
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__), tree, shardings)


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, rows: int) -> dict[str, jax.Array]:
    """Returns global arrays of `rows` rows from this host's rows of the batch, in the order of `logical_rows`."""
    sharding = NamedSharding(mesh, BATCH)
    return {
        name: jax.make_array_from_process_local_data(sharding, value, (rows, *value.shape[1:]))
        for name, value in batch.items()
    }
