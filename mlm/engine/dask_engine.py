"""Engines on a Dask cluster: that of an address, and that of a run of several processes.

Of a run, the scheduler is in process 0 and a worker in each, in threads that end with the process. Dask speaks pickle,
so off the loopback it takes mutual TLS only.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import pickle
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm.cluster import fingerprints, ports, watch
from mlm.engine import certificates as pem
from mlm.engine.engine import AGAIN, ONE_THREAD, Engine, available_cores, process_pool
from mlm.errors import InputError, PreemptedError, StopError
from mlm.paths import UPath

CLOSE = 10.0  # seconds to close a worker or the scheduler of a run
ENGINE_PORT = 2  # above that of jax's coordination service, such as 8476
DASHBOARD = "127.0.0.1:0"  # of a run: Dask's HTTP has no TLS of ours
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
NO_CODE = "this code can't be imported by the worker"


# where this process, if it is a worker of a run, runs its tasks
pool: concurrent.futures.Executor | None = None


class DaskEngine(Engine):
    """Runs tasks on a Dask cluster, from the first one on; those of a worker that is lost run again on others."""

    def __init__(self, address: str, security: Any, timeout: float):
        self._address = address
        self._security = security
        self._timeout = timeout
        self._client: Any = None

    @property
    def workers(self) -> int:
        """The threads of all workers that there are now, at least 1."""
        if self._client is None:
            self._open()
        return max(1, self._client.scheduler_info(n_workers=0)["total_threads"])

    def greet(self) -> None:
        """Raises InputError unless the scheduler answers, for which Dask itself may wait forever."""
        quiet()
        from distributed.comm import connect
        from distributed.utils import LoopRunner

        context = (
            self._security.get_connection_args("client")["ssl_context"] if self._security else None
        )

        async def connect_once() -> None:
            opening = connect(self._address, self._timeout, ssl_context=context)
            (await asyncio.wait_for(opening, self._timeout + 1)).abort()

        try:
            LoopRunner().run_sync(connect_once)
        except OSError as error:
            raise InputError(
                f"--engine={self._address}: no Dask scheduler answers within {self._timeout:g} s ("
                f"{error or 'it is silent'}); check the address, the certificates and it."
            ) from None

    def _open(self) -> None:
        self.greet()
        from distributed import Client

        client = Client(
            self._address, security=self._security, timeout=self._timeout, set_as_default=False
        )
        try:
            client.wait_for_workers(1, self._timeout)
        except TimeoutError:
            client.close()
            raise InputError(
                f"--engine={self._address}: the scheduler has no worker after {self._timeout:g} s; "
                "start some, or wait longer."
            ) from None
        self._client = client
        self._executor = client.get_executor(pure=False)

    def close(self) -> None:
        """Leaves the cluster."""
        if self._client is not None:
            self._client.close()

    def _submit(self, function: Callable, item: Any) -> concurrent.futures.Future:
        return self._executor.submit(
            _entry(), fingerprints.worker_fingerprint(), pickle.dumps((function, item))
        )

    def _known(self, error: Exception, label: str) -> StopError | None:
        from distributed import KilledWorker

        if isinstance(error, ImportError) and str(error).startswith(NO_CODE):
            return InputError(f"{label}: {error}.")
        if isinstance(error, KilledWorker):
            return PreemptedError(
                f"{label}: one task killed several workers in turn ({error}); {AGAIN}"
            )
        if isinstance(error, concurrent.futures.CancelledError):
            return PreemptedError(
                f"{label}: the Dask scheduler at {self._address} is lost; {AGAIN}"
            )
        return super()._known(error, label)


@functools.cache
def _entry() -> Callable:
    """Returns what Dask calls: a function without a name, which travels by value, since a worker may lack this code.

    `python -m distributed.cli.dask_worker` finds modules in the folder where it is started, the command `dask worker`
    does not.
    """
    root = fingerprints.ROOT

    def entry(expected: dict[str, str], task: bytes) -> Any:
        try:
            from mlm.engine.dask_engine import run_task
        except ImportError as error:
            raise ImportError(
                f"{NO_CODE} on {socket.gethostname()}, started in {Path.cwd()} ({error}); install requirements.txt for "
                f"{sys.executable} there, and start it as `PYTHONPATH=DIR dask worker ...`, DIR being what holds mlm/ "
                f"({root} here)"
            ) from None
        return run_task(expected, task)

    return entry


def run_task(expected: dict[str, str], task: bytes) -> Any:
    """Runs a task on a worker; raises InputError if its packages and code are not the `expected` ones."""
    if (fingerprint := fingerprints.worker_fingerprint()) != expected:
        where = f"the worker on {socket.gethostname()}, whose code is in {fingerprints.ROOT},"
        raise InputError(
            f"{where} differs in {fingerprints.difference(fingerprint, expected)}; make it alike."
        )
    if pool is not None:  # in a thread of a run's own worker
        return pool.submit(_run, task).result()
    os.environ |= ONE_THREAD
    return _run(task)


def _run(task: bytes) -> Any:
    function, item = pickle.loads(task)
    return function(item)


def connect(
    address: str, *, timeout: float = 60.0, certificates: str = ""
) -> contextlib.closing[DaskEngine]:
    """Opens an engine on the cluster of a scheduler, to which it connects with the first task; raises InputError."""
    security = pem.load_security(UPath(certificates)) if check_address(address) else None
    return contextlib.closing(DaskEngine(address, security, timeout))


@contextlib.contextmanager
def open_run_engine(folder: str, pod: ConfigDict, workers: int) -> Iterator[Engine | None]:
    """Yields the engine in process 0, and None in the others, whose workers run its tasks.

    The body ends with a barrier in all processes. When it raises, nothing is closed: the process ends with its threads.
    Process 0 writes the certificates to `folder`, where the others read them; 0 `workers` are one for each core.
    """
    global pool
    quiet()
    from distributed import Scheduler, Worker
    from distributed.utils import LoopRunner

    service = watch.current.service
    timeout = pod.start_timeout
    place = service.address[0], service.address[1] + ENGINE_PORT
    address = f"tls://{ports.format_address(place)}"
    loop = LoopRunner()
    loop.start()
    servers = []
    if watch.is_primary():
        pem.make(UPath(folder))
        servers.append(
            loop.run_sync(
                Scheduler,
                host=ports.wait_until_free(place, timeout),
                port=place[1],
                protocol="tls",
                security=pem.load_security(UPath(folder)),
                dashboard=False,
                dashboard_address=DASHBOARD,
            )
        )
    watch.barrier("scheduler")
    security = pem.load_security(UPath(folder))
    workers = workers or max(1, available_cores() // service.local_processes)
    with process_pool(workers) as pool:
        try:
            worker = loop.run_sync(
                Worker,
                address,
                security=security,
                host=service.ip,
                port=[place[1], 0],  # 0: any, if the first one is in use
                nthreads=workers,
                name=f"process {watch.current.cluster.process_id}",
                death_timeout=timeout,
                memory_limit=0,
                dashboard_address=DASHBOARD,
            )
        except Exception as error:
            raise StopError(
                f"can't reach host 0's Dask scheduler at {address} ({error}); open its port; a certificate is also "
                "refused where this host's clock is behind."
            ) from None
        servers.insert(0, worker)
        engine = contextlib.closing(DaskEngine(address, security, timeout))
        with engine if watch.is_primary() else contextlib.nullcontext() as opened:
            yield opened
        for server in servers:
            loop.run_sync(_close, server)
    loop.stop()


async def _close(server: Any) -> None:
    with contextlib.suppress(Exception):  # the others close theirs at the same time
        await asyncio.wait_for(server.close(timeout=CLOSE), CLOSE)


def check_address(address: str) -> bool:
    """Returns whether a scheduler's address is one of TLS; raises InputError for plain TCP off the loopback."""
    match = re.fullmatch(r"(tls|tcp)://(\[[0-9a-f:]+\]|[\w.-]+):[0-9]{1,5}", address)
    if match is None:
        raise InputError(
            f"--engine={address}: must be tls://HOST:PORT, the address of a Dask scheduler."
        )
    if match[1] == "tcp" and match[2] not in LOOPBACK:
        raise InputError(
            f"--engine={address}: without TLS, whoever reaches a worker can run code on it; start the cluster with "
            "certificates, and use tls://."
        )
    return match[1] == "tls"


def quiet() -> None:
    """Imports Dask without its log, whose lines stand where ours do, and without a profile of each task."""
    import dask
    import distributed

    del distributed  # it gives its loggers their levels
    dask.config.set({"distributed.worker.profile.enabled": False})
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("distributed", "tornado")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
