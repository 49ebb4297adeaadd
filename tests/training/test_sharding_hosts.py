"""Rows for every host of every TPU, by libtpu's lists of devices and what jax's sharding says that each holds."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from ml_collections import ConfigDict

from mlm import config as configs
from mlm.errors import InputError
from mlm.plan import topology
from mlm.training import sharding, train

SINGLE = ["v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"]
SEVERAL = ["v2:4x4", "v3:4x4", "v4:2x2x4", "v4:2x4x4", "v5e:4x8", "v5p:2x2x4", "v6e:4x8"]
SEVERAL += ["tpu7x:2x2x4"]
FULL = ["v2:16x16", "v5e:16x16", "v6e:16x16"]


@functools.lru_cache(maxsize=2)
def devices_of(name: str, slices: int = 1) -> list:
    return topology.find(name, slices).devices


def shapes(count: int) -> list[tuple[int, int, int]]:
    """Along data, along fsdp, both, and with matrices split over the two devices of a group."""
    return [(count, 1, 1), (1, count, 1), (count // 4, 4, 1), (count // 2, 1, 2)]


def mesh_of(devices: list, shape: tuple[int, int, int]) -> Mesh:
    return sharding.make_mesh(**dict(zip(sharding.AXES, shape, strict=True)), devices=devices)


def jax_mesh(devices: list, shape: tuple[int, int, int]) -> Mesh:
    return jax.make_mesh(shape, sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def host_input(config, mesh: Mesh) -> dict:
    return sharding.host_input(sharding.processes_of(mesh), config)


def batch_config(rows: int, *, accumulate: int, lanes: int) -> ConfigDict:
    data = {"global_batch": rows, "batch_stages": (), "lanes": lanes}
    return ConfigDict(
        {"data": data, "train": {"accumulate": accumulate}, "evaluate": {"batch": 12}}
    )


def assert_fed(mesh: Mesh, config) -> None:
    """The blocks that a host's devices hold are its rows of the batch, in their order, and every row is held."""
    rows = config.data.global_batch
    logical = sharding.logical_rows(mesh, rows)
    assert logical.dtype == np.uint32
    held: dict[int, set[tuple[int, int]]] = {}
    blocks = NamedSharding(mesh, sharding.BATCH).devices_indices_map((rows,))
    for device, (index,) in blocks.items():
        held.setdefault(device.process_index, set()).add(index.indices(rows)[:2])
    found = host_input(config, mesh)
    assert found["fed"] and found["count"] == len(held), found
    fed = set()
    for host, blocks in held.items():
        span = np.arange(*sharding.local_rows(mesh, rows, host))
        mine = np.concatenate([logical[slice(*block)] for block in sorted(blocks)])
        assert np.array_equal(mine, span) and len(span) == found["rows_per_host"], f"host {host}"
        fed.update(span.tolist())
    assert fed == set(range(rows))


NAMES = [*SINGLE, *SEVERAL, *(pytest.param(name, marks=pytest.mark.standard) for name in FULL)]


@pytest.mark.parametrize("name", NAMES)
def test_every_host_is_fed(name):
    devices = devices_of(name)
    shipped = "roberta_large" if name in SEVERAL else "roberta_base"
    config = configs.load(f"configs/{shipped}.py", [])
    for shape in shapes(len(devices)):
        assert_fed(mesh_of(devices, shape), config)


@pytest.mark.parametrize("processes", [[[0, 1], [0, 2], [1, 1]], [[1, 1], [0, 1]]])
def test_rows_that_a_host_can_not_take_in_their_order_are_refused(processes):
    """Host 1 holds the first rows and the last, or all it holds in the wrong order."""
    found = sharding.host_input(np.array(processes), batch_config(12, accumulate=1, lanes=1))
    assert not found["fed"]
    assert found["error"].startswith(
        "config.mesh.tensor = 2 gives host 1 rows that are not consecutive; make"
    )


@pytest.mark.parametrize(
    ("lanes", "share", "error"),
    [
        (1, 1 / 3, ""),
        (3, 1, ""),
        (6, 2, ""),
        (
            2,
            None,
            "a lane has 12 of 24 rows, a host 8, .* set data.lanes to a multiple or a divisor of 3,",
        ),
        (4, None, "a lane has 6 of 24 rows, a host 8,"),
    ],
)
def test_hosts_hold_whole_lanes_or_share_one(lanes, share, error):
    hosts = np.arange(6).reshape(6, 1) // 2
    found = sharding.host_input(hosts, batch_config(24, accumulate=2, lanes=lanes))
    assert (found["count"], found["rows_per_host"], found["lanes_per_host"]) == (3, 8, share)
    assert found["fed"] == (not error) and (not error or re.search(error, found["error"]))


