"""Where every array lives: a mesh of data x fsdp x tensor, and rules over the names of parameters."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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

    Args:
      data, fsdp, tensor: devices along each axis.
      devices: others than those that are there.

    Raises:
      InputError: the axes do not multiply to the number of devices.
    """
    shape = mesh_shape(data, fsdp, tensor, jax.device_count() if devices is None else len(devices))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


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


def check_rows(ways: int, *, rows: int, key: str) -> None:
    """As `check_batch`, of a mesh that splits a batch `ways` times."""
    if rows % ways:
        raise InputError(f"config.{key}: {rows} rows can't be split over {ways} devices (mesh.data x mesh.fsdp).")


def local_rows(mesh: Mesh, rows: int) -> tuple[int, int]:
    """Returns [start, stop): the rows of a global batch of `rows` that this host's devices hold.

    Raises:
      InputError: the mesh scatters them, so that no contiguous block of lanes could feed this host.
    """
    indices = NamedSharding(mesh, BATCH).addressable_devices_indices_map((rows,)).values()
    spans = sorted({index[0].indices(rows)[:2] for index in indices})
    if any(stop != start for (_, stop), (start, _) in itertools.pairwise(spans)):
        raise InputError(
            "config.mesh gives this host rows that do not follow on one another; make mesh.tensor smaller."
        )
    return spans[0][0], spans[-1][1]


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, rows: int) -> dict[str, jax.Array]:
    """Returns global arrays of `rows` rows from this host's rows of them."""
    sharding = NamedSharding(mesh, BATCH)
    return {
        name: jax.make_array_from_process_local_data(sharding, value, (rows, *value.shape[1:]))
        for name, value in batch.items()
    }
