"""StableAdamW (Wortsman et al., 2023)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mlm.model.module import Params


def divide_by_rms(adamw: optax.GradientTransformation, b2: float, eps: float) -> optax.GradientTransformation:
    """Returns AdamW whose updates are divided by max(1, RMS of g / sqrt(v)) of each tensor (algorithm 2 of the paper).

    As in the package optimi, which trained ModernBERT: v already includes the current gradient g and is bias-corrected
    (by b2 * (1 - b2^(t-1)) / (1 - b2^t) in place of b2, which is the same). The weight decay is divided, too.
    """

    def update(grads: Params, state: Any, params: Params | None = None) -> tuple:
        updates, state = adamw.update(grads, state, params)
        moments = optax.tree.bias_correction(state[0].nu, b2, state[0].count)

        def divide(update: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
            return update / jnp.maximum(1, jnp.sqrt(jnp.mean(jnp.square(g) / jnp.maximum(v, eps**2))))

        return jax.tree.map(divide, updates, grads, moments), state

    return optax.GradientTransformation(adamw.init, update)
