"""Norms by parameter, every log.norms_every steps: of the gradient before clipping, the parameter, and its update.

A step always returns those of the gradient, whose squares it adds up anyway: it is one program with and without this.
For the others, the parameters before it, which it overwrites, are copied, and compared with those after it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.model.module import Params
from mlm.training import sharding
from mlm.training.task import Task


def by_parameter(tree: Params) -> jax.Array:
    """Returns the norm of each leaf, over all devices, float32 [P], in the order of `sharding.named_leaves`."""
    return jnp.sqrt(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]))


def copy_params(params: Params) -> Params:
    """Returns new arrays, which the step may not overwrite."""
    return jax.tree.map(jnp.copy, params)


def param_norms(before: Params, after: Params) -> dict[str, jax.Array]:
    """Returns the norms of the parameters before a step, and those of its updates over them, [P]."""
    norms_P, updates_P = by_parameter(before), by_parameter(jax.tree.map(jnp.subtract, after, before))
    return {"parameter_norms": norms_P, "updates_over_parameters": updates_P / norms_P}


def make_norms(task: Task) -> tuple[Callable[[Params], Params], Callable[[Params, Params], dict[str, jax.Array]]]:
    """Returns `copy_params` and `param_norms`, compiled, so that no step waits for it."""
    params = task.abstract_state.params
    copy = jax.jit(copy_params, out_shardings=sharding.shardings_of(params))
    measure = jax.jit(param_norms, out_shardings=NamedSharding(task.mesh, P()))
    return copy.lower(params).compile(), measure.lower(params, params).compile()
