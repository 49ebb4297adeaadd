"""Compiles the step of `train`, or the baseline of mlm/bench/baseline.py, for a TPU or GPU that is not attached."""

import contextlib
import dataclasses
import math
import re
import tempfile
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
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step; sizes in bytes per device."""

    text: str  # for `hlo.parse`; "" if the program does not fit, or is a GPU's
    arguments: int
    temporaries: int | None  # None, as the outputs, if the program does not fit
    outputs: int | None  # without those that reuse an argument's memory
    needs: float | None  # in all; None if it does not fit and the compiler names no size
    fits: bool
    flops_per_token: float = 0.0  # useful ones, of all devices together


def compile_step(
    config: ConfigDict,
    info: DatasetInfo,
    topology: Topology,
    make_task: MakeTask,
    *,
    kind: str = "mlm",
) -> Program:
    """Compiles one training step for a topology, and says so on stderr.

    `kind` is "mlm", "short" (the first steps, on rows of data.short_length) or "baseline" (without
    accumulation).
    """
    is_gpu = bool(topology.family.target)
    if is_gpu:  # cuDNN is asked how it computes, and is there with a GPU alone
        if config.model.attention == "cudnn":
            what = "plan can't compile cuDNN's kernels for a GPU that is not attached"
            raise InputError(
                f"config.model.attention = cudnn: {what}; plan with xla, and measure it with verify."
            )
        config = configs.replace(config, {"model.attention": "xla"})
    task = make_task(config, sharding.mesh_of(config.mesh, topology.devices), info)
    state = state_bytes(task)
    if kind != "baseline" and state > topology.capacity:  # nothing to compile
        return Program("", state, None, None, state, False)
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
            temporaries = temporary_bytes(str(error))
            return Program(
                "", state, None, None, None if temporaries is None else state + temporaries, False
            )
        text = "" if is_gpu else _largest(folder)
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, outputs)
    useful = task.flops_per_token(config.data.short_length if kind == "short" else info.length)
    return Program(text, *sizes, sum(sizes) + memory.generated_code_size_in_bytes, True, useful)


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


def _largest(folder: str) -> str:
    """Returns the text of the step that libtpu wrote to a folder."""
    files = Path(folder).glob("*.jit_step.*after_codegen.txt")
    return max(files, key=lambda file: file.stat().st_size).read_text()


def temporary_bytes(message: str) -> float | None:
    """Returns the bytes of temporaries on a device in the compiler's refusal, or None."""
    size = re.search(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    return float(size[1]) * UNITS[size[2]] if size else None


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
