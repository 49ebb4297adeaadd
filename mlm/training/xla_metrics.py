"""What XLA did since a run started: compilations, and devices without a step; and a trace of some steps."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from mlm.paths import UPath, staging_folder, upload

COMPILE = "/jax/core/compile/backend_compile_duration"  # or read from the persistent cache
DURATIONS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILE,
)
HIT = "/jax/compilation_cache/cache_hits"
TRACED_STEPS = 5


class Compilations(AbstractContextManager):
    """Counts the programs that are compiled until it exits, and their seconds of tracing, lowering and compilation."""

    def __init__(self):
        self.counts = {"programs": 0, "from_cache": 0, "seconds": 0.0}
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, seconds: float, **_: Any) -> None:
        if event in DURATIONS:
            self.counts["programs"] += event == COMPILE
            self.counts["seconds"] += seconds

    def _on_event(self, event: str, **_: Any) -> None:
        self.counts["from_cache"] += event == HIT


class Waits:
    """Seconds for which the devices had no step to run, as this process sees it, by what they waited for."""

    def __init__(self):
        self.seconds = {"input_wait": 0.0, "host_wait": 0.0}
        self.idle_since = time.monotonic()  # counts only while no step runs
        # an output of each step; None ends the thread
        self.running: queue.Queue[jax.Array | None] = queue.Queue()
        threading.Thread(target=self._watch, daemon=True, name="waits").start()

    def add(self, name: str) -> None:
        """Adds the time since the last call, or since the last step ended, if all have."""
        if not self.running.unfinished_tasks:
            now = time.monotonic()
            self.seconds[name] += now - self.idle_since
            self.idle_since = now

    def _watch(self) -> None:
        while (output := self.running.get()) is not None:
            with contextlib.suppress(Exception):  # the loop meets it, too
                output.block_until_ready()
            self.idle_since = time.monotonic()
            self.running.task_done()


@contextlib.contextmanager
def tracing(folder: UPath) -> Iterator[None]:
    """Writes a trace for TensorBoard or Perfetto to a folder, which may be in a bucket."""
    staging = staging_folder(folder)
    jax.profiler.start_trace(str(staging))
    try:
        yield
    finally:
        jax.profiler.stop_trace()
        upload(staging, folder)
