"""The TPUs and GPUs that can be compiled for by name, attached or not: their devices and what a chip can do.

A device is a TensorCore on v2, v3 and TPU7x, whose chips have two, and a chip on the others. Figures are the vendor's,
except `hbm_gib` (which the compiler names when it refuses a program) and the clock (peak over the FLOPs in a cycle: v2
0.70, v3 0.94, v4 1.05, v5e 1.50, v5p and v6e 1.75, TPU7x 2.20 GHz). At that clock the compiler's cycles for a
bfloat16 product of two matrices of 8,192 (v5e, v5p, v6e, TPU7x: of 32,768) reach 98%, 97%, 93%, 95%, 96%, 82% and 88%
of the peak, in the order of the table.

GPUs are compiled for by jax's CUDA plugin, from XLA's description of them, for their memory alone;
a "slice" is a host. `hbm_gib` is three quarters of the memory, which is what jax takes by default
(XLA_PYTHON_CLIENT_MEM_FRACTION). Sources: NVIDIA's data sheets, and the descriptions in XLA's
repository.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from mlm.errors import InputError
from mlm.model import flops

# Without these libtpu asks the cloud's metadata server what machine this is, and warns.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A generation of chips."""

    kind: str  # jax's name of a device
    cores: int  # devices of a chip
    pod: tuple[int, ...]  # chips along each axis of the largest slice
    hbm_gib: float  # memory of a device that a program may use
    # Of a TPU
    wrap: int = 0  # chips along an axis from which on it is closed to a ring
    flops_per_cycle: int = 0  # of a device's matrix units, in bfloat16
    hbm_gbs: float = 0.0  # memory bandwidth of a chip, 10^9 bytes/s
    link_gbs: float = 0.0  # one link to a neighbouring chip, one way, 10^9 bytes/s
    # Of a GPU
    target: str = ""  # its description, an XLA GpuTargetConfigProto


def gpu(
    kind: str, version: int, hbm_gib: float, *, cores: int, memory: int, gbs: int, clock: float
) -> Family:
    """Returns an NVIDIA GPU of a compute capability, with so many multiprocessors and bytes of memory."""
    fpus, shared, cache = {8: (64, 166_912, 40), 9: (128, 232_448, 50)}[version]
    target = f"""
        gpu_device_info {{
            threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
            block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
            registers_per_core_limit: 65536  registers_per_block_limit: 65536
            shared_memory_per_block: 49152  shared_memory_per_block_optin: {shared}
            shared_memory_per_core: {shared + 1024}  l2_cache_size: {cache << 20}
            core_count: {cores}  fpus_per_core: {fpus}  clock_rate_ghz: {clock}
            memory_bandwidth: {gbs * 10**9}  device_memory_size: {memory}
            cuda_compute_capability {{ major: {version} }}
        }}
        platform_name: "CUDA"  device_description_str: "{kind}"
        runtime_version {{ major: 12  minor: 8 }}  dnn_version_info {{ major: 9  minor: 10 }}
    """
    return Family(kind, 1, (8,), hbm_gib, target=target)


FAMILIES = {
    "v2": Family("TPU v2", 2, (16, 16), 7.48, 16, 32_768, 700, 62),
    "v3": Family("TPU v3", 2, (32, 32), 15.48, 32, 65_536, 900, 82),
    "v4": Family("TPU v4", 1, (16, 16, 16), 30.75, 4, 262_144, 1228, 50),
    "v5e": Family("TPU v5 lite", 1, (16, 16), 15.75, 16, 131_072, 819, 50),
    "v5p": Family("TPU v5", 1, (16, 20, 28), 95.73, 4, 262_144, 2765, 100),
    "v6e": Family("TPU v6 lite", 1, (16, 16), 31.24, 16, 524_288, 1638, 100),
    "tpu7x": Family("TPU7x", 2, (16, 16, 36), 94.74, 4, 524_288, 7380, 100),
    "a100": gpu(
        "NVIDIA A100-SXM4-80GB", 8, 59.4, cores=108, memory=85_100_068_864, gbs=2039, clock=1.41
    ),
    "h100": gpu(
        "NVIDIA H100 80GB HBM3", 9, 59.3, cores=132, memory=84_942_979_072, gbs=3352, clock=1.98
    ),
    "h200": gpu("NVIDIA H200", 9, 105.7, cores=132, memory=151_397_597_184, gbs=4800, clock=1.98),
}
# What the number in Google's name of an accelerator type counts for a chip: v3-8 are 4 chips,
# v5litepod-8 are 8.
ACCELERATOR_TYPES = {"v2": 2, "v3": 2, "v4": 2, "v5litepod": 1, "v5e": 1, "v5p": 2, "v6e": 1}
# Slices that are rented as a single host, where libtpu's default is two.
ONE_HOST = {"v5e": (2, 4), "v6e": (2, 4)}
CUDA_PACKAGES = "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0}"
MAX_SLICES = 256  # a larger number is a typo, for which libtpu would make millions of devices


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or several slices of a pod, with a network between them; `shape` is the chips of one along each axis."""

    name: str
    family: Family
    shape: tuple[int, ...]
    devices: list[Any]
    slices: int = 1

    @property
    def chips(self) -> int:
        """Chips, which are what is paid for."""
        return math.prod(self.shape) * self.slices

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a device."""
        return flops.peak_flops(self.family.kind)

    @property
    def hertz(self) -> float:
        """Cycles in a second."""
        return self.peak_flops / self.family.flops_per_cycle

    @property
    def capacity(self) -> float:
        """Bytes of a device that a program may use."""
        return self.family.hbm_gib * 2**30

    @property
    def hbm_bytes_per_cycle(self) -> float:
        """Memory bandwidth of a device."""
        return self.family.hbm_gbs * 1e9 / self.family.cores / self.hertz

    @property
    def link_bytes_per_cycle(self) -> float:
        """Of a ring through a slice: one link along each axis, two where it is closed; within a chip the memory's."""
        links = sum(1 + (size >= self.family.wrap) for size in self.shape if size > 1)
        return (
            links * self.family.link_gbs * 1e9 / self.hertz if links else self.hbm_bytes_per_cycle
        )


