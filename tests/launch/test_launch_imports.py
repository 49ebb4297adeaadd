"""The launcher needs nothing but a Python: the standard library alone, of 3.11 here and of 3.10 on the hosts."""

import ast
import subprocess
import sys

import pytest

from tests.launch import LAUNCH

OURS = {path.stem for path in LAUNCH.glob("*.py")} | {"pods"}
FILES = [LAUNCH / "tpu.py", *LAUNCH.glob("host*.py"), *(LAUNCH / "pods").glob("*.py")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_standard_library_alone(path):
    on_hosts = path.parent == LAUNCH and path.name.startswith("host")
    names = set()
    for node in ast.walk(
        ast.parse(path.read_text(), feature_version=(3, 10) if on_hosts else (3, 11))
    ):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    assert names - OURS <= sys.stdlib_module_names
    if on_hosts:  # "pods" stays here; tomllib came with 3.11
        assert not names & {"pods", "tomllib", "tpu"}
        assert "datetime.UTC" not in path.read_text() and "process_group=" not in path.read_text()


@pytest.mark.standard
def test_an_older_python_is_told_so():
    """Such as 3.10 of Ubuntu 22.04, or 3.9 of macOS: neither has tomllib."""
    old = "import importlib.util as util, runpy, sys; util.find_spec = lambda name: None; runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", old, LAUNCH / "tpu.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "must be 3.11 or later" in done.stderr
    assert "Traceback" not in done.stderr


def test_jax_s_tpu_library_is_among_the_requirements():
    assert "\nlibtpu==" in (LAUNCH.parent / "requirements.txt").read_text()
