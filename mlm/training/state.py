"""The state of a run: all that the next step depends on besides its batch. A checkpoint holds exactly this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from transformers import RobertaConfig

from mlm.model import priming, roberta
from mlm.model.roberta import Params
from mlm.training.sharding import tree_shardings


class Window(flax.struct.PyTreeNode):
    """Sums since the last line of the log, float32 scalars. They are saved, so a restart leaves no gap in a mean."""

    loss: jax.Array  # nats
    weight: jax.Array  # predictions
    correct: jax.Array  # predictions that were right

    @classmethod
    def zero(cls) -> Window:
        """Returns empty sums."""
        return cls(*(jnp.zeros((), jnp.float32) for _ in range(3)))

    def add(self, new: Window, *, fresh: jax.Array, use: jax.Array) -> Window:
        """Returns the sums with `new` added if `use`, counted from zero if `fresh`."""
        return jax.tree.map(lambda old, more: jnp.where(fresh, 0, old) + jnp.where(use, more, 0), self, new)


class TrainState(flax.struct.PyTreeNode):
    """Parameters in float32, the optimizer's state, and the counters."""

    step: jax.Array  # int32: batches consumed
    params: Params
    opt_state: optax.OptState
    ema: Params | None  # averaged parameters; None if off
    bad_in_row: jax.Array  # int32: non-finite updates since the last good one
    skipped: jax.Array  # int32: non-finite updates in all
    window: Window

    @property
    def best_params(self) -> Params:
        """The parameters to evaluate and to export: the averaged ones if there are any."""
        return self.params if self.ema is None else self.ema


def plan_state(
    *, model_config: RobertaConfig, tx: optax.GradientTransformation, seed: int, ema: bool, mesh: Mesh
) -> tuple[Callable[..., TrainState], TrainState]:
    """Returns a jitted function that makes a fresh state, every array created where it lives, and the state's shapes.

    The function takes the counts_V of `priming.prime`, or nothing for transformers' own initialisation.

    The shapes are `jax.ShapeDtypeStruct`s with shardings: they take no memory, on a mesh that need not be there.
    """

    def init(counts_V: jax.Array | None = None) -> TrainState:
        key = jax.random.key(seed)
        params = roberta.init_params(model_config, key)
        if counts_V is not None:
            params = priming.prime(params, model_config, counts_V, jax.random.fold_in(key, 1))
        return fresh_state(params, tx, ema=ema)

    return placed(init, mesh)


def fresh_state(params: Params, tx: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """Returns the state of `params` before the first update."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, tx.init(params), params if ema else None, zero, zero, Window.zero())


def placed(init: Callable[..., TrainState], mesh: Mesh, *args: Any) -> tuple[Callable[..., TrainState], TrainState]:
    """Returns `init`, jitted so that every array is created where it lives, and the placed shapes of what it makes.

    Args:
      init: a function of `args`, or of nothing.
      mesh: of the run.
      args: arrays or shapes.
    """
    shapes = jax.eval_shape(init, *args)
    shardings = tree_shardings(shapes, mesh, shapes.params)
    struct = jax.ShapeDtypeStruct
    there = jax.tree.map(lambda s, sharding: struct(s.shape, s.dtype, sharding=sharding), shapes, shardings)
    return jax.jit(init, out_shardings=shardings), there


def shardings_of(shapes: Any) -> Any:
    """Returns the tree of shardings of a tree of placed shapes or arrays."""
    return jax.tree.map(lambda s: s.sharding, shapes)
