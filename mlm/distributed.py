"""Start-up of the processes of a run, and their common answer to "stop"."""

from __future__ import annotations

import os
import signal
import types

import jax
from jax.experimental import multihost_utils


def initialize(*, coordinator: str, processes: int, process_id: int) -> None:
    """Joins the processes of a run; must come before anything else touches jax's devices.

    With a coordinator ("host:port"), it is one of `processes`. Without one, a TPU pod says so itself, and everything
    else is a single process.
    """
    if coordinator:
        jax.distributed.initialize(coordinator, processes, process_id)
    elif "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()


def is_first() -> bool:
    """Returns whether this process is the one that writes what is written once."""
    return jax.process_index() == 0


class StopSignal:
    """Notices SIGTERM and Ctrl-C, at the same step on every host; a context manager.

    In a single process, the handlers are ours, and a second Ctrl-C ends at once. With several, jax's preemption
    service holds SIGTERM and agrees on the step; a Python handler would switch it off.
    """

    def __init__(self) -> None:
        self._asked = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        if jax.process_count() == 1:
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

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; every host asks at every step."""
        if jax.process_count() == 1:
            return self._asked
        return multihost_utils.reached_preemption_sync_point(step)
