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
    """A scheduler, over TLS, and workers of one thread with a nanny each."""

    def __init__(self, folder: pathlib.Path, *, code: pathlib.Path = ROOT):
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self.certificates = folder / "certificates"
        if not self.certificates.exists():
            certificates.make(self.certificates)
        self.port = free_port()
        self.address = f"tls://127.0.0.1:{self.port}"
        self._tls = self.tls_flags(self.certificates)
        line = ["dask_scheduler", "--host=127.0.0.1", f"--port={self.port}", "--protocol=tls"]
        self.scheduler = self._start([*line, "--dashboard-address=127.0.0.1:0", *self._tls], code)

    @staticmethod
    def tls_flags(folder: pathlib.Path) -> list[str]:
        files = {"ca-file": "ca", "cert": "cert", "key": "key"}
        return [f"--tls-{name}={folder / file}.pem" for name, file in files.items()]

    def add(
        self, *, workers: int = 1, code: pathlib.Path = ROOT, tls: Sequence[str] = ()
    ) -> subprocess.Popen:
        """Starts workers in the folder `code`, with the cluster's own certificates or other ones."""
        line = ["dask_worker", self.address, f"--nworkers={workers}", "--nthreads=1"]
        flags = ["--no-dashboard", "--host=127.0.0.1", *(tls or self._tls)]
        return self._start([*line, *flags], code)

    def _start(self, line: list[str], code: pathlib.Path) -> subprocess.Popen:
        module, *flags = line
        log = self._stack.enter_context((self.folder / f"{module}.log").open("ab"))
        environment = {"PYTHONPATH": str(code), "DASK_TEMPORARY_DIRECTORY": str(self.folder)}
        process = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{module}", *flags],
            env=os.environ | environment,
            cwd=code,
            stdout=log,
            stderr=log,
        )
        self._stack.callback(_end, process)
        return process

    def log(self, module: str) -> str:
        return (self.folder / f"{module}.log").read_text()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _end(process: subprocess.Popen) -> None:
    """Ends a process and what it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for member in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def until(moment) -> None:
    deadline = time.monotonic() + 250
    while not moment():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def greeted(port: int, context: ssl.SSLContext | None, timeout: float = 5.0) -> bool:
    """Returns whether whoever connects so is sent anything of Dask's protocol."""
    try:
        plain = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        with context.wrap_socket(plain) if context else plain as connection:
            return bool(connection.recv(8))
    except OSError:
        return False


def written(workdir: pathlib.Path) -> dict[str, int]:
    """The results of tasks, and when they were written; those that are gone while we look are left out."""
    found = {}
    for path in (work_folder(str(workdir / "shards")) / "tasks").glob("*.blocks"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found
