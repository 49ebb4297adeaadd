"""The command `bench`: the step beside the stock one, the input alone, and what the input takes from the step.

Measured in one process, in turns, as medians: on a shared machine only such ratios say something.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from mlm import flops, stock
from mlm.data.manifest import Manifest
from mlm.training import build, loop, sharding

TURN = 1.0  # seconds of a turn, at least


def run(
    config: ConfigDict, parts: list[str], manifest: Manifest | None, *, seconds: float, as_json: bool
) -> dict[str, Any]:
    """Prints the measurements, as a table or as one line of JSON, and returns them by part.

    Args:
      config: of the run.
      parts: some of "step", "batches", "loop"; the first alone needs neither shards nor TensorFlow.
      manifest: of the shards, for the other parts.
      seconds: of each part.
    """
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    found: dict[str, Any] = {}
    if "step" in parts:
        found["step"] = compare_steps(config, mesh, seconds)
    if "batches" in parts:
        found["batches"] = measure_batches(config, manifest, mesh, seconds)
    if "loop" in parts:
        found["loop"] = compare_loop(config, manifest, mesh, seconds)
    print(json.dumps(found) if as_json else _table(found))
    return found


def compare_steps(config: ConfigDict, mesh: jax.sharding.Mesh, seconds: float) -> dict[str, Any]:
    """Measures our step and the stock one of `stock.py` on rows of random tokens.

    Returns:
      "mlm" and "stock": {"tokens_per_second", "milliseconds", "temporary_bytes" (of each device, as compiled), "mfu"
      (None where the peak of the device isn't known)}; "ratio" of their speeds, the median of neighbouring turns.
    """
    size, rows, length = config.tokenizer.vocab_size, config.data.global_batch, config.shards.length
    facts = build.facts_without_data(config, records=rows)
    ours = build.build_run(config, facts, mesh)
    random = np.random.default_rng(0)
    host = {
        "input_ids": random.integers(len(facts.all_special_ids), size, (rows, length)).astype(np.int32),
        "attention_mask": np.ones((rows, length), np.int32),
        "record_id": np.arange(rows, dtype=np.uint32),
        "epoch": np.zeros(rows, np.uint32),
    }
    state = ours.init()
    start, stock_step = stock.make_step(
        module=ours.model.module,
        schedule=build.build_schedule(config, ours.steps),
        weight_decay=config.optimizer.weight_decay,
        mesh=mesh,
    )
    stock_state, key = start(jax.tree.map(lambda x: x.copy(), state.params)), jax.random.key(0)

    def stock_batch() -> tuple[jax.Array, ...]:
        read, labels = stock.mask_on_host(ours.model.masking, host["input_ids"], host["attention_mask"], random)
        arrays = {"ids": read, "attention": host["attention_mask"], "labels": labels}
        return tuple(sharding.put_batch(arrays, mesh, rows).values())

    compiled = ours.train_step.lower(state, sharding.put_batch(host, mesh, rows)).compile()
    stock_compiled = stock_step.lower(stock_state, *stock_batch(), key).compile()

    def turn() -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, sharding.put_batch(host, mesh, rows))
        return metrics["loss"]

    def stock_turn() -> jax.Array:
        nonlocal stock_state
        stock_state, loss = stock_compiled(stock_state, *stock_batch(), key)
        return loss

    pairs = alternate(turn, stock_turn, seconds)
    peak = flops.peak_flops(jax.devices()[0].device_kind)
    found: dict[str, Any] = {}
    for name, program, column in zip(
        ("mlm", "stock"), (compiled, stock_compiled), zip(*pairs, strict=True), strict=True
    ):
        rate = statistics.median(column) * rows * length
        found[name] = {
            "tokens_per_second": rate,
            "milliseconds": 1e3 * rows * length / rate,
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
            "mfu": peak and rate * build.flops_per_token(config, facts) / (peak * jax.device_count()),
        }
    found["ratio"] = statistics.median(one / other for one, other in pairs)
    return found


def measure_batches(
    config: ConfigDict, manifest: Manifest, mesh: jax.sharding.Mesh, seconds: float
) -> dict[str, float]:
    """Returns {"tokens_per_second"} of the batches of the run alone, after the first."""
    stream = loop.train_batches(config, manifest, mesh, 0)
    rows = len(next(stream)["record_id"])
    begin = time.monotonic()
    for count in itertools.count(1):
        next(stream)
        if time.monotonic() - begin >= seconds:
            return {"tokens_per_second": count * rows * manifest.length / (time.monotonic() - begin)}
    raise AssertionError("unreachable")


def compare_loop(config: ConfigDict, manifest: Manifest, mesh: jax.sharding.Mesh, seconds: float) -> dict[str, float]:
    """Measures the step with the batches of the run and with one batch again and again.

    Returns:
      "one_batch", "real_batches": tokens/s; "ratio": the second over the first, the median of neighbouring turns.
    """
    step = build.build_run(config, loop.facts_of(manifest), mesh)
    rows, tokens = config.data.global_batch, config.data.global_batch * manifest.length
    stream = loop.train_batches(config, manifest, mesh, 0)
    same = sharding.put_batch(next(stream), mesh, rows)
    state = step.init()

    def update(batch: dict[str, jax.Array]) -> jax.Array:
        nonlocal state
        state, metrics = step.train_step(state, batch)
        return metrics["loss"]

    pairs = alternate(lambda: update(same), lambda: update(sharding.put_batch(next(stream), mesh, rows)), seconds)
    one, real = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "one_batch": tokens * one,
        "real_batches": tokens * real,
        "ratio": statistics.median(real / one for one, real in pairs),
    }


def alternate(
    one: Callable[[], jax.Array], other: Callable[[], jax.Array], seconds: float
) -> list[tuple[float, float]]:
    """Returns calls per second of two functions in turns, three pairs of turns at least; both are called once before.

    Each function starts something and returns an array that is there when it is done; a turn waits for its last.
    """
    jax.block_until_ready([one(), other()])
    begin = time.monotonic()
    jax.block_until_ready([one(), other()])
    calls = max(1, round(2 * TURN / (time.monotonic() - begin)))

    def turn(function: Callable[[], jax.Array]) -> float:
        begin = time.monotonic()
        for _ in range(calls):
            last = function()
        jax.block_until_ready(last)
        return calls / (time.monotonic() - begin)

    pairs, begin = [], time.monotonic()
    while len(pairs) < 3 or time.monotonic() - begin < seconds:
        pairs.append((turn(one), turn(other)))
    return pairs


def _table(found: dict[str, Any]) -> str:
    lines = []
    if "step" in found:
        lines.append(f"{'step':28}{'tokens/s':>14}{'ms':>10}{'MFU':>8}{'temporaries':>14}")
        for key, name in (("mlm", "mlm"), ("stock", "stock (run_mlm_flax.py)")):
            row = found["step"][key]
            mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
            lines.append(
                f"{name:28}{row['tokens_per_second']:14,.0f}{row['milliseconds']:10.1f}{mfu:>8}"
                f"{row['temporary_bytes'] / 1e6:11,.0f} MB"
            )
        lines.append(f"mlm is {found['step']['ratio']:.2f} times as fast")
    if "batches" in found:
        lines.append(f"{'batches alone':28}{found['batches']['tokens_per_second']:14,.0f} tokens/s")
    if "loop" in found:
        row = found["loop"]
        lines.append(f"{'step, one batch reused':28}{row['one_batch']:14,.0f} tokens/s")
        lines.append(f"{'step, batches of the run':28}{row['real_batches']:14,.0f} tokens/s, {row['ratio']:.1%} of it")
    return "\n".join(lines)
