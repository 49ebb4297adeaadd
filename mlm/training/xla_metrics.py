"""What XLA did since a run started: compilations, as far as jax reports them, executions, devices without a step."""

import contextlib
import queue
import threading
import time
from collections import Counter, defaultdict
from typing import Any

import jax

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",  # or read from the persistent cache
}
LOOKUPS, HITS = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
programs: defaultdict[str, Counter[str]] = defaultdict(Counter)  # a run clears these at its end
events: Counter[str] = Counter()


def summary(waited: dict[str, float]) -> dict[str, dict[str, float]]:
    """Returns seconds and counts of "all programs", with `waited`, and by program, the slowest to compile first."""
    known = [(name, program) for name, program in programs.items() if program["compilations"] or program["executions"]]
    known.sort(key=lambda item: -item[1]["seconds"])
    compiled = ("compilations", "seconds", *STAGES.values())
    total = {key: sum(program[key] for _, program in known) for key in compiled} | waited
    if events[LOOKUPS]:
        total |= {"cache_hits": events[HITS], "cache_misses": events[LOOKUPS] - events[HITS]}
    rows = [("all programs", total), *known]
    return {name: {key: round(value, 3) for key, value in numbers.items()} for name, numbers in rows}


def describe(summary: dict[str, dict[str, float]]) -> str:
    """Returns the summary of some steps as text."""
    (_, total), *known = summary.items()
    slowest = [f"{name} {program['seconds']:.1f} s" for name, program in known if "seconds" in program]
    ran = ", ".join(f"{name} {program['executions']:,} times" for name, program in known if "executions" in program)
    text = f"XLA compiled {total['compilations']} programs in {total['seconds']:.1f} s ({', '.join(slowest[:3])})"
    if "cache_hits" in total:
        text += f", {total['cache_hits']} from the cache, {total['cache_misses']} not in it"
    shares = [total[name] / max(total["steps"], 1e-3) for name in ("input_wait", "host_wait")]
    return f"{text}; ran {ran}; devices waited {shares[0]:.1%} of the time for input, {shares[1]:.1%} for process 0"


class Waits:
    """Seconds for which the devices had no step to run, as this process sees it, by what they waited for."""

    def __init__(self):
        self.seconds = {"input_wait": 0.0, "host_wait": 0.0}
        self.idle_since = time.monotonic()  # counts only while no step runs
        self._running: queue.Queue[jax.Array | None] = queue.Queue()  # an output of each step
        threading.Thread(target=self._watch, daemon=True, name="waits").start()

    def add(self, name: str) -> None:
        """Adds the time since the last call, or since the last step ended, if all have."""
        if not self._running.unfinished_tasks:
            now = time.monotonic()
            self.seconds[name] += now - self.idle_since
            self.idle_since = now

    def dispatched(self, output: jax.Array | None) -> None:
        """Takes an output of a step; None ends the thread."""
        self._running.put(output)

    def _watch(self) -> None:
        while (output := self._running.get()) is not None:
            with contextlib.suppress(Exception):  # the loop meets it, too
                output.block_until_ready()
            self.idle_since = time.monotonic()
            self._running.task_done()


def _on_duration(event: str, seconds: float, *, fun_name: str = "unnamed", **_: Any) -> None:
    if stage := STAGES.get(event):
        program = programs[fun_name.removeprefix("jit(").removesuffix(")")]
        program.update({"seconds": seconds, stage: seconds, "compilations": stage == "compile"})


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
