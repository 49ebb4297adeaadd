"""JupyterLab, installed if it is missing, for `launch/tpu.py notebook`; `notebooks` lie beside the launcher's runs."""

import importlib.util
import os
import pathlib
import secrets
import subprocess
import sys


def main() -> None:
    """Becomes JupyterLab, which writes into the run's folder, once it serves, at which port and with which token."""
    folder = pathlib.Path(os.environ["MLM_HOST_DIR"])  # which its owner alone can read
    if importlib.util.find_spec("jupyterlab") is None:
        # constrained, since the hosts of a run must have the same versions of all that it uses
        argv = [sys.executable, "-m", "pip", "install", "--constraint=requirements.txt", "jupyterlab"]
        subprocess.run(argv, check=True)
    (notebooks := folder.parents[2] / "notebooks").mkdir(exist_ok=True)
    os.environ.update(JUPYTER_RUNTIME_DIR=str(folder), JUPYTER_TOKEN=secrets.token_hex(24))
    flags = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", f"--ServerApp.root_dir={notebooks}"]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *flags])


if __name__ == "__main__":
    main()