# The sum over the devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "matrix", "manual_axes"),
    [
        ("v5e:2x4", (8, 1, 1), "bfloat16", "bf16[2,2]", {"data", "fsdp", "tensor"}),
        ("v5e:2x4", (4, 2, 1), "float32", "f32[2,2]", {"data", "tensor"}),
        ("cpu", (8, 1, 1), "bfloat16", "f32[2,2]", {"data", "fsdp", "tensor"}),
    ],
)
def test_matrices_cross_the_devices_in_the_dtype_of_the_model(
    name, shape, dtype, matrix, manual_axes
):
    """Vectors and sums in float32; on CPU all of them. An axis of one device is taken by hand too."""

    def gradient_sum(params, inputs, rows_B, key):
        return params, jnp.sum(inputs)

    mesh = mesh_of(jax.devices() if name == "cpu" else devices_of(name), shape)
    summed = train.sum_over_data(gradient_sum, mesh, matrix_dtype=dtype)
    params = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    rows = np.zeros(64, np.float32)
    jaxpr = jax.make_jaxpr(summed)(params, rows, rows, jax.random.key(0))
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("float32")}
    printed = str(jaxpr)
    assert set(re.findall(r":(\w+\[.*?\]) = psum", printed)) == {matrix, "f32[2]", "f32[]"}
    (axes,) = re.findall(r"newly_manual_axes=frozenset\((.*)\)", printed)
    assert set(re.findall(r"\w+", axes)) == manual_axes


# The torus ------------------------------------------------------------------------------------------------------------


def by_host(devices: list, shape: tuple[int, int, int]) -> np.ndarray:
    return np.array(sorted(devices, key=lambda device: (device.process_index, device.id))).reshape(
        shape
    )


@pytest.mark.parametrize("name", ["v4:4x4x4", "v5e:16x16"])
def test_devices_lie_on_the_torus_as_jax_has_them_or_by_host(name):
    devices = devices_of(name)
    orders = set()
    for shape in shapes(len(devices)):
        try:
            expected = jax_mesh(devices, shape).devices
            has_order = True
        except NotImplementedError:
            expected = by_host(devices, shape)
            has_order = False
        assert np.array_equal(mesh_of(devices, shape).devices, expected), shape
        orders.add(has_order and not np.array_equal(expected, by_host(devices, shape)))
    assert True in orders


@pytest.mark.parametrize(
    ("name", "tensor", "kept"),
    [("v4:4x4x4", 4, False), ("v4:2x2x4", 4, True), ("v5e:16x16", 8, True)],
)
def test_a_tensor_group_stays_on_a_host_that_has_room_for_it(name, tensor, kept):
    devices = devices_of(name)
    shape = (len(devices) // tensor, 1, tensor)
    mesh = mesh_of(devices, shape)
    processes_SxT = sharding.processes_of(mesh)
    if tensor <= 4:
        assert (processes_SxT == processes_SxT[:, :1]).all()
    assert np.array_equal(mesh.devices, jax_mesh(devices, shape).devices) == kept
    assert_fed(mesh, configs.load("configs/roberta_base.py", []))


# Several slices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 1, 1), (8, 4, 1), (2, 16, 1), (16, 1, 2)])
def test_slices_follow_one_another_along_data(shape):
    """As jax's hybrid mesh has it, where that has an order."""
    for name in ("v5e:4x4", "v6e:4x4"):
        devices = devices_of(name, 2)
        mesh = mesh_of(devices, shape)
        assert [{d.slice_index for d in half.flat} for half in np.split(mesh.devices, 2)] == [
            {0},
            {1},
        ]
        per_slice = (shape[0] // 2, *shape[1:])
        if name == "v5e:4x4":
            hybrid = mesh_utils.create_hybrid_device_mesh(
                per_slice, (2, 1, 1), devices, allow_split_physical_axes=True
            )
            assert np.array_equal(mesh.devices, hybrid)
        config = configs.load("configs/roberta_base.py", [])
        assert_fed(mesh, config)
        assert host_input(config, mesh)["count"] == 8


def test_other_axes_do_not_cross_slices():
    with pytest.raises(InputError, match=r"config\.mesh: 2 slices .* set mesh\.fsdp"):
        mesh_of(devices_of("v5e:4x4", 2), (1, 32, 1))
