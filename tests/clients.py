"""The processes of a run, played by threads of one: a real coordinator and real clients on 127.0.0.1."""

import pathlib
import secrets
import socket
import threading
import time
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

from mlm.cluster.client import Client
from mlm.cluster.detect import Cluster
from mlm.cluster.messages import Termination
from mlm.cluster.ports import format_address
from mlm.errors import StopError

FINGERPRINT = {"config.optimizer.learning_rate": 0.1, "code mlm/commands/run.py": "abc"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Several:
    """Some processes, all in one; `ends` holds how each was notified of the run's end."""

    every: ClassVar[list[Client]] = []

    def __init__(self, folder: pathlib.Path, processes: int, present: list[int] | None = None, **limits: float):
        self.where, self.jax_port, self.processes = ("127.0.0.1", free_port()), free_port(), processes
        self.address = f"127.0.0.1:{self.where[1]}"
        self.token = folder / secrets.token_hex(4) / "hosts" / "token"
        self.limits = {"start_timeout": 5.0, "heartbeat": 1.0} | limits
        self.ends: dict[int, Termination] = {}
        self.clients: dict[int, Client] = {}
        for process in range(processes) if present is None else present:
            self.add(process)

    def add(self, process: int, **changed) -> Client:
        ends, host = self.ends, changed.pop("host", f"w-{process}")
        cluster = Cluster("test", format_address(self.where), changed.pop("processes", self.processes), process)
        token = changed.pop("token", self.token)
        pod = SimpleNamespace(**{"port": 1, "jax_port": self.jax_port} | self.limits | changed)
        with mock.patch.object(socket, "gethostname", lambda: host):
            self.clients[process] = Client(cluster, pod, token, lambda end: ends.setdefault(process, end))
        Several.every.append(self.clients[process])
        return self.clients[process]

    @classmethod
    def abandon(cls) -> None:
        """Those of a test that is over no longer try to connect."""
        while cls.every:
            cls.every.pop()._left = True

    def ready(self, found: dict[int, dict] | None = None) -> dict[int, object]:
        """Returns what `ready` gave to each that came through, or the error that it raised."""
        results: dict[int, object] = {}

        def one(process: int) -> None:
            own = (found or {}).get(process, FINGERPRINT)
            try:
                results[process] = self.clients[process].ready(own)
            except StopError as error:
                results[process] = error

        threads = [threading.Thread(target=one, args=(process,), daemon=True) for process in self.clients]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self.limits["start_timeout"] + 3
        while len(results) < len(threads) and time.monotonic() < deadline and len(self.ends) < len(threads):
            time.sleep(0.02)
        return results

    def until_connected(self, *processes: int) -> None:
        for process in processes:
            assert self.clients[process]._wait("connected", 5)

    def until_ended(self, *processes: int, seconds: float = 5.0) -> list[Termination]:
        deadline = time.monotonic() + seconds
        while not set(processes) <= self.ends.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert set(processes) <= self.ends.keys(), f"only {sorted(self.ends)} were notified of the end"
        return [self.ends[process] for process in processes]

    def meet(self, name: str) -> None:
        """All pass a barrier, or the test fails: the run goes on."""
        threads = [threading.Thread(target=c.barrier, args=(name,), daemon=True) for c in self.clients.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert not any(thread.is_alive() for thread in threads), f"not all passed; ended: {self.ends}"
        assert self.ends == {}
