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
    """A scheduler, over TLS if there are certificates, and workers of one thread with a nanny each."""

    def __init__(self, folder: pathlib.Path, *, tls: bool = True, code: pathlib.Path = ROOT):
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self.certificates = folder / "certificates"
        if tls and not self.certificates.exists():
            certificates.make(self.certificates)
        scheme = "tls" if tls else "tcp"
        self.port = free_port()
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self._tls = self.tls_flags(self.certificates) if tls else []
        line = ["dask_scheduler", "--host=127.0.0.1", f"--port={self.port}", f"--protocol={scheme}"]
        self.scheduler = self._start([*line, "--dashboard-address=127.0.0.1:0", *self._tls], code)

    @staticmethod
    def tls_flags(folder: pathlib.Path) -> list[str]:
        return [
            f"--tls-{name}={folder / file}.pem"
            for name, file in (("ca-file", "ca"), ("cert", "cert"), ("key", "key"))
        ]

    def add(
        self,
        *,
        workers: int = 1,
        code: pathlib.Path = ROOT,
        tls: Sequence[str] | None = None,
        plain: bool = False,
    ) -> subprocess.Popen:
        """Starts workers in the folder `code`; `plain`: by the command `dask worker`, which has it not on its path."""
        line = [
            "dask_worker",
            self.address,
            f"--nworkers={workers}",
            "--nthreads=1",
            "--no-dashboard",
        ]
        return self._start(
            [*line, "--host=127.0.0.1", *(self._tls if tls is None else tls)], code, plain=plain
        )

    def _start(
        self, line: list[str], code: pathlib.Path, *, plain: bool = False
    ) -> subprocess.Popen:
        module, *flags = line
        log = self._stack.enter_context((self.folder / f"{module}.log").open("ab"))
        environment = {
            **os.environ,
            "PYTHONPATH": str(code),
            "DASK_TEMPORARY_DIRECTORY": str(self.folder),
        }
        command = [sys.executable, "-m", f"distributed.cli.{module}", *flags]
        if plain:
            environment["PYTHONPATH"] = ""
            command = [
                sys.executable,
                str(pathlib.Path(sys.executable).with_name("dask")),
                "worker",
                *flags,
            ]
        process = subprocess.Popen(command, env=environment, cwd=code, stdout=log, stderr=log)
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
        family = [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
        ]
        for each in family:
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
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=timeout)
            )
            return bool(
                (stack.enter_context(context.wrap_socket(plain)) if context else plain).recv(8)
            )
    except OSError:
        return False


def written(workdir: pathlib.Path) -> dict[str, int]:
    """The results of tasks, and when they were written; those that are gone while we look are left out."""
    found = {}
    for path in (work_folder(str(workdir / "shards")) / "tasks").glob("*.blocks"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found
