"""From a config and a few facts of the data to the model, the state and the steps that `train` runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from transformers import RobertaConfig

from mlm import flops
from mlm.errors import InputError
from mlm.model import attention, roberta
from mlm.model.masking import TokenMasking
from mlm.model.roberta import Network
from mlm.training import optimizer, sharding, state, step


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What the model and the steps need to know of the data. Saved with every checkpoint.

    Attributes:
      vocab_size: entries of the tokenizer.
      special_ids: {"pad", "mask", "cls", "sep", "unk"} -> id.
      all_special_ids: every id that is a special token.
      length: tokens in a row.
      records: rows of the training split.
    """

    vocab_size: int
    special_ids: dict[str, int]
    all_special_ids: tuple[int, ...]
    length: int
    records: int


def facts_without_data(config: ConfigDict, records: int) -> DataFacts:
    """Returns what a config says of data that nobody has made yet: enough for the step, its speed and its size."""
    special = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
    return DataFacts(config.tokenizer.vocab_size, special, tuple(special.values()), config.shards.length, records)


@dataclasses.dataclass(frozen=True)
class Model:
    """The model and its objective."""

    config: RobertaConfig
    network: Network
    masking: TokenMasking


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a training run executes; nothing here holds an array."""

    model: Model
    mesh: Mesh
    steps: int
    init: Callable[..., state.TrainState]
    shapes: state.TrainState
    train_step: Callable
    eval_step: Callable


def build_model(config: ConfigDict, facts: DataFacts, mesh: Mesh | None = None) -> Model:
    """Returns the model for the data; its attention is the one for any device where no mesh is given.

    Raises:
      InputError: rows longer than the model's positions, or an attention kernel that can't do them on this mesh.
    """
    if facts.length > config.model.positions:
        raise InputError(
            f"config.model.positions = {config.model.positions}: the shards hold rows of {facts.length} tokens; "
            "make it at least that."
        )
    sizes = config.model.to_dict()
    del sizes["init"]  # the loop's, which has the text
    dtype, kernel = sizes.pop("dtype"), sizes.pop("attention")
    remat, remat_feed_forward = sizes.pop("remat"), sizes.pop("remat_feed_forward")
    model_config = roberta.make_config(vocab_size=facts.vocab_size, special_ids=facts.special_ids, **sizes)
    masking = TokenMasking(
        rate=config.masking.rate,
        mask_share=config.masking.mask_share,
        random_share=config.masking.random_share,
        mask_id=facts.special_ids["mask"],
        special_ids=facts.all_special_ids,
        vocab_size=facts.vocab_size,
    )
    attend = None
    if mesh is not None:
        kernel = attention.choose(
            kernel,
            platform=mesh.devices.flat[0].platform,
            kind=mesh.devices.flat[0].device_kind,
            length=facts.length,
            heads=config.model.heads,
            hidden_size=config.model.hidden_size,
            tensor=mesh.shape["tensor"],
            dropout=config.model.attention_dropout,
            dtype=dtype,
        )
        attend = attention.make(kernel, heads=config.model.heads, mesh=mesh)
    return Model(model_config, Network(model_config, dtype, remat, remat_feed_forward, attend), masking)


def build_run(config: ConfigDict, facts: DataFacts, mesh: Mesh) -> Run:
    """Returns the run of a config on a mesh.

    Raises:
      InputError: a batch or a parameter that the mesh can't split, or rows longer than the model's positions.
    """
    model = build_model(config, facts, mesh)
    batch, accumulate = config.data.global_batch, config.train.accumulate
    sharding.check_batch(mesh, rows=batch // accumulate, key="data.global_batch / train.accumulate")
    steps = config.train.steps or math.ceil(config.train.epochs * facts.records / batch)
    schedule = build_schedule(config, steps)
    rest = {key: config.optimizer[key] for key in ("name", "b1", "b2", "eps", "weight_decay", "clip_norm")}
    tx = optimizer.make_optimizer(schedule=schedule, **rest)
    ema_decay = config.optimizer.ema_decay
    init, shapes = state.plan_state(
        model_config=model.config, tx=tx, seed=config.train.seed, ema=ema_decay > 0, mesh=mesh
    )
    shardings = state.shardings_of(shapes)
    gradient = step.make_gradient(
        network=model.network,
        masking=model.masking,
        mask_seed=config.masking.seed,
        dropout_seed=config.train.seed,
        accumulate=accumulate,
        mesh=mesh,
    )
    train_step = step.make_train_step(
        gradient=gradient,
        tx=tx,
        schedule=schedule,
        ema_decay=ema_decay,
        guard_limit=config.train.guard_limit,
        log_every=config.log.every,
        mesh=mesh,
        shardings=shardings,
    )
    eval_step = step.make_eval_step(
        network=model.network,
        masking=model.masking,
        mask_seed=config.evaluate.seed,
        mesh=mesh,
        param_shardings=shardings.params,
    )
    return Run(model, mesh, steps, init, shapes, train_step, eval_step)


def flops_per_token(config: ConfigDict, facts: DataFacts) -> float:
    """Returns the useful FLOPs of a training step per token read."""
    return flops.train_flops_per_token(
        hidden=config.model.hidden_size,
        layers=config.model.layers,
        intermediate=config.model.intermediate_size,
        length=facts.length,
        vocab_size=facts.vocab_size,
        predicted_share=config.masking.rate,
    )


def build_schedule(config: ConfigDict, steps: int) -> optax.Schedule:
    """Returns the learning rate of each of `steps` updates."""
    return optimizer.make_schedule(
        name=config.schedule.name,
        peak=config.optimizer.learning_rate,
        steps=steps,
        warmup_steps=config.schedule.warmup_steps or round(config.schedule.warmup_fraction * steps),
        decay_fraction=config.schedule.decay_fraction,
        final_fraction=config.schedule.final_fraction,
    )
