"""Learning-rate schedules and optimizers, from plain values.

To add one: a branch here, its name in mlm/config_rules.py, a line in tests/test_optimizer.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from mlm.model.roberta import Params


def make_schedule(
    *, name: str, peak: float, steps: int, warmup_steps: int, decay_fraction: float, final_fraction: float
) -> optax.Schedule:
    """Returns learning rate as a function of the number of updates made.

    Every schedule starts at 0 and rises linearly to `peak` over `warmup_steps`. Then "linear" and "cosine" fall to
    `final_fraction * peak` at `steps`; "inverse_sqrt" falls with 1 / sqrt(updates) (Vaswani et al., 2017, 5.3, scaled
    so that it leaves the warmup at the peak); "wsd" stays, and falls linearly over the last `decay_fraction` of
    `steps` (Hu et al., 2024, MiniCPM); "constant" stays.
    """
    final = final_fraction * peak
    rest = max(steps - warmup_steps, 1)
    decay = min(max(round(decay_fraction * steps), 1), rest)

    if name == "linear":
        after = optax.linear_schedule(peak, final, rest)
    elif name == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=final_fraction)
    elif name == "inverse_sqrt":
        start = max(warmup_steps, 1)
        # Below 0, in the warmup, its value is not used, but must exist.
        after = lambda count: peak * jnp.sqrt(start / jnp.maximum(start + count, 1))  # noqa: E731
    elif name == "wsd":
        after = optax.linear_schedule(peak, final, decay, transition_begin=rest - decay)
    elif name == "constant":
        after = optax.constant_schedule(peak)
    else:
        raise ValueError(f"unknown schedule {name}")
    if warmup_steps == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), after], [warmup_steps])


def make_optimizer(
    *,
    name: str,
    schedule: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    """Returns clip -> direction -> decoupled weight decay -> learning rate.

    Args:
      name: adamw (Loshchilov and Hutter, 2019), lamb (You et al., 2020), lion (Chen et al., 2023), adafactor (Shazeer
        and Stern, 2018; factored second moments, updates relative to the size of the parameter) or muon (Jordan et
        al., 2024, with the update size of Liu et al., 2025, so that AdamW's learning rate and decay carry over; AdamW
        on embeddings, biases and norms).
      schedule: learning rate of each update.
      b1, b2, eps: of the first and second moment; adafactor uses b1 as its momentum, 0 for none, and neither b2 nor
        eps; lion has no eps; for muon, b1 is the momentum too.
      weight_decay: multiplied by the learning rate, on parameters of two dimensions or more.
      clip_norm: largest global gradient norm; 0 for none.
    """
    clip = [optax.clip_by_global_norm(clip_norm)] if clip_norm > 0 else []
    decay = optax.add_decayed_weights(weight_decay, decayed)
    rate = optax.scale_by_learning_rate(schedule)
    if name == "adamw":
        return optax.chain(*clip, optax.scale_by_adam(b1, b2, eps), decay, rate)
    if name == "lion":
        return optax.chain(*clip, optax.scale_by_lion(b1, b2), decay, rate)
    if name == "lamb":
        return optax.chain(*clip, optax.scale_by_adam(b1, b2, eps), decay, optax.scale_by_trust_ratio(), rate)
    if name == "adafactor":
        descent = optax.adafactor(None, momentum=b1 or None)  # ends in a sign flip: undone here, and done by `rate`
        return optax.chain(*clip, descent, optax.scale(-1.0), decay, rate)
    if name == "muon":
        orthogonal = optax.contrib.scale_by_muon(beta=b1, eps=eps, weight_dimension_numbers=_as_matrices)
        sized = optax.stateless(lambda updates, _: jax.tree.map(lambda u: 0.2 * max(u.shape) ** 0.5 * u, updates))
        parts = {"kernel": optax.chain(orthogonal, sized), "rest": optax.scale_by_adam(b1, b2, eps)}
        return optax.chain(*clip, optax.partition(parts, _kernel_or_rest), decay, rate)
    raise ValueError(f"unknown optimizer {name}")


def decayed(params: Params) -> Params:
    """Returns True for parameters of two dimensions or more: matrices and embeddings, not biases and norms."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _kernel_or_rest(params: Params) -> Params:
    """Names the part of muon that each parameter belongs to."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" if path[-1].key == "kernel" else "rest", params)


def _as_matrices(kernels: Params) -> Params:
    return jax.tree.map(lambda _: MuonDimensionNumbers(), kernels)
