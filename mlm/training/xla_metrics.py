"""What XLA did since a run started: compilations, executions, devices without a step; and a trace of some steps."""

import contextlib
import queue
import threading
import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm.paths import UPath, staging_folder, upload

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",  # or read from the persistent cache
}
LOOKUP = "/jax/compilation_cache/compile_requests_use_cache"
HIT = "/jax/compilation_cache/cache_hits"
# what they add
EVENTS = {LOOKUP: {"cache_hits": 0, "cache_misses": 1}, HIT: {"cache_hits": 1, "cache_misses": -1}}
EXECUTION = "/mlm/execution"  # jax reports none
ALL = "all programs"
TRACED_STEPS = 5


def executed(name: str) -> None:
    """Reports the start of a program to whoever counts them."""
    jax.monitoring.record_event(EXECUTION, fun_name=name)


class Programs(AbstractContextManager):
    """Counts what XLA does until it exits: `counts` has seconds and numbers of each program, by its name."""

    def __init__(self):
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(
        self, event: str, seconds: float, *, fun_name: str = "unnamed", **_: Any
    ) -> None:
        if stage := STAGES.get(event):
            for name in (ALL, fun_name.removeprefix("jit(").removesuffix(")")):
                self.counts[name].update(
                    {"compilations": stage == "compile", "seconds": seconds, stage: seconds}
                )

    def _on_event(self, event: str, **kwargs: Any) -> None:
        if event == EXECUTION:
            self.counts[kwargs["fun_name"]]["executions"] += 1
        else:
            self.counts[ALL].update(EVENTS.get(event, {}))

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns all programs together, then each that was not only traced: the slowest to compile first."""
        known = [
            (name, count)
            for name, count in self.counts.items()
            if count["compilations"] or count["executions"]
        ]
        known.sort(key=lambda item: -item[1]["seconds"])
        counts = {ALL: self.counts[ALL], **dict(known)}
        return {
            name: {key: round(value, 3) for key, value in count.items()}
            for name, count in counts.items()
        }


def describe(summary: dict[str, dict[str, float]]) -> str:
    """Returns the summary of some steps as text."""
    (_, total), *known = summary.items()
    slowest = ", ".join(
        [f"{name} {program['seconds']:.1f} s" for name, program in known if "seconds" in program][
            :3
        ]
    )
    ran = ", ".join(
        f"{name} {program['executions']:,} times"
        for name, program in known
        if "executions" in program
    )
    text = f"XLA ran {ran}"
    if count := total.get("compilations"):  # 0 where jax only traced
        text += (
            f"; compiled {count} program{'s' * (count > 1)} in {total['seconds']:.1f} s ({slowest})"
        )
        text += f", {total.get('cache_hits', 'none')} of them from the cache"
    shares = [total[name] / max(total["steps"], 1e-3) for name in ("input_wait", "host_wait")]
    return f"{text}; devices waited {shares[0]:.1%} of the time for input, {shares[1]:.1%} for process 0"


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


class Trace:
    """A trace of TRACED_STEPS steps from log.profile_start on, for TensorBoard or Perfetto."""

    def __init__(self, log: ConfigDict, folder: UPath):
        self._first = log.profile_start
        self._folder = folder
        self._staging: Path | None = None  # while it records

    def begin(self, step: int, state: Any) -> None:
        """Starts or ends the trace if `step`, which comes next, is the first one of it or the first one after it."""
        if self._first and step == self._first:
            self._staging = staging_folder(self._folder)
            jax.profiler.start_trace(str(self._staging))
        elif step == self._first + TRACED_STEPS:
            self.end(state)

    def end(self, state: Any) -> None:
        """Ends the trace, if it is running, once all steps that led to `state` have."""
        if self._staging:
            jax.block_until_ready(state.step)
            jax.profiler.stop_trace()
            upload(self._staging, self._folder)
            self._staging = None
