"""Start-up of the processes of a run, and their common answer to "stop"."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from mlm.cluster import detect, fingerprints, ports, watch
from mlm.errors import InputError
from mlm.workdir import Workdir

if TYPE_CHECKING:
    from mlm.data.examples import Examples
    from mlm.data.manifest import Manifest

LATER = 10  # seconds by which jax's own time-outs, which end a process without a word, come after ours
NOTICE = 45.0  # seconds after which a start of the devices is slow
_compiled: set[tuple] = set()


def initialize(config: ConfigDict, workdir: Workdir, manifest: Manifest | Examples | None, *, saves: bool) -> None:
    """Joins the processes of a run; must come before anything else touches jax's devices.

    The processes of a run wait for one another, and compare what they are about to do.

    Args:
      config: of the run.
      workdir: of the run.
      manifest: of the shards, or the labelled texts; None where none are read.
      saves: it answers SIGTERM by saving; otherwise it ends at once.

    Raises:
      StopError: the others did not come.
      InputError: jax numbers the processes otherwise.
    """
    pod, peers, cluster = config.pod, watch.current.peers, watch.current.cluster
    times = {"initialization_timeout": int(pod.start_timeout), "heartbeat_timeout_seconds": int(pod.heartbeat) + LATER}
    times["shutdown_timeout_seconds"] = int(pod.heartbeat) + LATER
    watch.current.arm(hang=pod.hang, heartbeat=pod.heartbeat if peers is not None else 0)
    if peers is not None:
        data = {} if manifest is None else {"shards": manifest.fingerprint, "tokenizer": manifest.tokenizer_fingerprint}
        facts = fingerprints.facts(config, watch.current.name, str(workdir.root), data)
        address = peers.ready(facts, start_timeout=pod.start_timeout, heartbeat=pod.heartbeat)
        place = (address, cluster.processes, cluster.process_id, detect.gpus_of(cluster), "deactivate")
        jax.config.update("jax_enable_preemption_service", saves)  # it takes SIGTERM for itself
        host, port = ports.address(address, pod.jax_port)
        bind = ports.joined((ports.interface(host) if cluster.process_id == 0 else host, port))
        jax.distributed.initialize(*place, coordinator_bind_address=bind, **times)
    _start_devices()
    if (jax.process_index(), jax.process_count()) != (cluster.process_id, cluster.processes):
        raise InputError(
            f"this is {cluster.sentence}, but its devices are those of process {jax.process_index()} of "
            f"{jax.process_count()}; start the processes in the order in which the platform numbers its hosts."
        )


def _start_devices() -> None:
    """Starts the devices, and says so if that takes long: a TPU waits without a word for the hosts of its slice."""
    words = f"mlm {watch.current.name}: the devices have not started for {NOTICE:g} s"
    if detect.tpu_is_attached():
        words += "; a TPU waits for every host of its slice: is this command running on all of them?"
    notice = threading.Timer(NOTICE, lambda: print(words, file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()
    try:
        jax.devices()
    finally:
        notice.cancel()


def compile_together(function: Any, tree: Any, batch: dict[str, jax.Array]) -> None:
    """Compiles a jitted `(tree, batch) -> ...` for the shapes of a batch everywhere before any process runs it.

    Who waits in it for others gives up early.
    """
    if watch.current.peers is None:
        return
    shapes = (function, *(each.shape for each in batch.values()))
    if shapes not in _compiled:
        function.lower(tree, batch).compile()
        _compiled.add(shapes)
        watch.current.wait_for_all("compiled")


class StopSignal:
    """Notices SIGTERM and Ctrl-C, at the same step on every host; a context manager.

    In a single process, a second Ctrl-C ends at once. With several, jax's preemption service agrees on the step:
    its own handler of SIGTERM, in C, is called from ours.
    """

    def __init__(self) -> None:
        self._asked = False
        self._tell_jax: Callable[[int], None] | None = None
        self._old: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        if jax.process_count() > 1:
            self._tell_jax = _handler_in_c(signal.SIGTERM)
            if self._tell_jax is None:  # ours would only take it away
                return self
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: types.FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
        watch.current.asked(signal.Signals(number).name)
        if self._tell_jax is not None:
            self._tell_jax(signal.SIGTERM)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; every host asks at every step."""
        if jax.process_count() == 1:
            return self._asked
        return multihost_utils.reached_preemption_sync_point(step)


def _handler_in_c(number: int) -> Callable[[int], None] | None:
    """Returns the handler of a signal that a library has installed, or None; Python only knows its own."""
    buffer = (ctypes.c_void_p * 64)()  # struct sigaction: the handler comes first, on Linux and on macOS
    if ctypes.CDLL(None).sigaction(number, None, buffer) or buffer[0] in (None, 0, 1):  # the default, ignored
        return None
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(buffer[0])
