"""jax's coordination service, where the processes of a run meet, agree, wait for one another and end together.

Process 0 runs it, and each process is its client from the beginning of a command. Its store holds, for process I:
    host/I            the name of its host
    NAME/I            the digest of what it must have in common with the others, see `agree`; NAME DIGEST is the content
    hung/I            it makes no progress, and where
    cause             why the run ends; whoever fails first writes it, and nobody replaces it
A process that is killed writes nothing: jax misses it after the heartbeat, says so, and aborts the others.
"""

import contextlib
import datetime
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
from jax._src import distributed as jax_distributed
from jax.errors import JaxRuntimeError
from ml_collections import ConfigDict

from mlm.cluster import fingerprints, ports
from mlm.cluster.detect import Cluster
from mlm.cluster.termination import Termination
from mlm.errors import StopError
from mlm.text import printable

FOREVER = 10**12  # milliseconds
# what jax's preemption service waits for (tsl's preemption_sync_manager.cc)
STOP = "RECEIVED_PREEMPTION_NOTICE"
# It is a time, until 15 minutes before which jax waits, by its own clock; clocks differ, but this is past on all.
AT_ONCE = datetime.datetime.fromtimestamp(0, datetime.UTC).isoformat()
NO_PROXY = "no_grpc_proxy"  # the variable of gRPC
LINGER = 3.0  # seconds for which process 0 waits until the others know the cause and have gone
LATER = 5  # seconds by which the others wait longer than process 0, which can say who has come
# seconds for several processes to report that they hang, before the one that is behind is named
COLLECT = 2.0


