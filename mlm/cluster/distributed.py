"""Starting jax in the processes of a run, and stopping all of them at the same step."""

import ctypes
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Self

import jax
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from mlm.cluster import detect, fingerprints, ports, watch
from mlm.entry import Entry
from mlm.errors import InputError
from mlm.workdir import Workdir

MARGIN = 10  # seconds by which jax's own timeouts, which abort a process without a reason, come after ours
SHARE_TIMEOUT = 3_600_000  # milliseconds
SLOW_START = 45.0  # seconds until a warning says that the devices have not started
_compiled: set[tuple] = set()


def initialize(
    config: ConfigDict,
    workdir: Workdir,
    shards: str = "",
    tokenizer: str | None = "",
    *,
    saves: bool,
    entry: Entry | None = None,
) -> None:
    """Joins the processes of a run, if they are alike; must come before anything else touches jax's devices.

    `shards` and `tokenizer` are fingerprints of the data, if any is read; `entry` has the class that is used. One that
    `saves` answers SIGTERM so, and caches its compiled programs in the workdir, unless JAX_COMPILATION_CACHE_DIR names
    another folder.
    """
    pod, current = config.pod, watch.current
    cluster, client = current.cluster, current.client
    current.set_limits(hang=pod.hang, heartbeat=pod.heartbeat if client is not None else 0)
    if client is not None:
        data = {"shards": shards, "tokenizer": tokenizer} | (entry or Entry()).fingerprint()
        host, port = client.ready(fingerprints.host_fingerprint(config, current.command, str(workdir.root), data))
        interface = ports.interface(host) if cluster.process_id == 0 else host
        jax.config.update("jax_enable_preemption_service", saves)  # it handles SIGTERM itself
        jax.distributed.initialize(
            ports.format_address((host, port)),
            cluster.processes,
            cluster.process_id,
            detect.gpus_of(cluster),
            "deactivate",  # jax's own detection
            coordinator_bind_address=ports.format_address((interface, port)),
            initialization_timeout=int(pod.start_timeout),
            heartbeat_timeout_seconds=int(pod.heartbeat) + MARGIN,
            shutdown_timeout_seconds=int(pod.heartbeat) + MARGIN,
        )
    if saves and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(workdir.root / "xla_cache"))
    _start_devices()
    if (jax.process_index(), jax.process_count()) != (cluster.process_id, cluster.processes):
        other = f"its devices are those of process {jax.process_index()} of {jax.process_count()}"
        raise InputError(f"this is {cluster.sentence}, but {other}; start the processes in the platform's order.")


def _start_devices() -> None:
    """Starts the devices, and says so if that takes long: a TPU waits silently for the other hosts of its slice."""
    message = f"mlm {watch.current.command}: the devices have not started for {SLOW_START:g} s"
    if detect.tpu_is_attached():
        message += "; a TPU waits for every host of its slice: is this command running on all of them?"
    timer = threading.Timer(SLOW_START, lambda: print(message, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        jax.devices()
    finally:
        timer.cancel()


def compile_together(function: Any, tree: Any, batch: dict[str, jax.Array]) -> None:
    """Compiles a jitted `(tree, batch) -> ...` on all hosts before any runs it: in the collective it might time out."""
    if watch.current.client is None:
        return
    shapes = (function, *(column.shape for column in batch.values()))
    if shapes not in _compiled:
        function.lower(tree, batch).compile()
        _compiled.add(shapes)
        watch.current.barrier("compiled")


def share_of_primary(step: int, share: int) -> int:
    """Returns process 0's share of the budget on every process: through jax's service, so that no device waits."""
    client = jax_distributed.global_state.client
    if jax.process_count() == 1:
        return share
    if jax.process_index() > 0:
        return int(client.blocking_key_value_get(f"share/{step}", SHARE_TIMEOUT))
    client.key_value_set(f"share/{step}", str(share))
    client.key_value_delete(f"share/{step - 1000}")  # every process has long read it
    return share


class StopSignal:
    """Notices SIGTERM and Ctrl-C, at the same step on every host; a context manager.

    In a single process, a second Ctrl-C ends at once. With several, jax's preemption service agrees on the step: it
    installs its handler of SIGTERM in C, where Python can't see it, and ours must call it.
    """

    def __init__(self) -> None:
        self._requested = False
        self._jax_handler: Callable[[int], None] | None = None
        self._old: dict[int, object] = {}

    def __enter__(self) -> Self:
        if jax.process_count() > 1:
            self._jax_handler = _handler_in_c(signal.SIGTERM)
            if self._jax_handler is None:  # ours would only replace Python's
                return self
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
        watch.current.signaled(signal.Signals(number).name)
        if self._jax_handler is not None:
            self._jax_handler(signal.SIGTERM)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; every host asks at every step."""
        if jax.process_count() == 1:
            return self._requested
        return multihost_utils.reached_preemption_sync_point(step)


def _handler_in_c(number: int) -> Callable[[int], None] | None:
    """Returns the signal handler that a library has installed in C; None for the default, or none."""
    buffer = (ctypes.c_void_p * 64)()  # struct sigaction: the handler comes first, on Linux and on macOS
    if ctypes.CDLL(None).sigaction(number, None, buffer) or buffer[0] in (None, 0, 1):  # the default, ignored
        return None
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(buffer[0])
