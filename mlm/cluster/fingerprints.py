"""What all processes of a run must have in common, and which process differs. Without jax."""

import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy", "orbax-checkpoint", "transformers")
DATA_PACKAGES = (
    "datasets",
    "pyarrow",
    "tokenizers",
    "tensorflow-datasets",
    "dask",
    "distributed",
    "cloudpickle",
)
# They change the compiled program, or its roundings; mlm/model/keys.py states what chooses random bits.
VARIABLES = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_PLATFORMS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "NVIDIA_TF32_OVERRIDE",
)
SHOWN = 4  # differences in a sentence
ROOT = Path(__file__).parents[2]


def host_fingerprint(
    config: ConfigDict, command: str, workdir: str, data: dict[str, str]
) -> dict[str, Any]:
    """Returns {readable name: value} of everything that decides what a process computes; `data` of what it reads."""
    values: dict[str, Any] = {
        "command": command,
        "--workdir": workdir,
        "Python": platform.python_version(),
    }
    values |= {f"config.{key}": value for key, value in configs.flatten(config).items()} | data
    values |= {name: version(name) for name in PACKAGES}
    values |= {f"${name}": os.environ.get(name, "") for name in VARIABLES}
    return values | code()


def code() -> dict[str, str]:
    """Returns {"code mlm/...": the beginning of its SHA-256} of every module and template of the package."""
    files = sorted(path for path in (ROOT / "mlm").rglob("*") if path.suffix in (".py", ".j2"))
    return {
        f"code {f.relative_to(ROOT).as_posix()}": hashlib.sha256(f.read_bytes()).hexdigest()[:16]
        for f in files
    }


@functools.cache
def worker_fingerprint() -> dict[str, str]:
    """Returns {readable name: value} of what a worker must have in common with the process whose tasks it runs."""
    python = {"Python": ".".join(platform.python_version_tuple()[:2])}
    return python | {name: version(name) for name in (*PACKAGES, *DATA_PACKAGES)} | code()


def difference(fingerprint: dict[str, Any], usual: dict[str, Any]) -> str:
    """Returns how a fingerprint differs from the usual one: "KEY (VALUE, not USUAL); ..."."""
    values = [
        f"{name} ({fingerprint.get(name)!r}, not {usual.get(name)!r})"
        for name in sorted(fingerprint.keys() | usual.keys())
        if fingerprint.get(name) != usual.get(name)
    ]
    more = [f"{len(values) - SHOWN} more"] if len(values) > SHOWN else []
    return "; ".join(values[:SHOWN] + more)


def version(package: str) -> str:
    """Returns the version of an installed package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
