"""What all processes of a run must have in common, and which of them has not. Without jax."""

from __future__ import annotations

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
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_PLATFORMS")  # each compiles another program
SHOWN = 4  # differences in a sentence
ROOT = Path(__file__).parents[2]


def facts(config: ConfigDict, command: str, workdir: str, data: dict[str, str]) -> dict[str, Any]:
    """Returns {name for a person: value} of all that decides what a process computes.

    Args:
      config: of the run.
      command: of `python -m mlm`, with the arguments that matter.
      workdir: as it was given.
      data: the fingerprints of manifest and tokenizer.
    """
    found: dict[str, Any] = {"command": command, "--workdir": workdir, "Python": platform.python_version()}
    found |= {f"config.{key}": value for key, value in configs.flatten(config).items()} | data
    found |= {name: _version(name) for name in PACKAGES}
    found |= {f"${name}": os.environ.get(name, "") for name in VARIABLES}
    return found | code()


def code() -> dict[str, str]:
    """Returns {"code mlm/...py": the beginning of its SHA-256} of every file of the package."""
    files = sorted((ROOT / "mlm").rglob("*.py"))
    return {f"code {f.relative_to(ROOT).as_posix()}": hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files}


def difference(all_facts: dict[int, dict[str, Any]]) -> tuple[int, str] | None:
    """Returns (a process that differs from most, the sentence that says in what); None if all are alike.

    Where no value has a majority, that of the first process with the commonest ones stands for it.
    """
    processes = sorted(all_facts)
    odd: dict[int, list[str]] = {}
    for key in sorted({key for found in all_facts.values() for key in found}):
        values = {process: repr(all_facts[process].get(key)) for process in processes}
        usual = Counter(values[process] for process in processes).most_common(1)[0][0]
        for process in processes:
            if values[process] != usual:
                odd.setdefault(process, []).append(f"{key} ({values[process]}, not {usual})")
    if not odd:
        return None
    process = min(odd, key=lambda p: (-len(odd[p]), p))
    words = odd[process][:SHOWN] + [f"{len(odd[process]) - SHOWN} more"] * (len(odd[process]) > SHOWN)
    others = f"; so do hosts {', '.join(str(p) for p in odd if p != process)}" if len(odd) > 1 else ""
    alike = len(processes) - len(odd)
    one = next((p for p in processes if p not in odd), None)
    rest = {0: "the others", 1: f"host {one}"}.get(alike, f"{alike} others")
    return process, f"differs from {rest} in {'; '.join(words)}{others}; give every host the same, and start again"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
