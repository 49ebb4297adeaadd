"""What limits the run, and which settings are faster here."""

import math
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from mlm.errors import InputError
from mlm.training import peaks
from mlm.verify import speed as timing
from mlm.verify.session import Result, Session, Values, show_time

SECONDS, SECONDS_QUICK, STEPS = 300.0, 60.0, 8  # since the start, after which nothing more is tried; steps of a trial


def check(session: Session) -> Iterator[Result]:
    """The largest part of a step's time, and a few settings in the time that is left."""
    if (speed := session.numbers.get("speed")) is None:
        yield Result("verdict", "the step was not timed")
        return
    devices, kind = jax.device_count(), jax.devices()[0].device_kind
    peak, bandwidth = peaks.peak_flops(kind), peaks.PEAK_GBS.get(kind, math.inf)
    parts = {
        "compute": speed["useful_flops"] / (peak or math.inf) / devices,
        "memory": speed["accessed_bytes"] / bandwidth / 1e9,
        "network": session.numbers.get("network", 0.0),
        "input": session.numbers.get("input", 0.0),
        "checkpoints": session.numbers.get("checkpoints", 0.0) / (session.config.checkpoint.every or math.inf),
    }
    limit = max(parts, key=parts.get)
    if not peak and parts[limit] < speed["median"] / 2:
        limit = f"compute or memory, whose peaks on a {kind} are not known"
    shown = ", ".join(f"{name} {show_time(seconds)}" for name, seconds in parts.items() if seconds)
    measured = f"limited by {limit}; a step of {show_time(speed['median'])} would take, by one thing alone: {shown}"
    yield Result("what limits this run", measured, values=parts)
    best, best_flags = speed["tokens_per_second"], _flags(session, {"data.global_batch": speed["rows"]})
    for changes in _trials(session, speed):
        seconds = SECONDS_QUICK if session.quick else SECONDS
        left = multihost_utils.broadcast_one_to_all(np.int32(time.monotonic() - session.begin < seconds))
        if not left:
            break
        flags = _flags(session, changes)
        try:
            rate = timing.measure(session, changes, STEPS)["tokens_per_second"]
        except (MemoryError, InputError, jax.errors.JaxRuntimeError) as error:
            if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                raise
            yield Result(f"with {flags}", f"can't be run here ({type(error).__name__})")
            continue
        times = rate / speed["tokens_per_second"]
        yield Result(f"with {flags}", f"{rate:,.0f} tokens/s, {times:.2f} times as fast", values={"times": times})
        if rate > best:
            best, best_flags = rate, flags
    yield Result("settings to use", best_flags, values={"tokens_per_second": best})


def _trials(session: Session, speed: Values) -> Iterator[Values]:
    """Yields changes of the config: the fastest attention, twice the rows and half of them, and without remat."""
    model, rows, numbers = session.config.model, {"data.global_batch": speed["rows"]}, session.numbers
    if numbers.get("fastest") != numbers.get("attention"):
        yield rows | {"model.attention": numbers["fastest"]}
    if model.remat or model.remat_feed_forward:
        yield rows | {"model.remat": False, "model.remat_feed_forward": 0}
    for count in (2 * speed["rows"], speed["rows"] // 2):
        if count and session.config.data.global_batch % count == 0:
            yield {"data.global_batch": count}


def _flags(session: Session, changes: Values) -> str:
    """Returns the changes as flags for the run: its batch stays, and is read in more or fewer microbatches."""
    accumulate = session.config.data.global_batch // changes["data.global_batch"]
    values = {key: changes[key] for key in changes if key != "data.global_batch"} | {"train.accumulate": accumulate}
    return " ".join(f"--config.{key}={str(value).lower()}" for key, value in values.items())
