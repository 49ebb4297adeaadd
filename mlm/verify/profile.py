"""The time of each part of a step on the devices, from a trace of a few steps."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from mlm.plan import cost_model, hlo

STEPS = 3
CUDA_GRAPH = "command_buffer"  # XLA's name of one


def time_by_part(repeat: Callable[[int], None], read_text: Callable[[], str]) -> dict[str, float]:
    """Returns the seconds of a program's step for each of plan's parts, a device's mean; {} if they are unknown.

    They add up to the time in which a device works: streams and threads side by side count each. Of a CUDA graph, as
    XLA runs the step on a GPU, jax 0.11's trace has no operations (openxla/xprof, issue 3070).
    """
    options, seconds = jax.profiler.ProfileOptions(), Counter()
    options.python_tracer_level = 0
    # There may be no profiler for the device, and jax can't print every program.
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(jax.errors.JaxRuntimeError):
        module = hlo.parse(read_text())
        with jax.profiler.trace(folder, profiler_options=options):
            repeat(STEPS)
        for file in Path(folder).rglob("*.xplane.pb"):
            for line in operations(jax.profiler.ProfileData.from_file(str(file)), jax.default_backend()):
                seconds.update(exclusive(line))
    if not seconds or any(name.startswith(CUDA_GRAPH) for name in seconds):
        return {}
    parts = dict.fromkeys((*cost_model.PARTS, "collectives"), 0.0)
    for name, total in seconds.items():
        this = module.by_name.get(f"%{name}")
        part = "other" if this is None else cost_model.part(module, this)
        parts[part] += total / STEPS / jax.local_device_count()
    return parts


def operations(trace: jax.profiler.ProfileData, platform: str) -> Iterator[list[tuple[float, float, str]]]:
    """Yields (begin, end in ns, instruction) of the operations on each stream, or on a CPU each thread, of a trace."""
    prefix = "/host:" if platform == "cpu" else "/device:"
    for plane in filter(lambda plane: plane.name.startswith(prefix), trace.planes):
        for line in plane.lines:
            intervals = []
            for event in line.events:
                name = dict(event.stats).get("hlo_op")  # on GPUs and CPUs
                if name is None and line.name == "XLA Ops":  # on TPUs, by the text of the instruction
                    name = event.name.split(" ")[0].lstrip("%")
                if name is not None:
                    intervals.append((event.start_ns, event.end_ns, name))
            yield intervals


def exclusive(line: list[tuple[float, float, str]]) -> Counter[str]:
    """Returns the seconds of each instruction until it ends or another begins, which may run inside it, as in a loop.

    A GPU's kernel may begin before the last one ends.
    """
    seconds, around = Counter(), []
    for begin, end, name in sorted(line, key=lambda event: (event[0], -event[1])):
        while around and around[-1][0] <= begin:
            around.pop()
        if around:
            seconds[around[-1][1]] -= (min(end, around[-1][0]) - begin) / 1e9
        seconds[name] += (end - begin) / 1e9
        around.append((end, name))
    return seconds
