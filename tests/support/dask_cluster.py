"""A Dask cluster of real processes on this machine, for the tests."""

import contextlib
import os
import pathlib
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from mlm.engine import certificates
from mlm.workdir import work_folder
from tests import ROOT


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Cluster:
    """A scheduler over TLS, and workers of one thread with a nanny each."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.certificates = folder / "certificates"
        certificates.make(self.certificates)
        self.port = free_port()
        self.address = f"tls://127.0.0.1:{self.port}"
        line = ["dask_scheduler", f"--port={self.port}", "--protocol=tls"]
        line += ["--dashboard-address=127.0.0.1:0", *self.tls_flags(self.certificates)]
        self.scheduler = self._start(line)

    @staticmethod
    def tls_flags(folder: pathlib.Path) -> list[str]:
        names = {"ca-file": "ca", "cert": "cert", "key": "key"}
        return [f"--tls-{name}={folder / file}.pem" for name, file in names.items()]

    def add(self, *, workers: int = 1, tls: Sequence[str] | None = None) -> subprocess.Popen:
        line = ["dask_worker", self.address, f"--nworkers={workers}", "--nthreads=1"]
        line += ["--no-dashboard", *(tls or self.tls_flags(self.certificates))]
        return self._start(line)

    def _start(self, line: list[str]) -> subprocess.Popen:
        module, *flags = line
        log = self._stack.enter_context((self._folder / f"{module}.log").open("ab"))
        command = [sys.executable, "-m", f"distributed.cli.{module}", "--host=127.0.0.1", *flags]
        environment = os.environ | {"DASK_TEMPORARY_DIRECTORY": str(self._folder)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self._stack.callback(_end, process)
        return process

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _end(process: subprocess.Popen) -> None:
    """Ends a process and what it has started."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in (*started, process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def until(moment) -> None:
    deadline = time.monotonic() + 250
    while not moment():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def greeted(port: int, context: ssl.SSLContext | None, timeout: float = 5.0) -> bool:
    """Returns whether whoever connects so is sent anything of Dask's protocol."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout) as plain:
            if context is None:
                return bool(plain.recv(8))
            with context.wrap_socket(plain) as secured:
                return bool(secured.recv(8))
    except OSError:
        return False


def written(workdir: pathlib.Path) -> dict[str, int]:
    """The results of tasks, and when they were written; those that are gone while we look are left out."""
    found = {}
    for path in (work_folder(str(workdir / "shards")) / "tasks").glob("*.hashes"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found
