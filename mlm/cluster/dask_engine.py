"""An engine on a Dask cluster. Dask speaks pickle, so off the loopback it takes mutual TLS only."""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import ipaddress
import logging
import os
import pickle
import platform
import socket
import ssl
import stat
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mlm.cluster import certificates as pem
from mlm.cluster import fingerprints
from mlm.cluster.engine import AGAIN, Engine
from mlm.errors import InputError, PreemptedError, StopError
from mlm.paths import UPath

RETRY = 0.5  # seconds between two tries to connect
POLL = 2.0  # seconds between two counts of the workers
NO_CODE = "mlm is not on this worker"


pool: concurrent.futures.Executor | None = None  # where this process, if it is a worker of a run, runs its tasks


class WorkerDiffersError(Exception):
    """A worker's packages or code differ; its arguments are the host, the code's folder, `worker_fingerprint` there."""


class DaskEngine(Engine):
    """Runs tasks on a Dask cluster, from the first one on; those of a worker that is lost run again on others."""

    def __init__(self, address: str, security: Any, timeout: float):
        self._address, self._security, self._timeout = address, security, timeout
        self._client: Any = None
        self._workers, self._counted = 1, -POLL

    @property
    def workers(self) -> int:
        """The threads of all workers that there are now, at least 1."""
        if self._client is None:
            self._client = _open_client(self._address, self._security, self._timeout)
            self._executor = self._client.get_executor(pure=False)
        if time.monotonic() - self._counted > POLL:
            self._workers = max(1, self._client.scheduler_info(n_workers=0)["total_threads"])
            self._counted = time.monotonic()
        return self._workers

    def close(self) -> None:
        """Leaves the cluster."""
        if self._client is not None:
            self._client.close()

    def _submit(self, function: Callable, item: Any) -> concurrent.futures.Future:
        key = f"{getattr(function, '__name__', 'task')}-{uuid.uuid4().hex}"
        return self._executor.submit(_entry(), _own_digest(), pickle.dumps((function, item)), key=key)

    def _cancel(self, tasks: Collection[concurrent.futures.Future]) -> None:
        if tasks and self._client.status == "running":  # all at once
            self._executor.shutdown(wait=False)
            self._executor = self._client.get_executor(pure=False)

    def _known(self, error: Exception, label: str) -> StopError | None:
        from distributed import KilledWorker

        if isinstance(error, WorkerDiffersError):
            host, folder, fingerprint = error.args
            _, how = fingerprints.difference({0: fingerprints.worker_fingerprint(), 1: fingerprint})
            return InputError(f"{label}: the worker on {host}, whose code is in {folder}, {how}.")
        if isinstance(error, ImportError) and error.args[:1] == (NO_CODE,):
            _, host, folder, python, missing, why = error.args
            fix = f"install the packages of requirements.txt for {python} there"
            if missing is None or missing.partition(".")[0] == "mlm":
                where = f"the folder that holds mlm/ ({fingerprints.ROOT} here)"
                fix = f"it was started in {folder}: start it as `PYTHONPATH=DIR dask worker ...`, DIR being {where}"
            return InputError(f"{label}: the worker on {host} can't import this code ({why}); {fix}.")
        if isinstance(error, KilledWorker):
            return PreemptedError(f"{label}: one task killed several workers in turn ({error}); {AGAIN}")
        if isinstance(error, concurrent.futures.CancelledError):
            return PreemptedError(f"{label}: the Dask scheduler at {self._address} is lost; {AGAIN}")
        return super()._known(error, label)


@functools.cache
def _entry() -> Callable:
    """Returns what Dask calls: a function without a name, which travels by value, since a worker may lack this code.

    `python -m distributed.cli.dask_worker` finds modules in the folder where it is started, the command `dask worker`
    does not: the code is taken from there, if nobody but the worker's user or root can have put it there.
    """

    def entry(expected: str, task: bytes) -> Any:
        if importlib.util.find_spec("mlm") is None and (Path.cwd() / "mlm").is_dir():
            state = Path.cwd().stat()
            if state.st_uid in (0, os.getuid()) and not state.st_mode & stat.S_IWOTH:
                sys.path.append(str(Path.cwd()))
        try:
            from mlm.cluster.dask_engine import run_task
        except (ImportError, AttributeError) as error:
            missing, host = getattr(error, "name", None), socket.gethostname()
            raise ImportError(NO_CODE, host, str(Path.cwd()), sys.executable, missing, str(error)) from None
        return run_task(expected, task)

    return entry


def run_task(expected: str, task: bytes) -> Any:
    """Runs a task on a worker, if its packages and code are those of the process that has submitted it."""
    if _own_digest() != expected:
        raise WorkerDiffersError(socket.gethostname(), str(fingerprints.ROOT), fingerprints.worker_fingerprint())
    if pool is not None:  # in a thread of a run's own worker
        return pool.submit(_run, task).result()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return _run(task)


def _run(task: bytes) -> Any:
    function, item = pickle.loads(task)
    return function(item)


