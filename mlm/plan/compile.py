"""From a config to the program that a TPU would run: the step of `train`, or the stock one of mlm/bench/baseline.py."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mlm.bench import baseline
from mlm.data.dataset_info import DatasetInfo
from mlm.errors import InputError
from mlm.plan.topology import Topology
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding

PATIENCE = 15.0  # seconds between two lines of progress; on a terminal one line counts them
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step; bytes are of a device.

    Attributes:
      text: as `hlo.parse` reads it; "" if the program doesn't fit.
      arguments: the state and the batch.
      temporaries: what the step needs beside them.
      outputs: what it returns that does not take the place of an argument.
      needs: all of it; if it doesn't fit, the state and the temporaries of which the compiler says that they are too
        many (the state alone, if that is too large already), or None if it names no number.
      fits: the compiler found room for it.
      seconds: that the compiler took.
    """

    text: str
    arguments: int
    temporaries: int
    outputs: int
    needs: float | None
    fits: bool
    seconds: float


def make_mesh(config: ConfigDict, topology: Topology) -> Mesh:
    """Returns the config's mesh over the devices of a topology; raises InputError as `sharding.make_mesh`."""
    return sharding.make_mesh(**config.mesh.to_dict(), devices=topology.devices)


def compile_step(config: ConfigDict, info: DatasetInfo, topology: Topology, *, kind: str = "mlm") -> Program:
    """Compiles one training step for a topology, and says on stderr how long it has taken.

    Args:
      config: of the run, its mesh over the topology's devices.
      info: of its data.
      topology: no device of it need be there.
      kind: "mlm"; "short", that of the first updates where they read rows of data.short_length; or "stock", which
        copies the parameters to every device and does not accumulate.

    Raises:
      InputError: a batch or a parameter that the mesh can't split, rows longer than the model's positions, or a kernel
        for which a core is too small.
    """
    mesh = make_mesh(config, topology)
    task = Pretraining.without_data(config, mesh, info)
    rows = config.data.global_batch // (mesh.shape["data"] * mesh.shape["fsdp"])
    state = state_bytes(task)
    if kind != "stock" and state > topology.capacity:  # nothing to compile
        return Program("", state, 0, 0, state, False, 0.0)
    words = f"{kind} step, {config.model.layers} layers of {config.model.hidden_size}, {rows} rows a device"
    with _telling(f"compiling the {words}, for {topology.name}") as elapsed, no_cache():
        try:
            if kind == "stock":
                lowered = _lower_stock(config, task, mesh, info)
            else:
                lowered = _lower(config, task.short_step if kind == "short" else task.train_step, task, mesh, info)
            compiled, text = _compile(lowered, topology)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refuse_kernel(str(error), topology.family.kind)
            temporaries = temporary_bytes(str(error))
            needs = None if temporaries is None else state + temporaries
            return Program("", state, 0, 0, needs, False, elapsed())
        memory = compiled.memory_analysis()
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, outputs)
        return Program(text, *sizes, sum(sizes) + memory.generated_code_size_in_bytes, True, elapsed())


def _compile(lowered: jax.stages.Lowered, topology: Topology) -> tuple[jax.stages.Compiled, str]:
    """Returns the compiled program and its text."""
    if topology.family.readable:
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        files = [file for file in Path(folder).glob("*.after_codegen.txt") if ".jit_step." in file.name]
        return compiled, max(files, key=lambda file: file.stat().st_size).read_text()


def temporary_bytes(message: str) -> float | None:
    """Returns the temporaries that a refusal of the compiler names, bytes of a device; None if it names none."""
    found = re.search(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    return float(found.group(1)) * UNITS[found.group(2)] if found else None


def refuse_kernel(message: str, kind: str) -> None:
    """Raises where a smaller batch or another mesh would not help: a kernel needs more of a core's memory than it has.

    Args:
      message: of the compiler, which refused a program for want of memory.
      kind: of the device, for the sentence.

    Raises:
      InputError: the message is of that memory.
    """
    if "memory space vmem" not in message:
        return
    sizes = re.search(r"Used (\S+) of (\S+) vmem|size (\S+) and limit ([\d.]+[KMG]?)", message)
    needs, has = [size for size in sizes.groups() if size] if sizes else ("more", "too little")
    raise InputError(
        f"config.model.attention: the kernel needs {needs} of a core's own memory, where a {kind} has {has}; set it "
        f"to xla."
    )


def state_bytes(task: Pretraining) -> int:
    """Returns the bytes that the training state takes on a device."""
    leaves = jax.tree.leaves(task.shapes)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _lower(
    config: ConfigDict, step: jax.stages.Wrapped, task: Pretraining, mesh: Mesh, info: DatasetInfo
) -> jax.stages.Lowered:
    """Returns a step of ours, not compiled yet, on arguments that are only shapes."""
    rows = config.data.global_batch
    batch = {
        "input_ids": _placed((rows, info.length), jnp.int32, mesh, sharding.BATCH),
        "attention_mask": _placed((rows, info.length), jnp.int32, mesh, sharding.BATCH),
        "record_id": _placed((rows,), jnp.uint32, mesh, sharding.BATCH),
        "epoch": _placed((rows,), jnp.uint32, mesh, sharding.BATCH),
    }
    return step.lower(task.shapes, batch)


def _lower_stock(config: ConfigDict, task: Pretraining, mesh: Mesh, info: DatasetInfo) -> jax.stages.Lowered:
    """Returns the stock step, not compiled yet."""
    start, step = baseline.make_step(
        module=baseline.make_module(task.network.config, config.model.dtype),
        schedule=task.schedule,
        weight_decay=config.optimizer.weight_decay,
        mesh=mesh,
    )
    state = jax.eval_shape(start, task.shapes.params)
    placed = jax.tree.map(lambda leaf: _placed(leaf.shape, leaf.dtype, mesh, P()), state)
    ids = _placed((config.data.global_batch, info.length), jnp.int32, mesh, sharding.BATCH)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return step.lower(placed, ids, ids, ids, _placed((), key.dtype, mesh, P()))


def _placed(shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Keeps such programs out of jax's cache on disk: it writes them, and can't read them where there is no TPU."""
    key = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, key)
    jax.config.update(key, float("inf"))
    try:
        yield
    finally:
        jax.config.update(key, before)


@contextlib.contextmanager
def _telling(words: str) -> Iterator[Any]:
    """Says `words` and the seconds since on stderr, every few seconds, on one line if that is a terminal."""
    begin, done, terminal = time.monotonic(), threading.Event(), sys.stderr.isatty()

    def elapsed() -> float:
        return time.monotonic() - begin

    def line(end: str) -> None:
        print(f"{words}: {elapsed():.0f} s", end=end, file=sys.stderr, flush=True)

    def tell() -> None:
        while not done.wait(1.0 if terminal else PATIENCE):
            line("\r" if terminal else "\n")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield elapsed
    finally:
        done.set()
        thread.join()
        line("\n")
