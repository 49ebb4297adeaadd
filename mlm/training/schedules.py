"""Schedules, functions of the number of steps done: the learning rate, the masking rate, and what is due after a step.

To add a learning rate: an entry here, its name in mlm/config_rules.py, a line in tests/training/test_optimizer.py.
"""

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from mlm.errors import InputError


def make_schedule(config: ConfigDict, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of steps done, in a run of `steps`.

    After the warmup, "linear" and "cosine" fall to `final_fraction` of the peak at `steps`, "inverse_sqrt" falls with
    1 / sqrt(step) (Vaswani et al., 2017, 5.3, scaled to leave the warmup at the peak), and "wsd" stays, and falls
    linearly over the last `decay_fraction` of `steps` (Hu et al., 2024, MiniCPM), "wsd_sqrt" by 1 - sqrt(progress)
    (Hägele et al., 2024).
    """
    schedule, peak, warmup = config.schedule, config.optimizer.learning_rate, warmup_steps(config, steps)
    final_fraction, rest, start = schedule.final_fraction, max(steps - warmup, 1), max(warmup, 1)
    final, decay = final_fraction * peak, min(max(round(schedule.decay_fraction * steps), 1), rest)
    schedules = {
        "linear": optax.linear_schedule(peak, final, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=final_fraction),
        # join_schedules evaluates it during the warmup too, where count < 0.
        "inverse_sqrt": lambda count: peak * jnp.sqrt(start / jnp.maximum(start + count, 1)),
        "wsd": optax.linear_schedule(peak, final, decay, transition_begin=rest - decay),
        "wsd_sqrt": lambda count: peak + (final - peak) * jnp.sqrt(jnp.clip((count - rest + decay) / decay, 0, 1)),
        "constant": optax.constant_schedule(peak),
    }
    after = schedules[schedule.name]
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def warmup_steps(config: ConfigDict, steps: int) -> int:
    """Returns the warmup steps of a run of `steps`."""
    warmup = config.schedule.warmup
    return round(warmup * steps) if warmup < 1 else int(warmup)


def check_schedule(config: ConfigDict, steps: int) -> None:
    """Raises InputError if a run of epochs, whose `steps` the data decides, is too short for warmup and decay."""
    if not config.train.epochs:
        return
    schedule, warmup = config.schedule, warmup_steps(config, steps)
    if warmup > steps:
        what = f"the run has {steps:,} steps (train.epochs = {config.train.epochs:g})"
        raise InputError(f"config.schedule.warmup = {warmup}: {what}; set it lower, or to a share below 1.")
    decay = schedule.decay_fraction * steps if schedule.name in ("wsd", "wsd_sqrt") else 0
    if warmup + decay > steps + 1:
        what = f"the run has {steps:,} steps, and a warmup of {warmup:,}"
        raise InputError(f"config.schedule.decay_fraction = {schedule.decay_fraction:g}: {what}; lower either.")


def rate_schedule(rate: float, end_rate: float, steps: int) -> optax.Schedule | None:
    """Returns the linear schedule of the masking rate (Ankner et al., 2024), None where it is constant."""
    return optax.linear_schedule(rate, end_rate, max(steps - 1, 1)) if end_rate else None


def is_due(step: int, every: int) -> bool:
    """Returns whether something is to be done after a step, every so many steps; never if that is 0."""
    return every > 0 and step % every == 0