class Service:
    """This process's client of the service, and in process 0 the service. A thread waits for the cause of an end."""

    def __init__(self, cluster: Cluster, pod: ConfigDict, on_end: Callable[[Termination], None]):
        """Meets the other processes.

        `on_end` is called in a thread when the run ends, unless by `notify`; it ends this process. Raises InputError
        or StopError if process 0 can't listen, or does not answer.
        """
        self._on_end = on_end
        self._heartbeat = pod.heartbeat
        self._process = cluster.process_id
        self._client: Any = None
        self._barriers = 0  # passed
        self.address = ports.parse_address(cluster.coordinator, pod.port)
        is_primary = self._process == 0
        wait = ports.wait_until_free if is_primary else ports.wait_for_host_0
        # where process 0 listens, and how another one reaches it
        self.ip = wait(self.address, pod.start_timeout)
        # gRPC would ask $http_proxy for the way to process 0; where this is set, it does not read $no_proxy.
        excepted = os.environ.get(NO_PROXY) or os.environ.get("no_proxy") or ""
        os.environ[NO_PROXY] = f"{excepted},{self.address[0]}".lstrip(",")
        jax.config.update("jax_check_proxy_envs", False)  # a warning about these variables
        try:
            _call(
                jax.distributed.initialize,
                ports.format_address(self.address),
                cluster.processes,
                self._process,
                timeout=pod.start_timeout + (0 if is_primary else LATER),
                cluster_detection_method="deactivate",
                coordinator_bind_address=ports.format_address((self.ip, self.address[1])),
                # then jax aborts, and names nobody
                initialization_timeout=int(pod.start_timeout) + 2 * LATER,
                heartbeat_timeout_seconds=int(pod.heartbeat),
                shutdown_timeout_seconds=int(pod.heartbeat),
            )
        except TimeoutError:
            raise StopError(
                f"not all of {cluster.processes} processes have come to host 0 at {cluster.coordinator} within "
                f"{pod.start_timeout:g} s (config.pod.start_timeout); the others' last lines say why."
            ) from None
        # jax has put its own handler in the place of Python's.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        self._client = jax_distributed.global_state.client
        self._client.key_value_set(f"host/{self._process}", printable(socket.gethostname()))
        self.barrier("met")
        self._hosts = self._read("host/")
        name = self._hosts[self._process]
        here = [process for process, host in self._hosts.items() if host == name]
        self.local_processes = len(here)
        if len(here) > 1 and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
            # One GPU for each process of this machine. jax does so for every task of Slurm, even if it is alone.
            jax.config.update("jax_cuda_visible_devices", str(here.index(self._process)))
            jax.config.update("jax_rocm_visible_devices", str(here.index(self._process)))
        self._thread = threading.Thread(target=self._wait_for_cause, daemon=True)
        self._thread.start()

    def agree(self, name: str, fingerprint: dict[str, Any]) -> None:
        """Returns when all processes have come with the same {readable name: value}; else ends the run, with code 2."""
        text = json.dumps(fingerprint, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._client.key_value_set(f"{name} {digest}", text, allow_overwrite=True)
        self._client.key_value_set(f"{name}/{self._process}", digest)
        self.barrier(f"{name} is known")
        digests = self._read(f"{name}/")
        usual = Counter(digests.values()).most_common(1)[0][0]
        odd = [process for process in digests if digests[process] != usual]
        if not odd:
            return
        theirs, expected = (
            json.loads(self._client.blocking_key_value_get(f"{name} {digest}", FOREVER))
            for digest in (digests[odd[0]], usual)
        )
        what = f"differs from {len(digests) - len(odd)} of {len(digests)} hosts in "
        what += printable(fingerprints.difference(theirs, expected))
        what += "".join(f"; so does host {process}" for process in odd[1:])
        what += "; make all hosts alike."
        # every process finds the same, and ends itself
        host = self._hosts[odd[0]]
        self._on_end(Termination(odd[0], host, "exception", 2, what, time.time()))
        self.wait_for_end()

    def _read(self, folder: str) -> dict[int, str]:
        """Returns {process: value} of the keys FOLDER/PROCESS, in their order."""
        pairs = self._client.key_value_dir_get(folder)
        return dict(sorted((int(key.rpartition("/")[2]), value) for key, value in pairs))

    def barrier(self, name: str) -> None:
        """Waits until all have come here; they come to all barriers in the same order."""
        self._barriers += 1
        try:
            _call(self._client.wait_at_barrier, f"{self._barriers} {name}", FOREVER)
        except JaxRuntimeError as error:
            self.wait_for_end()
            raise StopError(f"the other processes of the run can't be reached ({error}).") from None

    def stop_all(self) -> None:
        """Has jax's preemption service find the step after which all stop, see `distributed.StopSignal`."""
        with contextlib.suppress(JaxRuntimeError):  # it has been asked
            self._client.key_value_set(STOP, AT_ONCE)

    def wait_for_end(self) -> None:
        """Waits for the end of this process where another one may be the cause, until its heartbeats are missed."""
        time.sleep(2 * self._heartbeat)

    def notify(self, termination: Termination) -> None:
        """Notifies the others that this process ends; process 0, whose end is the service's, lets them go first."""
        if self._client is None:
            return
        with contextlib.suppress(JaxRuntimeError):
            if termination.kind == "hang":  # the others stand still too, and will report it
                self._client.key_value_set(f"hung/{self._process}", termination.text)
                time.sleep(COLLECT)
                hung = map(Termination.read, self._read("hung/").values())
                termination = min(hung, key=lambda hung: hung.position)
            # an error if another was first
            self._client.key_value_set("cause", termination.text)
        if self._process == 0:
            time.sleep(LINGER)

    def close(self) -> None:
        """Waits until all processes are done, and ends the service."""
        with contextlib.suppress(StopError):
            self.barrier("done")
        jax.distributed.shutdown()
        self._thread.join(LINGER)  # Python's own exit must not meet it in C

    def _wait_for_cause(self) -> None:
        with contextlib.suppress(JaxRuntimeError):
            cause = self._client.blocking_key_value_get_bytes("cause", FOREVER)
            self._on_end(Termination.read(cause.decode(errors="replace")))


def _call(
    wait: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
) -> None:
    """Calls what waits in C for the others; not in the main thread, which would hear of no signal meanwhile."""
    done: Future[None] = Future()

    def call() -> None:
        try:
            wait(*args, **kwargs)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    done.result(timeout)
