"""train.hours becomes train.steps, once: before it starts, a run times its own step on its first batches."""

import bisect
import itertools
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from mlm import cluster
from mlm import config as configs
from mlm.cluster import distributed
from mlm.data.stages import UNTIMED_STEPS, make_stages
from mlm.errors import InputError
from mlm.text import say
from mlm.training import sharding
from mlm.training.task import Task
from mlm.workdir import Workdir

SECONDS = 30.0  # of timing, for all sizes of batches together
LEAST = 3  # timed steps of each size


def with_steps(
    config: ConfigDict, workdir: Workdir, records: int, make_task: Callable[[], Task]
) -> ConfigDict:
    """Returns the config with train.steps for its train.hours: those that the workdir has, or else as measured.

    Every process gets the number of process 0. `make_task` makes the task of the config, whose state is thrown away.
    """
    if config.train.steps:  # as in the config.json of a run that has begun
        return config
    hours = config.train.hours
    saved = configs.read(workdir.config)
    steps = saved.train.steps if saved is not None and saved.train.hours == hours else 0
    if not steps:
        task = make_task()
        seconds_of = {size: seconds_per_step(task, *size) for size in task.stages.sizes}
        steps = of_primary(steps_of(config, records, seconds_of))
        if steps < 1:
            raise InputError(
                f"config.train.hours = {hours:g}: is less than one step takes here; set it higher."
            )
        if cluster.is_primary():
            say(f"{hours:g} hours are {steps:,} steps here")
    return configs.replace(config, {"train.steps": steps})


def steps_of(config: ConfigDict, records: int, seconds_of: dict[tuple[int, int], float]) -> int:
    """Returns the most steps that take no longer than train.hours, given the seconds of a step of each size."""

    def seconds(steps: int) -> float:
        timed = configs.flatten(config) | {"train.steps": steps}
        stages = make_stages(configs.unflatten(timed), records).between(1, steps)
        return sum(stage.count * seconds_of[stage.rows, stage.length] for stage in stages)

    return bisect.bisect_right(range(1, UNTIMED_STEPS), config.train.hours * 3600, key=seconds)


def seconds_per_step(task: Task, rows: int, length: int) -> float:
    """Returns the seconds of a step of so many rows and tokens on the first such batches, without compilation."""
    stage = next(
        stage for stage in task.stages.table if (stage.rows, stage.length) == (rows, length)
    )
    # again from the first one where the stage is short
    batches = itertools.chain.from_iterable(
        itertools.islice(task.batches(stage.first - 1), stage.count) for _ in itertools.count()
    )
    state = task.init()
    limit = SECONDS / len(task.stages.sizes)
    begin = 0.0
    metrics = None
    # the first step compiles, and the second one starts the clock
    for count in itertools.count(-1):
        batch = sharding.put_batch(next(batches), task.mesh, rows)
        cluster.progress("compile" if count < 0 else "step", max(count, 0))
        distributed.compile_together(task.train_step, state, batch, length)
        previous = metrics
        state, metrics = task.train_step(state, batch, length)
        jax.block_until_ready(previous)  # as the training loop, which is one step ahead
        if count == 0:
            jax.block_until_ready(metrics)
            begin = time.monotonic()
        elif count >= LEAST and of_primary(int(time.monotonic() - begin >= limit)):
            jax.block_until_ready(metrics)
            return (time.monotonic() - begin) / count
    raise AssertionError


def of_primary(number: int) -> int:
    """Returns process 0's number on every process."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
