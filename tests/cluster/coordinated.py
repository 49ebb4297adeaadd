"""Processes that meet in jax's coordination service: forked from one that has imported jax, which is slow."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess

from ml_collections import ConfigDict

from mlm.cluster import service, watch
from mlm.cluster.detect import Cluster
from mlm.errors import DamageError, StopError
from tests.support.dask_cluster import free_port, until

HEARTBEAT = 6.0
WHAT_A_BODY_KNOWS = {
    "DamageError": DamageError,
    "os": os,
    "signal": signal,
    "sys": sys,
    "time": time,
}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__, service.__name__])


class Started:
    """Processes that run `body` once they have met; in it, `w` is their watch and `process` their number."""

    def __init__(
        self, folder: pathlib.Path, body: str, processes: list[int], count: int, **options
    ):
        self.address = f"127.0.0.1:{free_port()}"
        self.folder = folder
        self.body = body
        self.count = count
        self.options = options
        self.all = {process: self.start(process) for process in processes}

    def start(self, process: int) -> BaseProcess:
        cluster = Cluster("flags", self.address, self.count, process)
        variables = self.options.get("environment", {}).get(process, {})
        arguments = (cluster, self.folder, self.body, self.options.get("timeout", 40.0), variables)
        started = SERVER.Process(target=_run, args=arguments, daemon=True)
        started.start()
        return started

    def text(self, process: int, stream: str = "stdout") -> str:
        path = self.folder / f"{stream}.{process}"
        return path.read_text(errors="replace") if path.exists() else ""

    def is_served(self) -> bool:
        """Whether process 0 listens."""
        host, _, port = self.address.partition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), 1.0) as connection,
        ):
            return bool(connection.recv(1))
        return False

    def met(self) -> None:
        for process in self.all:
            until(
                lambda process=process: (
                    self.text(process).startswith("met\n") or not self.all[process].is_alive()
                )
            )
            assert self.text(process).startswith("met\n"), self.text(process, "stderr")

    def ends(self) -> dict[int, tuple[int, str]]:
        """The exit code and the stderr of each."""
        for process in self.all.values():
            process.join(120)
        return {
            number: (process.exitcode, self.text(number, "stderr"))
            for number, process in self.all.items()
        }

    def cause(self, process: int) -> dict:
        return json.loads((self.folder / "hosts" / str(process) / "cause.json").read_text())


def _run(
    cluster: Cluster, folder: pathlib.Path, body: str, timeout: float, variables: dict[str, str]
) -> None:
    os.environ |= variables
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(
            os.open(folder / f"{stream}.{cluster.process_id}", os.O_WRONLY | os.O_CREAT), descriptor
        )
    w = watch.begin("test")
    # as of a command
    signal.signal(signal.SIGTERM, lambda *_: w.end_now("signal", "SIGTERM", "stopped"))
    pod = {"port": 1, "start_timeout": timeout, "heartbeat": HEARTBEAT, "hang": 0.0}
    try:
        w.join(cluster, str(folder), ConfigDict(pod))
        print("met", flush=True)
        exec(body, WHAT_A_BODY_KNOWS | {"w": w, "process": cluster.process_id})
    except StopError as error:
        print(f"mlm test: {error}", file=sys.stderr, flush=True)
        sys.exit(w.failed(error, error.code))
    except Exception as error:
        sys.exit(w.failed(error, 1))
    sys.exit(w.end(0))
