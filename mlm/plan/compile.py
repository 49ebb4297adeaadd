"""Compiles the step of `train`, or the baseline of mlm/bench/baseline.py, for a TPU or GPU that is not attached."""

import contextlib
import dataclasses
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from mlm.bench import baseline
from mlm.model.keys import make_key
from mlm.plan.topology import Topology
from mlm.tasks.pretraining import Pretraining
from mlm.text import say
from mlm.training import sharding

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step; sizes in bytes per device."""

    fits: bool
    needs: float | None  # in all; None if it does not fit and the compiler names no size
    arguments: int
    temporaries: int | None = None  # None, as the outputs, if the program does not fit
    outputs: int | None = None  # without those that reuse an argument's memory
    text: str = ""  # for `hlo.parse`; "" if the program does not fit, or is a GPU's


def compile_step(task: Pretraining, topology: Topology, *, kind: str = "mlm") -> Program:
    """Compiles one training step for a topology, and says so on stderr.

    `kind` is "mlm", "short" (the first steps, on rows of data.short_length) or "baseline" (without
    accumulation).
    """
    config = task.config
    is_gpu = bool(topology.family.target)
    state = state_bytes(task)
    if kind != "baseline" and state > topology.capacity:  # nothing to compile
        return Program(fits=False, needs=state, arguments=state)
    rows = config.data.global_batch // (task.mesh.shape["data"] * task.mesh.shape["fsdp"])
    model = f"{config.model.layers} layers of {config.model.hidden_size}, {rows} rows a device"
    say(f"compiling the {kind} step, {model}, for {topology.name}, which may take minutes")
    with no_cache(), tempfile.TemporaryDirectory() as folder:
        # libtpu writes the program to a folder: jax can't print one that uses SparseCores. On a
        # GPU that is not there, kernels can't be timed.
        to_folder = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        options = {"xla_gpu_autotune_level": "0"} if is_gpu else to_folder
        try:
            compiled = _lower(task, kind).compile(options)
        except jax.errors.JaxRuntimeError as error:
            # What does not fit into a core's own memory, vmem, is a kernel, whatever the batch.
            if "RESOURCE_EXHAUSTED" not in str(error) or "vmem" in str(error):
                raise
            pattern = r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)"
            size = re.search(pattern, str(error))
            needs = size and state + float(size[1]) * UNITS[size[2]]
            return Program(fits=False, needs=needs, arguments=state)
        files = Path(folder).glob("*.jit_step.*after_codegen.txt")
        text = "" if is_gpu else max(files, key=lambda file: file.stat().st_size).read_text()
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, outputs)
    needs = sum(sizes) + memory.generated_code_size_in_bytes
    return Program(True, needs, *sizes, text)


def _lower(task: Pretraining, kind: str) -> jax.stages.Lowered:
    """Traces a step on abstract arrays."""

    def on_mesh(shapes: Any, spec: jax.P) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.update(sharding=NamedSharding(task.mesh, spec)), shapes
        )

    batch = on_mesh(task.batch_shapes(task.config.data.global_batch), sharding.BATCH)
    if kind != "baseline":
        length = task.config.data.short_length if kind == "short" else task.info.length
        return task.train_step.lower(task.abstract_state, batch, length)
    init, step = baseline.make_step(task)
    state = on_mesh(jax.eval_shape(init, task.abstract_state.params), jax.P())
    key = on_mesh(jax.eval_shape(lambda: make_key(0)), jax.P())
    return step.lower(state, (batch["input_ids"],) * 3, key)


def state_bytes(task: Pretraining) -> int:
    """Returns the bytes of the training state on a device."""
    leaves = jax.tree.leaves(task.abstract_state)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )


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
