"""The interpreters with PyTorch, made by tests/run.sh: PyTorch never shares a process with TensorFlow or jax."""

import os
import subprocess

from tests import ROOT


def torch_python(generation: int) -> str:
    """Returns the interpreter with transformers 4 or 5."""
    python = ROOT / f".venv-torch{generation}" / "bin" / "python"
    assert python.is_file(), f"{python} is missing: run the tests with `bash tests/run.sh`, which makes it"
    return str(python)


def run_torch(generation: int, script: str, *arguments: object, code: int = 0) -> str:
    """Runs a script of this repository there; returns what it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("USE_TORCH", "USE_TF", "PYTHONPATH")}
    environment["OMP_NUM_THREADS"] = "1"  # tiny models: threads would wait for each other
    command = [torch_python(generation), str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code, f"{script}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
