"""Jupyter on a host, for as long as the launcher's connection lasts. For host.py: standard library of Python 3.10."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import host_setup
from host_setup import HostError

# without these, jax on one host of a slice waits for the others (Cloud TPU's names for "only the chips of this host")
ALONE = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1", "TPU_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0,1,2,3"}


def notebook(root: pathlib.Path, code: str, port: int, alone: bool) -> dict:
    """Runs Jupyter in a code's folder until stdin ends; stdin's first line is {"token": ...}. Returns {"code"}."""
    try:
        token = json.loads(sys.stdin.buffer.readline())["token"]
    except (ValueError, KeyError, TypeError) as error:
        raise HostError("no token came on stdin") from error
    installed = (host_setup.read(root / "code" / f".{code}.json") or {}).get("requirements", "")
    python = host_setup.interpreter(root, installed)
    folder = root / "code" / code
    if subprocess.run([python, "-c", "import jupyterlab"], cwd=folder, capture_output=True, check=False).returncode:
        raise HostError("jupyterlab is not installed here: launch/tpu.py sync --extra jupyterlab")
    words = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--port-retries=0"]
    process = subprocess.Popen(
        [python, "-m", "jupyterlab", *words],
        cwd=folder,
        env={**os.environ, "JUPYTER_TOKEN": token, **(ALONE if alone else {})},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
    )
    threading.Thread(target=_end_with_stdin, args=(process,), daemon=True).start()
    return {"code": process.wait()}


def _end_with_stdin(process: subprocess.Popen) -> None:
    while os.read(0, 1024):
        pass
    os.killpg(process.pid, signal.SIGTERM)  # it ends its kernels
    try:
        process.wait(timeout=8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
