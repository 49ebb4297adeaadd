"""The engine of a run of several processes: Dask's scheduler in process 0 and a worker in each, while data is made.

Both live in threads and end with the process. They listen on config.pod.engine_port.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from mlm.cluster import certificates, dask_engine, ports, watch
from mlm.cluster.engine import Engine, available_cores, process_pool
from mlm.errors import StopError
from mlm.paths import UPath

NEWS = 10.0  # seconds for the reason why a scheduler is lost to come from process 0
CLOSE = 10.0  # seconds to close a worker or the scheduler
DASHBOARD = "127.0.0.1:0"  # Dask's HTTP has no TLS of ours


@contextlib.contextmanager
def open_run_engine(folder: str, pod: ConfigDict, workers: int) -> Iterator[Engine | None]:
    """Yields the engine in process 0, and None in the others, whose workers run its tasks.

    The body ends with a barrier in all processes. When it raises, nothing is closed: the process ends with its threads.
    Process 0 writes the certificates to `folder`, where the others read them; 0 `workers` are one for each core.
    """
    dask_engine.quiet()
    from distributed import Scheduler, Worker
    from distributed.utils import LoopRunner

    place, engine_port, timeout = watch.current.cluster, pod.engine_port, pod.start_timeout
    host, _ = ports.parse_address(place.coordinator, pod.port)
    address = f"tls://{ports.format_address((host, engine_port))}"
    loop = LoopRunner(asynchronous=False)
    loop.start()
    scheduler = None
    if watch.is_primary():
        certificates.make(UPath(folder))
        ports.wait_until_free((host, engine_port), timeout, key="config.pod.engine_port")
        scheduler = loop.run_sync(
            Scheduler,
            host=ports.interface(host),
            port=engine_port,
            protocol="tls",
            security=dask_engine.security_of(UPath(folder)),
            dashboard=False,
            dashboard_address=DASHBOARD,
        )
    watch.barrier("scheduler")
    security = dask_engine.security_of(UPath(folder))
    workers = workers or max(1, available_cores() // place.local_processes)
    with process_pool(workers) as dask_engine.pool:
        make_worker = functools.partial(
            Worker,
            address,
            security=security,
            host=_local_address(host, engine_port),
            port=[engine_port, 0],  # 0: any, if the first one is in use
            nthreads=workers,
            name=f"process {place.process_id}",
            death_timeout=timeout,
            memory_limit=0,
            dashboard=False,
            dashboard_address=DASHBOARD,
        )
        worker = loop.run_sync(_start_worker, address, make_worker)
        context = contextlib.closing(dask_engine.DaskEngine(address, security, timeout))
        with context if scheduler else contextlib.nullcontext() as engine:
            yield engine
        loop.run_sync(_close, worker)
    if scheduler is not None:
        loop.run_sync(_close, scheduler)
    loop.stop()


async def _start_worker(address: str, make_worker: Callable[[], Any]) -> Any:
    """Starts a worker; ends this process if the worker ends by itself."""
    try:
        worker = await make_worker()
    except Exception as error:
        raise StopError(f"can't reach the Dask scheduler of host 0 at {address} ({error}); open its port.") from None
    worker.guard = asyncio.create_task(_guard(worker))
    return worker


async def _guard(worker: Any) -> None:
    await worker.finished()
    await asyncio.sleep(NEWS)
    what = "the connection to the Dask scheduler of host 0 is lost"
    watch.current.end_now("exception", what, f"{what}; start the same command again.")


async def _close(server: Any) -> None:
    if guard := getattr(server, "guard", None):
        guard.cancel()
    with contextlib.suppress(Exception):  # the others close theirs at the same time
        await asyncio.wait_for(server.close(timeout=CLOSE), CLOSE)


def _local_address(host: str, port: int) -> str:
    """Returns the address from which this machine reaches another."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
