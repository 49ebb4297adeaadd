"""Compiles the step of `train`, or the baseline of mlm/bench/baseline.py, for a TPU or GPU that is not attached."""

import contextlib
import dataclasses
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from mlm import config as configs
from mlm.bench import baseline
from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.model.keys import make_key
from mlm.plan.topology import Topology
from mlm.tasks.pretraining import Pretraining
from mlm.text import say
from mlm.training import sharding

MakeTask = Callable[[ConfigDict, Mesh, DatasetInfo], Pretraining]
PROGRESS = 15.0  # seconds between two lines
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step; sizes in bytes per device."""

    text: str  # for `hlo.parse`; "" if the program does not fit
    arguments: int
    temporaries: int | None  # None, as the outputs, if the program does not fit
    outputs: int | None  # without those that reuse an argument's memory
    needs: float | None  # in all; None if it does not fit and the compiler names no size
    fits: bool
    flops_per_token: float = 0.0  # useful ones, of all devices together


def compile_step(
    config: ConfigDict, info: DatasetInfo, topology: Topology, make_task: MakeTask, *, kind: str = "mlm"
) -> Program:
    """Compiles one training step for a topology, which can take minutes, with progress on stderr.

    `kind` is "mlm", "short" (the first steps, on rows of data.short_length) or "baseline" (without accumulation).
    """
    if topology.family.target:  # cuDNN is asked how it computes, and is there with a GPU alone
        if config.model.attention == "cudnn" and topology.devices[0] not in jax.devices():  # verify's are attached
            what = "plan can't compile cuDNN's kernels for a GPU that is not attached"
            raise InputError(f"config.model.attention = cudnn: {what}; plan with xla, and measure both with verify.")
        config = configs.replace(config, {"model.attention": "xla"})
    task = make_task(config, sharding.mesh_of(config.mesh, topology.devices), info)
    state = state_bytes(task)
    if kind != "baseline" and state > topology.capacity:  # nothing to compile
        return Program("", state, None, None, state, False)
    rows = config.data.global_batch // (task.mesh.shape["data"] * task.mesh.shape["fsdp"])
    model = f"{config.model.layers} layers of {config.model.hidden_size}, {rows} rows a device"
    progress = show_progress(f"compiling the {kind} step, {model}, for {topology.name}")
    with progress, no_cache(), tempfile.TemporaryDirectory() as folder:
        # Kernels can't be timed on a GPU that is not there.
        options = {"xla_gpu_autotune_level": "0"} if topology.family.target else dump_options(folder)
        try:
            compiled = _lower(task, kind).compile(options)
            text = text_of(compiled, folder)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refuse_kernel(str(error), topology.family.kind)
            temporaries = temporary_bytes(str(error))
            return Program("", state, None, None, None if temporaries is None else state + temporaries, False)
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, outputs)
    useful = task.flops_per_token(config.data.short_length if kind == "short" else info.length)
    return Program(text, *sizes, sum(sizes) + memory.generated_code_size_in_bytes, True, useful)


def _lower(task: Pretraining, kind: str) -> jax.stages.Lowered:
    """Traces a step on abstract arguments."""

    def on_mesh(shapes: Any, spec: jax.P) -> Any:
        return jax.tree.map(lambda leaf: leaf.update(sharding=NamedSharding(task.mesh, spec)), shapes)

    batch = on_mesh(task.batch_shapes(task.config.data.global_batch), sharding.BATCH)
    if kind != "baseline":
        length = task.config.data.short_length if kind == "short" else task.info.length
        return task.train_step.lower(task.abstract_state, batch, length)
    init, step = baseline.make_step(task)
    state = on_mesh(jax.eval_shape(init, task.abstract_state.params), jax.P())
    key = on_mesh(jax.eval_shape(lambda: make_key(0)), jax.P())
    return step.lower(state, (batch["input_ids"],) * 3, key)


def dump_options(folder: str) -> dict[str, Any]:
    """Returns the options by which libtpu writes a program to `folder`: jax can't print one that uses SparseCores."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def text_of(compiled: jax.stages.Compiled, folder: str) -> str:
    """Returns the text of a step, from `folder` if libtpu wrote it there."""
    files = sorted(Path(folder).glob("*.jit_step.*after_codegen.txt"), key=lambda file: file.stat().st_size)
    return files[-1].read_text() if files else compiled.as_text()


def temporary_bytes(message: str) -> float | None:
    """Returns the bytes of temporaries on a device in the compiler's refusal, or None."""
    size = re.search(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    return float(size[1]) * UNITS[size[2]] if size else None


def refuse_kernel(message: str, kind: str) -> None:
    """Raises InputError if the compiler's refusal is about a core's own memory: no smaller batch would help."""
    if "memory space vmem" in message:
        sizes = re.search(r"(?:Used|size) (\S+) (?:of|and limit) ([\d.]+[KMG]?)", message)
        needs, limit = sizes.groups() if sizes else ("more", "too little")
        memory = f"{needs} of a core's own memory, where a {kind} has {limit}"
        raise InputError(f"config.model.attention: the kernel needs {memory}; set it to xla.")


def state_bytes(task: Pretraining) -> int:
    """Returns the bytes of the training state on a device."""
    leaves = jax.tree.leaves(task.abstract_state)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Keeps programs out of jax's cache on disk, which can write them but not read them back without a TPU."""
    key = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, key)
    jax.config.update(key, float("inf"))
    try:
        yield
    finally:
        jax.config.update(key, before)


@contextlib.contextmanager
def show_progress(message: str) -> Iterator[None]:
    """Prints a message to stderr, every PROGRESS seconds with those so far, and at the end with the total."""
    start, ended = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not ended.wait(PROGRESS):
            say(f"{message}: {time.monotonic() - start:.0f} s so far")

    say(message)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        say(f"{message}: {time.monotonic() - start:.0f} s in all")