def _shapes(family: str) -> list[tuple[int, ...]]:
    """Returns the usual slices of a family in chips, from one host to the full pod."""
    pod = FAMILIES[family].pod
    shape = [2, 2, 1] if len(pod) == 3 else [1] * len(pod)
    shapes = []
    while all(size <= limit for size, limit in zip(shape, pod, strict=True)):
        shapes.append(tuple(shape))
        last_smallest = len(shape) - 1 - shape[::-1].index(min(shape))
        shape[last_smallest] *= 2
    half_host = (1, 2)
    return [shape for shape in dict.fromkeys([*shapes, pod]) if shape != half_host]


def _name(family: str, shape: Sequence[int]) -> str:
    return f"{family}:{'x'.join(map(str, shape))}"


def names(family: str) -> list[str]:
    """Returns the names of the usual slices of a family."""
    return [_name(family, shape) for shape in _shapes(family)]


def listed(name: str) -> list[str]:
    """Returns the names that "v5e:?", or "?" of all families, asks for; none for the name of a topology."""
    if not name.endswith("?"):
        return []
    family = name.rstrip(":?")
    families = [family] if family in FAMILIES else FAMILIES
    return [name for family in families for name in names(family)]


def find(name: str, slices: int = 1) -> Topology:
    """Returns `slices` slices of a name such as "v5e:2x4" or "v5litepod-8".

    Raises InputError if there is none, or no compiler for it.
    """
    if not 1 <= slices <= MAX_SLICES:
        raise InputError(f"--slices={slices}: must be a whole number from 1 to {MAX_SLICES}.")
    family, _, sizes = _of_accelerator_type(name).partition(":")
    if family not in FAMILIES:
        known = ", ".join(f"{names(known)[0]} to {names(known)[-1]}" for known in FAMILIES)
        raise InputError(f"--topology={name}: there is no such TPU or GPU; known are {known}.")
    prepare()
    import jax

    usual = ", ".join(names(family))
    try:
        shape = tuple(map(int, sizes.split("x")))
        limits = zip(sorted(shape), sorted(FAMILIES[family].pod), strict=True)
        if not all(0 < size <= limit for size, limit in limits):
            raise ValueError
        devices = _devices(family, shape, slices)
    except ValueError:
        raise InputError(
            f"--topology={name}: there is no such slice; take one of {usual}."
        ) from None
    except RuntimeError as error:  # of the compiler, or because there is none
        is_gpu = FAMILIES[family].target
        packages = CUDA_PACKAGES.format(jax.__version__) if is_gpu else "-r requirements.txt"
        raise InputError(
            f"--topology={name}: can't be compiled for here ({' '.join(str(error).split())[:200]}); take one of "
            f"{usual}, or install the compiler (on Linux, x86-64): `{sys.executable} -m pip install {packages}`."
        ) from None
    return Topology(_name(family, shape), FAMILIES[family], shape, devices, slices)


def _of_accelerator_type(name: str) -> str:
    """Returns "v3:2x2" for v3-8: the slice of so many chips; any other name as it is."""
    prefix, _, number = name.partition("-")
    if prefix not in ACCELERATOR_TYPES or not number.isdecimal():
        return name
    family = "v5e" if prefix == "v5litepod" else prefix
    chips = int(number) / ACCELERATOR_TYPES[prefix]
    slices = (_name(family, shape) for shape in _shapes(family) if math.prod(shape) == chips)
    return next(slices, f"{family}:{number}")


def _devices(family: str, shape: tuple[int, ...], slices: int) -> list[Any]:
    from jax.experimental import topologies

    if target := FAMILIES[family].target:
        return topologies.get_topology_desc(
            "", "cuda", target_config=target, topology=f"1x{slices}x{shape[0]}"
        ).devices
    options: dict[str, Any] = {"num_slices": slices}
    if family == "v4":
        options["chip_config_name"] = "megacore"  # else its cores are devices
    if tuple(sorted(shape)) == ONE_HOST.get(family):
        options["chips_per_host_bounds"] = [*shape, 1]
    return topologies.get_topology_desc(_name(family, shape), "tpu", **options).devices


def attached(devices: Sequence[Any]) -> Topology | None:
    """Returns the topology of attached TPUs; None of other devices."""
    family = next(
        (name for name in FAMILIES if FAMILIES[name].kind == devices[0].device_kind), None
    )
    if family is None or FAMILIES[family].target:
        return None
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    axes = list(zip(*(device.coords for device in devices), strict=True))[
        : len(FAMILIES[family].pod)
    ]
    shape = tuple(max(axis) - min(axis) + 1 for axis in axes)
    return Topology(_name(family, shape), FAMILIES[family], shape, list(devices), slices)


def prepare() -> None:
    """Sets the environment to compile for what is not attached; call it before importing jax."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"  # leaves an attached TPU or GPU alone
