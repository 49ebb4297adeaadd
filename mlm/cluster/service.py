"""jax's coordination service, where the processes of a run meet, agree, wait for one another and end together.

Process 0 runs it, and each process is its client from the beginning of a command. Its store holds, for process I:
    host/I            the name of its host
    NAME/I            what it must have in common with the others, see `agree`; NAME digest/I is the SHA-256
    hung/I            it makes no progress, and where
    heard/I           it knows the cause
    cause             why the run ends; whoever fails first writes it, and nobody replaces it
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import hashlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as jax_distributed
from jax.errors import JaxRuntimeError
from ml_collections import ConfigDict

from mlm.cluster import detect, fingerprints, ports
from mlm.cluster.detect import Cluster
from mlm.cluster.termination import Termination
from mlm.errors import StopError
from mlm.text import printable

FOREVER = 10**12  # milliseconds
PRIMARY_DONE, OTHERS_DONE = "process 0 is done", "the others are done"  # barriers, see `Service._wait_for_loss`
# A loss in the words of a barrier that fails by it, of one that ends, and of the error that all clients poll.
LOST = re.compile(r"(?:Task |, Task: |stopped sending heartbeats\):\s*)(\d+)")
LINGER = 5.0  # seconds for which process 0 waits until the others know the cause
LATER = 10  # seconds by which the others wait longer than process 0, which can say who is missing
EXIT = 0.5  # seconds for them to exit
COLLECT = 2.0  # seconds for several processes to report that they hang, before the one that is behind is named
ABORT_WAIT = 2.0  # seconds in which a process that jax aborts still finds out why


class Service:
    """This process's client of the service, and in process 0 the service. Two threads wait: for the cause, for a loss.

    jax's client aborts a process that has lost the others, without a word that Python hears: the handler of SIGABRT
    gives the threads time to name who is lost, and ends the process with a sentence and an exit code.
    """

    def __init__(self, cluster: Cluster, pod: ConfigDict, on_end: Callable[[Termination], None]):
        """Meets the other processes.

        `on_end` is called in a thread when the run ends, unless by `notify`; it ends this process. Raises InputError
        or StopError if process 0 can't listen, or does not answer.
        """
        self._cluster, self._on_end, self._pod = cluster, on_end, pod
        self._address = host, port = ports.parse_address(cluster.coordinator, pod.port)
        self._client: Any = None
        self._hosts: dict[int, str] = {}
        self._barriers = 0  # passed
        self._closed = self._leaving = self._lost = False
        is_primary = cluster.process_id == 0
        self._arrives_at, self._waits_at = (PRIMARY_DONE, OTHERS_DONE) if is_primary else (OTHERS_DONE, PRIMARY_DONE)
        if is_primary:
            ports.wait_until_free(self._address, pod.start_timeout)
        else:
            ports.wait_for_host_0(self._address, pod.start_timeout)
        self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._abort)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._abort_handler)
        python_handler = signal.getsignal(signal.SIGTERM)
        jax.distributed.initialize(
            ports.format_address(self._address),
            cluster.processes,
            cluster.process_id,
            detect.gpus_of(cluster),
            "deactivate",  # jax's own detection
            coordinator_bind_address=ports.format_address((ports.interface(host) if is_primary else host, port)),
            initialization_timeout=int(pod.start_timeout) + (0 if is_primary else LATER),
            heartbeat_timeout_seconds=int(pod.heartbeat),
            shutdown_timeout_seconds=int(pod.heartbeat),
        )
        self.jax_sigterm = handler_in_c(signal.SIGTERM)  # of its preemption service, which the training loop asks
        signal.signal(signal.SIGTERM, python_handler)
        self._client = jax_distributed.global_state.client
        self._client.key_value_set(f"host/{cluster.process_id}", printable(socket.gethostname()))
        self.barrier("met")
        self._hosts = self._read("host/")
        waits = (self._wait_for_cause, self._wait_for_loss)
        self._threads = [threading.Thread(target=wait, daemon=True, name=wait.__name__) for wait in waits]
        for thread in self._threads:
            thread.start()

    def agree(self, name: str, fingerprint: dict[str, Any]) -> None:
        """Returns when all processes have come with the same {readable name: value}; else ends the run, with code 2."""
        client, text = self._client, json.dumps(fingerprint, default=str)
        client.key_value_set(f"{name}/{self._cluster.process_id}", text)
        client.key_value_set(f"{name} digest/{self._cluster.process_id}", hashlib.sha256(text.encode()).hexdigest())
        self.barrier(f"{name} is known")
        if self._cluster.process_id == 0:
            digests = self._read(f"{name} digest/")
            examples = {digest: process for process, digest in digests.items()}  # few, whatever the number of hosts
            values = {d: json.loads(client.blocking_key_value_get(f"{name}/{p}", FOREVER)) for d, p in examples.items()}
            difference = fingerprints.difference({process: values[digest] for process, digest in digests.items()})
            if difference is not None:
                process, sentence = difference
                self._set_cause(Termination(process, self._hosts[process], "exception", 2, printable(sentence)))
                self.wait_for_end()
        self.barrier(f"{name} is the same")

    def _read(self, folder: str) -> dict[int, str]:
        """Returns {process: value} of the keys FOLDER/PROCESS."""
        return {int(key.rpartition("/")[2]): value for key, value in self._client.key_value_dir_get(folder)}

    def barrier(self, name: str) -> None:
        """Waits until all have come here; they come to all barriers in the same order."""
        self._barriers += 1
        try:
            self._client.wait_at_barrier(f"{self._barriers} {name}", FOREVER)
        except JaxRuntimeError as error:
            self.wait_for_end()
            raise StopError(f"the other processes of the run can't be reached ({error}).") from None

    def from_primary(self, name: str, number: int, value: int) -> int:
        """Returns process 0's value of this name and number on every process; numbers go up."""
        if self._cluster.process_id > 0:
            return int(self._client.blocking_key_value_get(f"{name}/{number}", FOREVER))
        self._client.key_value_set(f"{name}/{number}", str(value))
        self._client.key_value_delete(f"{name}/{number - 1000}")  # every process has long read it
        return value

    def wait_for_end(self) -> None:
        """Waits for the end of this process where another one may be the cause, until its heartbeats are missed."""
        time.sleep(2 * self._pod.heartbeat)

    def notify(self, termination: Termination) -> None:
        """Notifies the others that this process ends the run, unless another was first."""
        process = self._cluster.process_id
        self._leaving = True
        with contextlib.suppress(JaxRuntimeError):
            if termination.kind == "hang":  # the others stand still too, and will report it
                self._client.key_value_set(f"hung/{process}", json.dumps(dataclasses.asdict(termination)))
                time.sleep(COLLECT)
                termination = min(map(Termination.read, self._read("hung/").values()), key=lambda hung: hung.position)
            self._set_cause(termination)
        self.leave()

    def leave(self) -> None:
        """Returns when this process may exit: process 0, whose end is that of the service, lets the others go first."""
        if self._client is None or self._lost:  # each finds out by itself
            return
        self._leaving = True
        if self._cluster.process_id > 0:
            with contextlib.suppress(JaxRuntimeError):
                self._client.key_value_set(f"heard/{self._cluster.process_id}", "", allow_overwrite=True)
            return
        deadline = time.monotonic() + LINGER
        for process in range(1, self._cluster.processes):
            with contextlib.suppress(JaxRuntimeError):
                remaining = max(1, int(1000 * (deadline - time.monotonic())))
                self._client.blocking_key_value_get(f"heard/{process}", remaining)
        time.sleep(EXIT)

    def close(self) -> None:
        """Waits until all processes are done, and ends the service."""
        with contextlib.suppress(JaxRuntimeError):
            self._client.wait_at_barrier(self._arrives_at, FOREVER)
            self._threads[1].join()
        self._closed = True
        jax.distributed.shutdown()
        for thread in self._threads:  # Python's own exit must not meet them in C
            thread.join(LINGER)

    def _set_cause(self, termination: Termination) -> None:
        with contextlib.suppress(JaxRuntimeError):  # another was first
            self._client.key_value_set("cause", json.dumps(dataclasses.asdict(termination)))

    def _wait_for_cause(self) -> None:
        with contextlib.suppress(JaxRuntimeError):
            self._on_end(Termination.read(self._client.blocking_key_value_get("cause", FOREVER)))

    def _wait_for_loss(self) -> None:
        """Waits where the others, or process 0, arrive when they are done: a barrier fails as soon as one is lost."""
        try:
            self._client.wait_at_barrier(self._waits_at, FOREVER)
        except JaxRuntimeError as error:
            if self._closed:
                return
            match = LOST.search(str(error))
            if match is not None or self._cluster.process_id > 0:  # whose service is gone
                self._lose(int(match[1]) if match else 0)
            self._lost = True
            self._on_end(Termination(0, self._hosts[0], "exception", 1, printable(str(error))))

    def _lose(self, process: int) -> None:
        self._lost = True
        what = f"is lost: no sign of life for up to {self._pod.heartbeat:g} s (it was killed, or is stopped or cut off)"
        self._on_end(Termination(process, self._hosts.get(process, self._address[0]), "lost", 1, what))

    def _abort(self, number: int) -> None:
        """Handles SIGABRT, in a thread of C; returns if it was not jax's service that asked for it."""
        if self._leaving or self._lost:  # another thread ends this process, and knows why
            time.sleep(LINGER)
        host, process = printable(socket.gethostname()), self._cluster.process_id
        if self._client is None:
            self._on_end(Termination(process, host, "exception", 1, self._why_nobody_met()))
            return
        is_reachable = threading.Event()

        def probe() -> None:
            self._client.key_value_set(f"abort/{process}", "")
            is_reachable.set()

        threading.Thread(target=probe, daemon=True).start()
        time.sleep(ABORT_WAIT)
        if not is_reachable.is_set():
            self._lose(0)
        faulthandler.dump_traceback()
        self._set_cause(Termination(process, host, "exception", 1, "was aborted: the lines before this one say why"))
        time.sleep(ABORT_WAIT)

    def _why_nobody_met(self) -> str:
        """Returns a sentence for a process that jax's service has not admitted in time, or at all."""
        place, count, process = ports.format_address(self._address), self._cluster.processes, self._cluster.process_id
        limit = f"within {self._pod.start_timeout:g} s (config.pod.start_timeout)"
        if process > 0:
            refused = f"host 0 at {place} did not start the run with process {process} of {count} {limit}"
            return f"{refused}; its own last line says who is missing, jax's above whether it refuses this process"
        addresses = ports.connected(self._address[1])
        ips = {ip for ip, _ in addresses}
        if len(addresses) <= 1:
            missing = "host 1" if count == 2 else f"hosts 1 to {count - 1}"
        elif self._cluster.hosts:
            numbers = [str(i) for i, host in enumerate(self._cluster.hosts) if not ips & ports.addresses_of(host)]
            missing = f"{'host' if len(numbers) == 1 else 'hosts'} {', '.join(numbers)}"
        else:
            missing = f"{count - len(addresses)} of {count} hosts (all but {', '.join(sorted(ips))})"
        return f"{limit} {missing} never connected to {place}; look there for the reason"


def handler_in_c(number: int) -> Callable[[int], None] | None:
    """Returns the signal handler that a library has installed in C; None for the default, or none."""
    buffer = (ctypes.c_void_p * 64)()  # struct sigaction: the handler comes first, on Linux and on macOS
    if ctypes.CDLL(None).sigaction(number, None, buffer) or buffer[0] in (None, 0, 1):  # the default, ignored
        return None
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(buffer[0])
