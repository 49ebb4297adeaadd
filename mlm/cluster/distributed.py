"""Starting jax in the processes of a run, and stopping all of them at the same step."""

import contextlib
import signal
import types
from typing import Any, Self

import jax
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from mlm.cluster import fingerprints, watch
from mlm.entry import Entry
from mlm.errors import InputError
from mlm.workdir import Workdir

_compiled: set[tuple] = set()
_program_caches: set[str | None] = {None}  # folders that no user has named


def initialize(
    config: ConfigDict,
    workdir: Workdir,
    shards: str = "",
    tokenizer: str | None = "",
    *,
    saves: bool,
    entry: Entry | None = None,
) -> None:
    """Starts the devices of a run's processes, if they read the same; must come before anything touches the devices.

    `shards` and `tokenizer` are fingerprints of the data, if any is read; `entry` has the class that is used. One that
    `saves` caches its compiled programs in the workdir, unless JAX_COMPILATION_CACHE_DIR names another folder.
    """
    current = watch.current
    pod = config.pod
    cluster = current.cluster
    service = current.service
    current.set_limits(hang=pod.hang, heartbeat=pod.hang if service is None else pod.heartbeat)
    if service is not None:
        data = {"shards": shards, "tokenizer": tokenizer} | (entry or Entry()).fingerprint()
        service.agree(
            "data", fingerprints.host_fingerprint(config, current.command, str(workdir.root), data)
        )
    cache_programs(str(workdir.root / "xla_cache") if saves else None)
    if (jax.process_index(), jax.process_count()) != (cluster.process_id, cluster.processes):
        other = f"its devices are those of process {jax.process_index()} of {jax.process_count()}"
        raise InputError(
            f"this is {cluster.sentence}, but {other}; start the processes in the platform's order."
        )


def cache_programs(folder: str | None) -> None:
    """Has jax cache its compiled programs in a folder, or nowhere, unless the user has named one."""
    if jax.config.jax_compilation_cache_dir in _program_caches:
        _program_caches.add(folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # that of an earlier command, which jax would keep


def compile_together(function: Any, tree: Any, batch: dict[str, jax.Array], *static: Any) -> None:
    """Compiles a jitted `(tree, batch, *static) -> ...` on all hosts before any runs it and its collectives."""
    if watch.current.service is None:
        return
    shapes = (function, static, *(column.shape for column in batch.values()))
    if shapes not in _compiled:
        function.lower(tree, batch, *static).compile()
        _compiled.add(shapes)
        watch.current.barrier("compiled")


class StopSignal(contextlib.ExitStack):
    """Notices what asks the run to save and end, and Ctrl-C, at the same step on every host; a context manager.

    In a single process, a second Ctrl-C ends at once. With several, jax's preemption service agrees on the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requested = False

    def __enter__(self) -> Self:
        self.enter_context(watch.handling(self._handle, *watch.STOP_SIGNALS, signal.SIGINT))
        return self

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
        watch.current.signaled(number)
        if watch.current.service is not None:
            watch.current.service.stop_all()

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; every host asks at every step."""
        if jax.process_count() == 1:
            return self._requested
        return multihost_utils.reached_preemption_sync_point(step)
