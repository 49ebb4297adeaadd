"""The state of a run: all that the next step depends on besides its batch. A checkpoint holds exactly this."""

from collections.abc import Callable
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mlm.model.module import Params
from mlm.training.sharding import tree_shardings


class Window(flax.struct.PyTreeNode):
    """Sums since the last logged step, float32 scalars; in the state, so a restart does not change a logged mean."""

    loss: jax.Array  # nats
    weight: jax.Array  # predictions
    correct: jax.Array  # correct predictions


class TrainState(flax.struct.PyTreeNode):
    """Parameters in float32, the optimizer's state, and the counters."""

    step: jax.Array  # int32: batches consumed
    params: Params
    opt_state: optax.OptState
    ema: Params | None  # averaged parameters; None if off
    consecutive_nonfinite: jax.Array  # int32: non-finite steps since the last finite one
    skipped: jax.Array  # int32: non-finite steps in total
    window: Window

    @classmethod
    def create(cls, params: Params, tx: optax.GradientTransformation, *, ema: bool) -> Self:
        """Returns the state before the first step."""
        zero, window = jnp.zeros((), jnp.int32), Window(*(jnp.zeros((), jnp.float32) for _ in range(3)))
        return cls(zero, params, tx.init(params), params if ema else None, zero, zero, window)

    @property
    def best_params(self) -> Params:
        """The parameters to evaluate and to export: the averaged ones if there are any."""
        return self.params if self.ema is None else self.ema


def jit_init(init: Callable[..., TrainState], mesh: Mesh) -> tuple[Callable[..., TrainState], TrainState]:
    """Returns `init` jitted, every array created on its devices, and the state of abstract arrays with shardings."""
    shapes = jax.eval_shape(init)
    shardings = tree_shardings(shapes, mesh, shapes.params)
    abstract = jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, shardings)
    return jax.jit(init, out_shardings=shardings), abstract


def shardings_of(tree: Any) -> Any:
    """Returns the shardings of a tree of arrays or abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