def connect(
    address: str, *, timeout: float = 60.0, insecure: bool = False, certificates: str = ""
) -> contextlib.closing[DaskEngine]:
    """Opens an engine on the cluster of a scheduler, to which it connects with the first task; raises InputError."""
    return contextlib.closing(DaskEngine(address, _security(address, insecure, certificates), timeout))


def check(address: str, *, timeout: float, insecure: bool, certificates: str) -> None:
    """Raises InputError unless a scheduler answers at the address, with these certificates, within `timeout`."""
    security = _security(address, insecure, certificates)
    quiet()
    _await_greeting(address, security, timeout)


def _security(address: str, insecure: bool, certificates: str) -> Any:
    return security_of(UPath(certificates)) if check_address(address, insecure=insecure) else None


def _open_client(address: str, security: Any, timeout: float) -> Any:
    quiet()
    from distributed import Client

    begin = time.monotonic()
    _await_greeting(address, security, timeout)
    try:
        client = Client(address, security=security, timeout=timeout, set_as_default=False, direct_to_workers=False)
    except (OSError, ValueError) as error:
        raise _nobody(address, timeout, error) from None
    while not client.scheduler_info(n_workers=0)["n_workers"]:
        if time.monotonic() - begin > timeout:
            client.close()
            what = f"the scheduler has no worker after {timeout:g} s (--engine-timeout)"
            raise InputError(f"--engine={address}: {what}; start some, or wait longer.")
        time.sleep(RETRY)
    expected = platform.python_version_tuple()[:2]
    for worker, versions in client.get_versions()["workers"].items():
        python = versions["host"]["python"]
        if tuple(python.split(".")[:2]) != expected:  # it would not understand a function
            raise InputError(f"--engine={address}: the worker {worker} has Python {python}, not {'.'.join(expected)}.")
    return client


def _await_greeting(address: str, security: Any, timeout: float) -> None:
    """Waits until a scheduler answers, for which Dask itself may wait forever; raises InputError."""
    url, deadline = urllib.parse.urlsplit(address), time.monotonic() + timeout
    context = security.get_connection_args("client")["ssl_context"] if security else None
    while True:
        problem: object = "the connection is closed"
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.create_connection((url.hostname, url.port), timeout))
                if context:
                    connection = stack.enter_context(context.wrap_socket(connection))
                if connection.recv(1):
                    return
        except ssl.SSLError as error:
            reason = f"what listens there has other certificates, or none ({error.reason})"
            raise InputError(f"--engine={address}: {reason}; --engine-certificates=DIR names its own.") from None
        except OSError as error:
            problem = error
        if time.monotonic() > deadline:
            raise _nobody(address, timeout, problem)
        time.sleep(RETRY)


def _nobody(address: str, timeout: float, problem: object) -> InputError:
    what = f"no Dask scheduler answers there within {timeout:g} s (--engine-timeout; {problem})"
    return InputError(f"--engine={address}: {what}; check the address and the scheduler.")


def check_address(address: str, *, insecure: bool) -> bool:
    """Returns whether a scheduler's address is one of TLS; raises InputError for plain TCP off the loopback."""
    try:
        url = urllib.parse.urlsplit(address)
        valid = url.scheme in ("tls", "tcp") and url.hostname and url.port and url.netloc == address[6:]
    except ValueError:
        valid = False
    if not valid or url.username is not None:
        raise InputError(f"--engine={address}: must be tls://HOST:PORT, the address of a Dask scheduler.")
    if url.scheme == "tls":
        return True
    try:
        ips = {entry[4][0].partition("%")[0] for entry in socket.getaddrinfo(url.hostname, url.port)}
    except OSError as error:
        raise InputError(f"--engine={address}: the host's name does not resolve ({error.strerror}).") from None
    if not insecure and not all(ipaddress.ip_address(ip).is_loopback for ip in ips):
        fix = "use tls://, or give --engine-insecure where nobody else is on the network"
        raise InputError(f"--engine={address}: without TLS, whoever reaches a worker can run code on it; {fix}.")
    return False


def security_of(folder: Any) -> Any:
    """Returns Dask's mutual TLS with the certificates in a folder."""
    from distributed.security import Security

    authority, certificate, key = pem.read(folder).values()
    return Security(
        require_encryption=True,
        tls_ca_file=authority,
        tls_client_cert=certificate,
        tls_client_key=key,
        tls_scheduler_cert=certificate,
        tls_scheduler_key=key,
        tls_worker_cert=certificate,
        tls_worker_key=key,
    )


def quiet() -> None:
    """Imports Dask without its log, whose lines stand where ours do, and without a profile of each task."""
    import dask
    import distributed

    del distributed  # it gives its loggers their levels
    dask.config.set({"distributed.worker.profile.enabled": False})
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(("distributed", "tornado"))]:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@functools.cache
def _own_digest() -> str:
    return hashlib.sha256(repr(fingerprints.worker_fingerprint()).encode()).hexdigest()
