"""The part "step" of `bench`: our update beside run_mlm_flax.py's and PyTorch's, on rows of random tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from mlm.bench import baseline, interleaved, torch_step
from mlm.data import batches
from mlm.data.dataset_info import DatasetInfo
from mlm.model import flops
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding

Step = Callable[[], jax.Array]  # starts an update; the array is there when it is done


def compare_steps(config: ConfigDict, mesh: jax.sharding.Mesh, seconds: float, torch_python: str) -> dict[str, Any]:
    """Measures our step, the stock one and, if an interpreter is named, PyTorch's.

    A program's memory is what it holds on each device, as compiled: its arguments (the state among them), temporaries
    and outputs. PyTorch's is what it allocated at most on CUDA; on the CPU, what its process grew by.

    Args:
      config: of the run.
      mesh: of all devices.
      seconds: to measure for.
      torch_python: see `bench.run`.

    Returns:
      As `interleaved.summary` of "mlm", "stock" and "torch", each with "mfu" (None where the device's peak isn't known)
      and "memory_bytes" (None where the system doesn't tell); ours and the stock step with "temporary_bytes", a part
      of it; PyTorch's with "device", "dtype" and the versions of "torch" and "transformers".

    Raises:
      InputError: `torch_python` can't be run, lacks a package, or fails.
    """
    ours = Pretraining.without_data(config, mesh)
    host = random_rows(config, ours.info)
    with contextlib.ExitStack() as stack:
        partner = None
        if torch_python:
            interleaved.say("step: starting PyTorch")
            partner = stack.enter_context(start_torch(torch_python, config, ours))
        interleaved.say("step: compiling ours")
        program, step = our_step(ours, host, mesh)
        interleaved.say("step: compiling run_mlm_flax.py's")
        stock_program, stock_step = _stock_step(config, ours, host, mesh)
        columns = {"mlm": waited(step), "stock": waited(stock_step)}
        if partner:
            columns["torch"] = partner.turn
        rates = interleaved.measure("step", columns, seconds)
        found = interleaved.summary(rates, ours.tokens_per_step)
        for name, compiled in (("mlm", program), ("stock", stock_program)):
            found[name] |= _memory(compiled)
        if partner:
            found["torch"] |= {key: partner.ready[key] for key in ("device", "dtype", "torch", "transformers")}
            found["torch"]["memory_bytes"] = partner.answer["peak_bytes"]
    useful = ours.flops_per_token(ours.steps)
    peak = flops.peak_flops(jax.devices()[0].device_kind)
    for name in rates:
        rate = found[name]["tokens_per_second"] * useful
        here = found[name].get("device") != "cpu"  # where PyTorch runs on the CPU, the peak is not of its device
        found[name]["mfu"] = rate / (peak * jax.device_count()) if peak and here else None
    return found


def random_rows(config: ConfigDict, info: DatasetInfo) -> dict[str, np.ndarray]:
    """Returns a global batch of ordinary tokens, as `train_batches` yields them."""
    shape = (config.data.global_batch, info.length)
    ids = np.random.default_rng(0).integers(len(info.all_special_ids), info.vocab_size, shape)
    return batches.in_memory(ids)


def our_step(
    task: Pretraining, host: dict[str, np.ndarray], mesh: jax.sharding.Mesh
) -> tuple[jax.stages.Compiled, Step]:
    """Returns (the compiled program, an update that starts from the batch `host`)."""
    state, rows = task.init(), len(host["record_id"])
    compiled = task.train_step.lower(state, sharding.put_batch(host, mesh, rows)).compile()

    def update() -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, sharding.put_batch(host, mesh, rows))
        return metrics["loss"]

    return compiled, update


def _stock_step(
    config: ConfigDict, task: Pretraining, host: dict[str, np.ndarray], mesh: jax.sharding.Mesh
) -> tuple[jax.stages.Compiled, Step]:
    """As `our_step`, with the masks drawn on the host."""
    start, step = baseline.make_step(task)
    state, key, random = start(task.init().params), jax.random.key(0), np.random.default_rng(0)

    def batch() -> tuple[jax.Array, ...]:
        read, labels = baseline.mask_on_host(task.masking, host["input_ids"], host["attention_mask"], random)
        arrays = {"ids": read, "attention": host["attention_mask"], "labels": labels}
        return tuple(sharding.put_batch(arrays, mesh, len(read)).values())

    compiled = step.lower(state, *batch(), key).compile()

    def update() -> jax.Array:
        nonlocal state
        state, loss = compiled(state, *batch(), key)
        return loss

    return compiled, update


def start_torch(python: str, config: ConfigDict, task: Pretraining) -> interleaved.Partner:
    """Starts mlm/bench/torch_step.py on the same model and rows of the same size.

    Raises:
      InputError: the interpreter can't be run, lacks a package, or fails.
    """
    settings = {
        "model": task.network.config.to_dict(),
        "special_ids": task.info.special_ids,
        "rows": config.data.global_batch,
        "length": config.shards.length,
        "masking_rate": config.masking.rate,
        "learning_rate": config.optimizer.learning_rate,
        "weight_decay": config.optimizer.weight_decay,
        "bfloat16": config.model.dtype == "bfloat16",
    }
    return interleaved.Partner([python, torch_step.__file__], settings, name=f"--torch={python}")


def _memory(program: jax.stages.Compiled) -> dict[str, int]:
    sizes = program.memory_analysis()
    whole = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    return {"memory_bytes": whole - sizes.alias_size_in_bytes, "temporary_bytes": sizes.temp_size_in_bytes}


def waited(step: Step) -> interleaved.Turn:
    """Returns the turn of a step: so many updates, and the wait for the last."""

    def turn(calls: int) -> None:
        for _ in range(calls):
            last = step()
        jax.block_until_ready(last)

    return turn
