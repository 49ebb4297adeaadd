"""Optimizers, and the schedules that they follow: functions of the number of batches read.

To add an optimizer or a learning rate: an entry here, its name in mlm/config_rules.py, a line in
tests/training/test_optimizer.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers

from mlm.errors import InputError
from mlm.model.module import Params


def make_optimizer(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns clip -> direction -> decoupled weight decay -> learning rate, from the config's group `optimizer`.

    The direction is that of adamw (Loshchilov and Hutter, 2019), stable_adamw (Wortsman et al., 2023), lamb (You et
    al., 2020), lion (Chen et al., 2023), adafactor (Shazeer and Stern, 2018; factored second moments, updates relative
    to the size of the parameter, b1 as momentum or 0 for none) or muon (Jordan et al., 2024, b1 as momentum, with the
    update size of Liu et al., 2025, so that AdamW's learning rate and decay carry over; AdamW on embeddings, biases and
    norms). Fewer muon_iterations (of Newton-Schulz) leave its updates less orthogonal. A kernel of three dimensions,
    [input, part, output], is a matrix for each part to muon.
    """
    b1 = optimizer.b1
    b2 = optimizer.b2
    eps = optimizer.eps
    clip = [optax.clip_by_global_norm(optimizer.clip_norm)] if optimizer.clip_norm > 0 else []
    adam = optax.scale_by_adam(b1, b2, eps)
    decay = optax.add_decayed_weights(optimizer.weight_decay, decayed)
    match optimizer.name:
        case "adamw":
            direction = [adam, decay]
        case "stable_adamw":
            direction = [divide_by_rms(optax.chain(adam, decay), b2, eps)]
        case "lamb":
            direction = [adam, decay, optax.scale_by_trust_ratio()]
        case "lion":
            direction = [optax.scale_by_lion(b1, b2), decay]
        case "adafactor":  # it ends in a sign flip: undone here, redone by the rate
            direction = [optax.adafactor(None, momentum=b1 or None), optax.scale(-1.0), decay]
        case "muon":
            direction = [muon_or_adam(adam, b1, eps, optimizer.muon_iterations), decay]
    return optax.chain(*clip, *direction, scale_by_learning_rate(schedule))


def scale_by_learning_rate(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Returns optax's transformation of that name, with the schedule evaluated at the `step` of the run if given.

    A step that is skipped updates no count of an optimizer's own. By that count a decay would end after the run does.
    """
    by_count = optax.scale_by_learning_rate(schedule)

    def update(
        updates: Params, state: Any, params: Params | None = None, *, step: Any = None, **_: Any
    ) -> tuple:
        return by_count.update(
            updates, state if step is None else optax.ScaleByScheduleState(step), params
        )

    return optax.GradientTransformationExtraArgs(by_count.init, update)


def decayed(params: Params) -> Params:
    """Returns True for parameters of two dimensions or more: matrices and embeddings, not biases and norms."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def divide_by_rms(
    adamw: optax.GradientTransformation, b2: float, eps: float
) -> optax.GradientTransformation:
    """Returns StableAdamW: AdamW's updates over max(1, RMS of g / sqrt(v)) of each tensor (Wortsman et al., alg. 2).

    As in the package optimi, which trained ModernBERT: v already includes the current gradient g and is bias-corrected
    (by b2 * (1 - b2^(t-1)) / (1 - b2^t) in place of b2, which is the same). The weight decay is divided, too.
    """

    def update(grads: Params, state: Any, params: Params | None = None) -> tuple:
        updates, state = adamw.update(grads, state, params)
        moments = optax.tree.bias_correction(state[0].nu, b2, state[0].count)

        def divide(update: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
            return update / jnp.maximum(
                1, jnp.sqrt(jnp.mean(jnp.square(g) / jnp.maximum(v, eps**2)))
            )

        return jax.tree.map(divide, updates, grads, moments), state

    return optax.GradientTransformation(adamw.init, update)


def muon_or_adam(
    adam: optax.GradientTransformation, beta: float, eps: float, iterations: int
) -> optax.GradientTransformation:
    """Returns Muon's direction for kernels, and `adam` for all other parameters."""

    def orthogonal_dims(params: Params) -> Params:
        return jax.tree.map(lambda p: MuonDimensionNumbers(0, p.ndim - 1), params)

    def size(updates: Params, _: Params | None) -> Params:
        return jax.tree.map(lambda u: 0.2 * max(u.shape[0], u.shape[-1]) ** 0.5 * u, updates)

    def kind(path: jax.tree_util.KeyPath, _: jax.Array) -> str:
        return "kernel" if path[-1].key == "kernel" else "rest"

    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=iterations, beta=beta, eps=eps, weight_dimension_numbers=orthogonal_dims
    )
    muon = optax.chain(orthogonal, optax.stateless(size))
    return optax.partition(
        {"kernel": muon, "rest": adam}, functools.partial(jax.tree_util.tree_map_with_path, kind)
    )


def make_schedule(config: ConfigDict, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of steps before, in a run of `steps`.

    After the warmup, "linear" and "cosine" fall to `final_fraction` of the peak at `steps`, "inverse_sqrt" falls with
    1 / sqrt(step) (Vaswani et al., 2017, 5.3, scaled to leave the warmup at the peak), and "wsd" stays, and falls
    linearly over the last `decay_fraction` of `steps` (Hu et al., 2024, MiniCPM), "wsd_sqrt" by 1 - sqrt(progress)
    (Hägele et al., 2024).
    """
    schedule = config.schedule
    peak = config.optimizer.learning_rate
    final = schedule.final_fraction * peak
    warmup = warmup_steps(config, steps)
    rest = max(steps - warmup, 1)
    decay = min(max(round(schedule.decay_fraction * steps), 1), rest)
    start = max(warmup, 1)
    schedules = {
        "linear": optax.linear_schedule(peak, final, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=schedule.final_fraction),
        # join_schedules evaluates it during the warmup too, where count < 0.
        "inverse_sqrt": lambda count: peak * jnp.sqrt(start / jnp.maximum(start + count, 1)),
        "wsd": optax.linear_schedule(peak, final, decay, transition_begin=rest - decay),
        "wsd_sqrt": lambda count: (
            peak + (final - peak) * jnp.sqrt(jnp.clip((count - rest + decay) / decay, 0, 1))
        ),
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
    schedule = config.schedule
    warmup = warmup_steps(config, steps)
    if warmup > steps:
        raise InputError(
            f"config.schedule.warmup = {warmup}: the run has {steps:,} steps (train.epochs = {config.train.epochs:g}); "
            "set it lower, or to a share below 1."
        )
    decay = schedule.decay_fraction * steps if schedule.name in ("wsd", "wsd_sqrt") else 0
    if warmup + decay > steps + 1:
        raise InputError(
            f"config.schedule.decay_fraction = {schedule.decay_fraction:g}: the run has {steps:,} steps, and a warmup "
            f"of {warmup:,}; lower either."
        )
