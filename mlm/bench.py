"""The command `bench`: how fast the input is, and what it takes from the step.

Measured in one process, in turns, as medians: on a shared machine only such ratios say something.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import jax
from ml_collections import ConfigDict

from mlm.data import batches
from mlm.data.manifest import Manifest
from mlm.training import build, loop, sharding

STEPS = 20  # of each turn


def run(config: ConfigDict, manifest: Manifest, *, seconds: float) -> dict[str, float]:
    """Prints and returns the measurements.

    Args:
      config: of the run.
      manifest: of its shards.
      seconds: of each measurement.

    Returns:
      batches: tokens/s of the input alone; one_batch and real_batches: tokens/s of the step with one batch again and
      again, and with the batches of the run; ratio: the second over the first, the median of neighbouring turns.
    """
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    step = build.build_run(config, loop.facts_of(manifest), mesh)
    rows, tokens = config.data.global_batch, config.data.global_batch * manifest.length
    found = {"batches": tokens * _rate(_stream(config, manifest, mesh), seconds)}
    print(f"batches alone              {found['batches']:14,.0f} tokens/s")

    stream = _stream(config, manifest, mesh)
    same = sharding.put_batch(next(stream), mesh, rows)
    state = step.init()

    def turn(next_batch: Callable[[], dict[str, jax.Array]]) -> float:
        nonlocal state
        begin = time.monotonic()
        for _ in range(STEPS):
            state, metrics = step.train_step(state, next_batch())
        jax.block_until_ready(metrics)
        return STEPS * tokens / (time.monotonic() - begin)

    turn(lambda: same)  # compiles
    pairs, begin = [], time.monotonic()
    while len(pairs) < 3 or time.monotonic() - begin < seconds:
        one, real = turn(lambda: same), turn(lambda: sharding.put_batch(next(stream), mesh, rows))
        pairs.append((one, real))
    found["one_batch"], found["real_batches"] = (statistics.median(column) for column in zip(*pairs, strict=True))
    found["ratio"] = statistics.median(real / one for one, real in pairs)
    print(f"step, one batch reused     {found['one_batch']:14,.0f} tokens/s")
    print(f"step, batches of the run   {found['real_batches']:14,.0f} tokens/s, {found['ratio']:.1%} of it")
    return found


def _stream(config: ConfigDict, manifest: Manifest, mesh: jax.sharding.Mesh) -> Iterator:
    rows = config.data.global_batch
    return batches.train_batches(
        manifest,
        split="train",
        seed=config.data.seed,
        global_batch=rows,
        lanes=config.data.lanes,
        start_step=0,
        rows=sharding.local_rows(mesh, rows),
    )


def _rate(stream: Iterator, seconds: float) -> float:
    """Returns items per second, after the first."""
    next(stream)
    begin = time.monotonic()
    for count in itertools.count(1):
        next(stream)
        if time.monotonic() - begin >= seconds:
            return count / (time.monotonic() - begin)
    raise AssertionError("unreachable")
