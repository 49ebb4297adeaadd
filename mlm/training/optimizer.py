"""Optimizers.

To add one: an entry here, its name in mlm/config_rules.py, a line in tests/training/test_optimizer.py.
"""

import functools
from typing import Any

import jax
import optax
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers

from mlm.model.module import Params
from mlm.training.stable_adamw import divide_by_rms


def make_optimizer(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns clip -> direction -> decoupled weight decay -> learning rate, from the config's group `optimizer`.

    The direction is that of adamw (Loshchilov and Hutter, 2019), stable_adamw (Wortsman et al., 2023), lamb (You et
    al., 2020), lion (Chen et al., 2023), adafactor (Shazeer and Stern, 2018; factored second moments, updates relative
    to the size of the parameter, b1 as momentum or 0 for none) or muon (Jordan et al., 2024, b1 as momentum, with the
    update size of Liu et al., 2025, so that AdamW's learning rate and decay carry over; AdamW on embeddings, biases and
    norms). Fewer muon_iterations (of Newton-Schulz) leave its updates less orthogonal. A kernel of three dimensions,
    [input, part, output], is a matrix for each part to muon.
    """
    b1, b2, eps = optimizer.b1, optimizer.b2, optimizer.eps
    clip = [optax.clip_by_global_norm(optimizer.clip_norm)] if optimizer.clip_norm > 0 else []
    adam = optax.scale_by_adam(b1, b2, eps)
    decay = optax.add_decayed_weights(optimizer.weight_decay, decayed)
    as_matrices = functools.partial(jax.tree.map, lambda p: MuonDimensionNumbers(0, p.ndim - 1))
    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=optimizer.muon_iterations, beta=b1, eps=eps, weight_dimension_numbers=as_matrices
    )
    sized = optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: 0.2 * max(u.shape[0], u.shape[-1]) ** 0.5 * u, updates)
    )
    parts = functools.partial(
        jax.tree_util.tree_map_with_path, lambda path, _: "kernel" if path[-1].key == "kernel" else "rest"
    )
    directions = {
        "adamw": [adam, decay],
        "stable_adamw": [divide_by_rms(optax.chain(adam, decay), b2, eps)],
        "lamb": [adam, decay, optax.scale_by_trust_ratio()],
        "lion": [optax.scale_by_lion(b1, b2), decay],
        # Adafactor ends in a sign flip: undone here, redone by the rate.
        "adafactor": [optax.adafactor(None, momentum=b1 or None), optax.scale(-1.0), decay],
        "muon": [optax.partition({"kernel": optax.chain(orthogonal, sized), "rest": adam}, parts), decay],
    }
    return optax.chain(*clip, *directions[optimizer.name], scale_by_learning_rate(schedule))


def scale_by_learning_rate(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Returns optax's transformation of that name, with the schedule evaluated at `progress` if given (train.hours)."""
    by_count = optax.scale_by_learning_rate(schedule)

    def update(updates: Params, state: Any, params: Params | None = None, *, progress: Any = None, **_: Any) -> tuple:
        at = state if progress is None else optax.ScaleByScheduleState(progress)
        new, _ = by_count.update(updates, at, params)
        return new, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(by_count.init, update)


def decayed(params: Params) -> Params:
    """Returns True for parameters of two dimensions or more: matrices and embeddings, not biases and norms."""
    return jax.tree.map(lambda p: p.ndim > 1, params)
