"""The part "step" of `bench`: our step beside run_mlm_flax.py's and PyTorch's, on rows of random tokens."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from mlm import config as configs
from mlm.bench import baseline, interleaved, torch_step
from mlm.data import batches
from mlm.model import flops
from mlm.model.keys import make_key
from mlm.tasks.pretraining import Pretraining
from mlm.text import say
from mlm.training import sharding

Step = Callable[[], Any]  # starts a step and returns its metrics


def compare_steps(
    config: ConfigDict,
    seconds: float,
    torch_python: str,
    pretraining: type[Pretraining] = Pretraining,
) -> dict[str, Any]:
    """Measures our step, the baseline if there is one and, if an interpreter is named, PyTorch's.

    Returns `interleaved.summary` of "mlm", "baseline" and "torch", each with "mfu" (or None), all
    but the last with "memory_bytes" per device and "temporary_bytes", a part of it; PyTorch's with
    its first answer. With model.implementation=transformers, "by_mlm" is the same model by mlm's
    modules: what that choice costs.
    """
    task = pretraining.without_data(config)
    host = random_rows(task)
    makers = {"mlm": functools.partial(our_step, task)}
    if config.model.implementation == "transformers":
        by_mlm = pretraining.without_data(configs.replace(config, {"model.implementation": "mlm"}))
        makers["by_mlm"] = functools.partial(our_step, by_mlm)
    if baseline.exists(config.model.family):
        makers["baseline"] = functools.partial(baseline_step, task)
    candidates: dict[str, interleaved.Repeat] = {}
    details: dict[str, dict[str, Any]] = {}
    worker = start_torch(torch_python, task) if torch_python else None
    with contextlib.closing(worker) if worker else contextlib.nullcontext():
        for name, make in makers.items():
            say(f"bench: step: compiling {interleaved.NAMES[name]}")
            program, update = make(host)
            candidates[name] = repeated(update)
            details[name] = memory(program)
        if worker:
            candidates["torch"] = lambda calls: worker.ask({"calls": calls})
            details["torch"] = worker.ready
        rates = interleaved.measure("step", candidates, seconds)
    comparison = interleaved.summary(rates, host["input_ids"].size)
    useful = task.flops_per_token(task.info.length)
    for name, row_details in details.items():
        row = comparison[name]
        row |= row_details
        is_elsewhere = row.get("device") == "cpu"  # PyTorch, while the peak is that of jax's device
        row["mfu"] = (
            None if is_elsewhere else flops.mfu(row["tokens_per_second"] * useful, jax.devices())
        )
    return comparison


def random_rows(task: Pretraining) -> dict[str, np.ndarray]:
    """Returns a global batch of ordinary tokens, as `train_batches` yields them."""
    info = task.info
    shape = (task.config.data.global_batch, info.length)
    ids_BxL = np.random.default_rng(0).integers(len(info.all_special_ids), info.vocab_size, shape)
    return batches.in_memory(ids_BxL)


def put(task: Pretraining, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts this host's rows of a global batch, which is the same on every host, on its devices."""
    count = len(batch["record_id"])
    rows = slice(*sharding.local_rows(task.mesh, count))
    local = {name: column[rows] for name, column in batch.items()}
    return sharding.put_batch(local, task.mesh, count)


def our_step(task: Pretraining, host: dict[str, np.ndarray]) -> tuple[jax.stages.Compiled, Step]:
    """Returns (the program, a function that runs it on the batch `host`)."""
    state = task.init()
    compiled = task.train_step.lower(state, put(task, host)).compile()
    update = updates(compiled, state)
    return compiled, lambda: update(put(task, host))


def baseline_step(
    task: Pretraining, host: dict[str, np.ndarray]
) -> tuple[jax.stages.Compiled, Step]:
    """As `our_step`, with the masks drawn on the host."""
    init, step = baseline.make_step(task)
    state = init(task.init().params)
    key = make_key(0)
    random = np.random.default_rng(0)

    def batch() -> baseline.Batch:
        ids, labels = baseline.mask_on_host(
            task.masking, host["input_ids"], host["attention_mask"], random
        )
        arrays = {"ids": ids, "attention": host["attention_mask"], "labels": labels}
        columns = sharding.put_batch(arrays, task.mesh, len(ids))
        return tuple(columns[name] for name in arrays)

    compiled = step.lower(state, batch(), key).compile()
    update = updates(compiled, state)
    return compiled, lambda: update(batch(), key)


def updates(step: Callable[..., tuple[Any, Any]], state: Any) -> Callable[..., Any]:
    """Returns `step` as a function of the batch that keeps the state and returns the metrics."""

    def update(*batch: Any) -> Any:
        nonlocal state
        state, result = step(state, *batch)
        return result

    return update


def start_torch(python: str, task: Pretraining) -> interleaved.Worker:
    """Starts mlm/bench/torch_step.py on the same model and rows of the same size."""
    say("bench: starting PyTorch")
    settings = configs.flatten(task.config)
    settings["model"] = task.module.config.to_dict()
    settings["special_ids"] = task.info.special_ids
    return interleaved.Worker([python, torch_step.__file__], settings, name=f"--torch={python}")


def memory(program: jax.stages.Compiled) -> dict[str, int]:
    """Returns the bytes of a program on a device, and how many of them are temporaries."""
    sizes = program.memory_analysis()
    whole = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    return {
        "memory_bytes": whole - sizes.alias_size_in_bytes,
        "temporary_bytes": sizes.temp_size_in_bytes,
    }


def repeated(step: Step) -> interleaved.Repeat:
    """Returns a function that makes so many steps and waits for the last."""

    def repeat(calls: int) -> None:
        for _ in range(calls):
            last = step()
        jax.block_until_ready(last)

    return repeat
