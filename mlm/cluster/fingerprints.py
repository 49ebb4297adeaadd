"""What all processes of a run must have in common, and which process differs. Without jax."""

import functools
import hashlib
import importlib.metadata
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy", "orbax-checkpoint", "transformers")
DATA_PACKAGES = ("datasets", "pyarrow", "tokenizers", "tensorflow-datasets", "dask", "distributed", "cloudpickle")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_PLATFORMS")  # they change the compiled program
SHOWN = 4  # differences in a sentence
ROOT = Path(__file__).parents[2]


def host_fingerprint(config: ConfigDict, command: str, workdir: str, data: dict[str, str]) -> dict[str, Any]:
    """Returns {readable name: value} of everything that decides what a process computes; `data` of what it reads."""
    values: dict[str, Any] = {"command": command, "--workdir": workdir, "Python": platform.python_version()}
    values |= {f"config.{key}": value for key, value in configs.flatten(config).items()} | data
    values |= {name: _version(name) for name in PACKAGES}
    values |= {f"${name}": os.environ.get(name, "") for name in VARIABLES}
    return values | code()


def code() -> dict[str, str]:
    """Returns {"code mlm/...": the beginning of its SHA-256} of every module and template of the package."""
    files = sorted(path for path in (ROOT / "mlm").rglob("*") if path.suffix in (".py", ".j2"))
    return {f"code {f.relative_to(ROOT).as_posix()}": hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files}


@functools.cache
def worker_fingerprint() -> dict[str, str]:
    """Returns {readable name: value} of what a worker must have in common with the process whose tasks it runs."""
    python = {"Python": ".".join(platform.python_version_tuple()[:2])}
    return python | {name: _version(name) for name in (*PACKAGES, *DATA_PACKAGES)} | code()


def difference(fingerprints: dict[int, dict[str, Any]]) -> tuple[int, str] | None:
    """Returns (the process that differs most from the most common values, how it differs); None if all are alike."""
    differing: dict[int, list[str]] = {process: [] for process in sorted(fingerprints)}
    for key in sorted(set().union(*fingerprints.values())):
        values = {process: repr(fingerprints[process].get(key)) for process in differing}
        usual = Counter(values.values()).most_common(1)[0][0]
        for process, value in values.items():
            if value != usual:
                differing[process].append(f"{key} ({value}, not {usual})")
    process = max(differing, key=lambda process: len(differing[process]))  # the first of several
    if not (differences := differing.pop(process)):
        return None
    alike = [str(other) for other, theirs in differing.items() if not theirs]
    others = [str(other) for other, theirs in differing.items() if theirs]
    rest = f"host {alike[0]}" if len(alike) == 1 else f"{len(alike) or 'the'} others"
    shown = differences[:SHOWN]
    if len(differences) > SHOWN:
        shown.append(f"{len(differences) - SHOWN} more")
    if others:
        shown.append(f"so do hosts {', '.join(others)}")
    return process, f"differs from {rest} in {'; '.join(shown)}; make all hosts alike, and start again"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
