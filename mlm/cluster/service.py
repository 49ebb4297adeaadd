"""jax's coordination service, where the processes of a run meet, agree, wait for one another and end together.

Process 0 runs it, and each process is its client from the beginning of a command. Its store holds, for process I:
    host/I            the name of its host
    NAME/I            the digest of what it must have in common with the others, see `agree`; NAME DIGEST is the content
    hung/I            it makes no progress, and where
    heard/I           it knows the cause
    cause             why the run ends; whoever fails first writes it, and nobody replaces it
"""

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import hashlib
import json
import os
import re
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
STOP = "RECEIVED_PREEMPTION_NOTICE"  # what jax's preemption service waits for (tsl's preemption_sync_manager.cc)
PRIMARY_DONE, OTHERS_DONE = "process 0 is done", "the others are done"  # barriers, see `Service._wait_for_loss`
# A loss in the words of a barrier that fails by it, of one that ends, and of the error that all clients poll.
LOST = re.compile(r"(?:Task |, Task: |stopped sending heartbeats\):\s*)(\d+)")
LINGER = 5.0  # seconds for which process 0 waits until the others know the cause
EXIT = 0.5  # seconds for them to exit
LATER = 10  # seconds by which the others wait longer than process 0, which can say who is missing
COLLECT = 2.0  # seconds for several processes to report that they hang, before the one that is behind is named
ABORT_WAIT = 2.5  # seconds in which a process that jax aborts still finds out why


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
        self.address, self._process = ports.parse_address(cluster.coordinator, pod.port), cluster.process_id
        self._client: Any = None
        self._hosts: dict[int, str] = {}
        self._barriers = 0  # passed
        self._is_lost = False  # this process, or another one
        self._is_deaf = False  # no answer of the service can be read any more
        self._exit_code = 1  # of this process, once `notify` tells why it ends
        is_primary = self._process == 0
        self._arrives_at, self._waits_at = (PRIMARY_DONE, OTHERS_DONE) if is_primary else (OTHERS_DONE, PRIMARY_DONE)
        wait = ports.wait_until_free if is_primary else ports.wait_for_host_0
        self.ip = wait(self.address, pod.start_timeout)  # where process 0 listens, and how another one reaches it
        self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._abort)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._abort_handler)
        _call(
            jax.distributed.initialize,
            ports.format_address(self.address),
            cluster.processes,
            self._process,
            cluster_detection_method="deactivate",
            coordinator_bind_address=ports.format_address((self.ip, self.address[1])),
            initialization_timeout=int(pod.start_timeout) + (0 if is_primary else LATER),
            heartbeat_timeout_seconds=int(pod.heartbeat),
            shutdown_timeout_seconds=int(pod.heartbeat),
        )
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # jax has put its own in the place of Python's
        self._client = jax_distributed.global_state.client
        self._client.key_value_set(f"host/{self._process}", printable(socket.gethostname()))
        self.barrier("met")
        self._hosts = self._read("host/")
        here = [process for process, host in sorted(self._hosts.items()) if host == self._hosts[self._process]]
        self.local_processes = len(here)
        if len(here) > 1 and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ","):  # as jax: one GPU for each process
            jax.config.update("jax_cuda_visible_devices", str(here.index(self._process)))
            jax.config.update("jax_rocm_visible_devices", str(here.index(self._process)))
        waits = (self._wait_for_cause, self._wait_for_loss)
        self._threads = [threading.Thread(target=wait, daemon=True) for wait in waits]
        for thread in self._threads:
            thread.start()

    def agree(self, name: str, fingerprint: dict[str, Any]) -> None:
        """Returns when all processes have come with the same {readable name: value}; else ends the run, with code 2."""
        text = json.dumps(fingerprint, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._client.key_value_set(f"{name} {digest}", text, allow_overwrite=True)
        self._client.key_value_set(f"{name}/{self._process}", digest)
        self.barrier(f"{name} is known")
        if self._process == 0:
            digests = self._read(f"{name}/")
            usual = Counter(digests.values()).most_common(1)[0][0]
            if odd := [process for process in sorted(digests) if digests[process] != usual]:
                values = (f"{name} {digest}" for digest in (digests[odd[0]], usual))
                theirs, expected = (json.loads(self._client.blocking_key_value_get(key, FOREVER)) for key in values)
                what = f"differs from {len(digests) - len(odd)} of {len(digests)} hosts in "
                what += printable(fingerprints.difference(theirs, expected))
                what += "".join(f"; so does host {process}" for process in odd[1:])
                cause = Termination(odd[0], self._hosts[odd[0]], "exception", 2, f"{what}; make all hosts alike.")
                with contextlib.suppress(JaxRuntimeError):  # another was first
                    self._client.key_value_set("cause", cause.text)
                self.wait_for_end()
        self.barrier(f"{name} is the same")

    def _read(self, folder: str) -> dict[int, str]:
        """Returns {process: value} of the keys FOLDER/PROCESS."""
        return {int(key.rpartition("/")[2]): value for key, value in self._client.key_value_dir_get(folder)}

    def barrier(self, name: str) -> None:
        """Waits until all have come here; they come to all barriers in the same order."""
        self._barriers += 1
        try:
            _call(self._client.wait_at_barrier, f"{self._barriers} {name}", FOREVER)
        except JaxRuntimeError as error:
            self.wait_for_end()
            raise StopError(f"the other processes of the run can't be reached ({error}).") from None

    def from_primary(self, name: str, number: int, value: int) -> int:
        """Returns process 0's value of this name and number on every process; numbers go up."""
        if self._process > 0:
            return int(self._client.blocking_key_value_get(f"{name}/{number}", FOREVER))
        self._client.key_value_set(f"{name}/{number}", str(value))
        self._client.key_value_delete(f"{name}/{number - 1000}")  # every process has long read it
        return value

    def stop_all(self) -> None:
        """Has jax's preemption service find the step after which all stop, see `distributed.StopSignal`."""
        with contextlib.suppress(JaxRuntimeError):  # it has been asked
            self._client.key_value_set(STOP, datetime.datetime.now(datetime.UTC).isoformat())

    def wait_for_end(self) -> None:
        """Waits for the end of this process where another one may be the cause, until its heartbeats are missed."""
        time.sleep(2 * self._pod.heartbeat)

    def notify(self, termination: Termination) -> None:
        """Notifies the others that this process ends; process 0, whose end is the service's, lets them go first."""
        self._exit_code = termination.code
        if self._client is None or self._is_deaf or (self._is_lost and self._process > 0):  # each finds out by itself
            return
        with contextlib.suppress(JaxRuntimeError):
            if termination.kind == "hang":  # the others stand still too, and will report it
                self._client.key_value_set(f"hung/{self._process}", termination.text)
                time.sleep(COLLECT)
                termination = min(map(Termination.read, self._read("hung/").values()), key=lambda hung: hung.position)
            if termination.kind != "peer":
                self._client.key_value_set("cause", termination.text)  # an error if another was first
        if self._process > 0:
            with contextlib.suppress(JaxRuntimeError):
                self._client.key_value_set(f"heard/{self._process}", "", allow_overwrite=True)
            return
        deadline = time.monotonic() + (ABORT_WAIT if self._is_lost else LINGER)
        for process in range(1, self._cluster.processes):
            with contextlib.suppress(JaxRuntimeError):
                remaining = max(1, int(1000 * (deadline - time.monotonic())))
                self._client.blocking_key_value_get(f"heard/{process}", remaining)
        time.sleep(EXIT)

    def close(self) -> None:
        """Waits until all processes are done, and ends the service."""
        try:
            self._client.wait_at_barrier(self._arrives_at, FOREVER)
        except JaxRuntimeError:
            self.wait_for_end()
        for_cause, for_loss = self._threads
        for_loss.join()
        jax.distributed.shutdown()
        for_cause.join(LINGER)  # Python's own exit must not meet it in C

    def _wait_for_cause(self) -> None:
        with contextlib.suppress(JaxRuntimeError):
            cause = self._client.blocking_key_value_get_bytes("cause", FOREVER)
            self._on_end(Termination.read(cause.decode(errors="replace")))

    def _wait_for_loss(self) -> None:
        """Waits where the others, or process 0, arrive when they are done: a barrier fails as soon as one is lost."""
        try:
            self._client.wait_at_barrier(self._waits_at, FOREVER)
        except JaxRuntimeError as error:
            match = LOST.search(str(error))
            if match is not None or self._process > 0:  # whose service is gone
                self._lose(int(match[1]) if match else 0)
            self._on_end(Termination(0, self._hosts[0], "exception", 1, printable(str(error))))

    def _lose(self, process: int) -> None:
        self._is_lost = True
        what = f"is lost: no sign of life for up to {self._pod.heartbeat:g} s (it was killed, or is stopped or cut off)"
        self._on_end(Termination(process, self._hosts.get(process, self.address[0]), "lost", 1, what))

    def _abort(self, number: int) -> None:
        """Handles SIGABRT, in a thread of C; returns if it was not jax's service that asked for it."""
        end = functools.partial(Termination, self._process, printable(socket.gethostname()))
        if self._client is None:
            self._on_end(end("exception", 1, self._why_nobody_met()))
        has_answered = threading.Event()

        def ask() -> None:
            self._client.key_value_set(f"abort/{self._process}", "")
            has_answered.set()

        threading.Thread(target=ask, daemon=True).start()
        is_served = self._process == 0 or ports.speaks_first(self.address, ABORT_WAIT)
        if not has_answered.wait(ABORT_WAIT):
            if not is_served:
                self._lose(0)
            self._is_deaf = True  # this thread is the one that reads them, and which host is lost is in jax's log alone
            self._on_end(end("peer", 1, "another host is lost; jax's lines above give its number"))
            os._exit(self._exit_code)  # another thread ends this process, and waits for an answer
        elif not self._is_lost:
            faulthandler.dump_traceback()
            self.notify(end("exception", 1, "was aborted: the lines above say why"))
        time.sleep(LINGER)  # another thread may be ending this process, and knows why

    def _why_nobody_met(self) -> str:
        """Returns a sentence for a process that jax's service has not admitted in time, or at all."""
        place, count = ports.format_address(self.address), self._cluster.processes
        limit = f"within {self._pod.start_timeout:g} s (config.pod.start_timeout)"
        if self._process > 0:
            refused = f"host 0 at {place} did not start the run with process {self._process} of {count} {limit}"
            return f"{refused}; its own last line says who is missing, jax's above whether it refuses this process"
        ips, hosts = ports.connected(self.address[1]), enumerate(self._cluster.hosts)
        missing = [f"host {i} ({host})" for i, host in hosts if ports.addresses_of(host).isdisjoint(ips)]
        who = ", ".join(missing) or f"{count - len(ips)} of {count} hosts (all but {', '.join(sorted(set(ips)))})"
        return f"{limit} {who} never connected to {place}; look there for the reason"


def _call(wait: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls what waits in C for the others; not in the main thread, which would hear of no signal meanwhile."""
    done: Future[None] = Future()

    def call() -> None:
        try:
            wait(*args, **kwargs)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    done.result()
