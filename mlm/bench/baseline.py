"""The baseline of `bench` and `plan`: the training step of transformers' run_mlm_flax.py, rewritten.

Masks are drawn by numpy on the host; logits of every position, a one-hot loss, AdamW; parameters
are replicated.

Dimensions: B rows, L tokens in a row, V entries of the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding

from mlm.model.families import family_of, find
from mlm.model.masking import TokenMasking
from mlm.model.module import Params
from mlm.model.reference import TransformersModel
from mlm.tasks.pretraining import Pretraining
from mlm.training.optimizer import decayed
from mlm.training.sharding import BATCH

IGNORED = -100  # label of a position that is not predicted

State = tuple[Params, optax.OptState]
Batch = tuple[Array, Array, Array]  # ids, attention mask and labels, [B, L]


def exists(family: str) -> bool:
    """Returns whether run_mlm_flax.py can train a config.model.family: transformers has it in Flax."""
    return find(family).flax_class("MaskedLM") is not None


def mask_on_host(
    masking: TokenMasking,
    ids_BxL: np.ndarray,
    attention_BxL: np.ndarray,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (masked ids_BxL, labels_BxL): each token is drawn independently, at the rates of `masking`."""
    ordinary_BxL = (attention_BxL > 0) & ~np.isin(ids_BxL, masking.special_ids)
    chosen_BxL = ordinary_BxL & (random.random(ids_BxL.shape) < masking.rate)
    kind_BxL = random.random(ids_BxL.shape)
    random_BxL = random.integers(masking.vocab_size, size=ids_BxL.shape)
    read_BxL = np.where(kind_BxL < (1 + masking.mask_share) / 2, random_BxL, ids_BxL)
    read_BxL = np.where(kind_BxL < masking.mask_share, masking.mask_id, read_BxL)
    masked_BxL = np.where(chosen_BxL, read_BxL, ids_BxL)
    labels_BxL = np.where(chosen_BxL, ids_BxL, IGNORED)
    return masked_BxL.astype(np.int32), labels_BxL.astype(np.int32)


def loss(
    model: TransformersModel, params: Params, batch: Batch, dropout_key: Array | None
) -> Array:
    """Returns the mean cross entropy in nats over the positions that have a label."""
    ids_BxL, attention_BxL, labels_BxL = batch
    logits_BxLxV = model.logits(params, ids_BxL, attention_BxL, None, dropout_key)
    one_hot_BxLxV = jax.nn.one_hot(labels_BxL, logits_BxLxV.shape[-1])
    weight_BxL = labels_BxL != IGNORED
    return jnp.sum(optax.softmax_cross_entropy(logits_BxLxV, one_hot_BxLxV) * weight_BxL) / jnp.sum(
        weight_BxL
    )


def make_step(
    task: Pretraining,
) -> tuple[Callable[[Params], State], Callable[..., tuple[State, Array]]]:
    """Returns (params -> state, the jitted `(state, batch, key) -> (state, loss)`)."""
    config = task.module.config
    model = family_of(config).transformers_model(config, task.config.model.dtype)
    tx = optax.adamw(task.schedule, weight_decay=task.config.optimizer.weight_decay, mask=decayed)

    def step(state: State, batch: Batch, key: Array) -> tuple[State, Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss, argnums=1)(model, params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    replicated = NamedSharding(task.mesh, jax.P())
    split = NamedSharding(task.mesh, BATCH)
    in_shardings = (replicated, split, replicated)
    jitted = jax.jit(step, in_shardings=in_shardings, out_shardings=replicated, donate_argnums=0)
    return lambda params: jax.device_put((params, tx.init(params)), replicated), jitted
