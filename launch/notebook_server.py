"""JupyterLab, installed if it is missing, for `launch/tpu.py notebook`; `notebooks` lie beside the launcher's runs."""

import importlib.util
import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import time


def main() -> int:
    """Serves until it is ended; returns the exit code."""
    folder = pathlib.Path(os.environ["MLM_HOST_DIR"])  # which its owner alone can read
    if importlib.util.find_spec("jupyterlab") is None:
        # constrained, since the hosts of a run must have the same versions of all that it uses
        argv = [sys.executable, "-m", "pip", "install", "--constraint=requirements.txt", "jupyterlab"]
        subprocess.run(argv, check=True)
    (notebooks := folder.parents[2] / "notebooks").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ["JUPYTER_TOKEN"] = token = secrets.token_hex(24)
    flags = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    process = subprocess.Popen([sys.executable, "-m", "jupyterlab", *flags, f"--ServerApp.root_dir={notebooks}"])
    while process.poll() is None:
        with socket.socket() as connection:
            if not connection.connect_ex(("127.0.0.1", port)):  # it serves; said where `status` looks
                (folder / "server.json").write_text(json.dumps({"port": port, "token": token}))
                break
        time.sleep(0.2)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
