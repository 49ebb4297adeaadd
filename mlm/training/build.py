"""From a config and a few facts of the data to the model, the state and the steps that `train` runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from transformers import RobertaConfig

from mlm.errors import InputError
from mlm.model import attention, flops, roberta
from mlm.model.masking import SpanMasking, TokenMasking, WordMasking
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


def made_up_words(facts: DataFacts) -> np.ndarray:
    """Returns which tokens start a word, bool [V], of a tokenizer that nobody has made yet: two in three."""
    return np.arange(facts.vocab_size) % 3 > 0


@dataclasses.dataclass(frozen=True)
class Model:
    """The model and its objective."""

    config: RobertaConfig
    network: Network
    masking: TokenMasking

    @property
    def eval_masking(self) -> TokenMasking:
        """The masks of the evaluation: of one rate throughout, `masking.rate`."""
        return dataclasses.replace(self.masking, end_rate=0.0)


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
    short_step: Callable | None = None  # that of the first `short_steps` updates, of rows of data.short_length
    short_steps: int = 0

    def step_of(self, update: int) -> Callable:
        """Returns the step that makes an update, counted from 1."""
        return self.short_step if update <= self.short_steps else self.train_step


def build_model(
    config: ConfigDict, facts: DataFacts, mesh: Mesh | None = None, *, starts_V: np.ndarray | None = None
) -> Model:
    """Returns the model for the data.

    Args:
      config: of the run.
      facts: of the data.
      mesh: to run on; without one its attention is the one for any device.
      starts_V: which tokens start a word, for the masks of words and spans; None where no mask is drawn.

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
    del sizes["attention"]  # of the mesh too
    dtype = sizes.pop("dtype")
    remat, remat_feed_forward = sizes.pop("remat"), sizes.pop("remat_feed_forward")
    model_config = roberta.make_config(vocab_size=facts.vocab_size, special_ids=facts.special_ids, **sizes)
    isolated = config.data.isolate_documents
    attend = None if mesh is None else build_attention(config, model_config, facts.length, mesh, isolated=isolated)
    cls_id = facts.special_ids["cls"] if isolated else None
    network = Network(model_config, dtype, remat, remat_feed_forward, attend, cls_id)
    return Model(model_config, network, build_masking(config, facts, starts_V))


def build_attention(
    config: ConfigDict, model_config: RobertaConfig, length: int, mesh: Mesh, *, isolated: bool = False
) -> attention.Attention:
    """Returns the attention for rows of `length` tokens.

    Args:
      config: of the run, which may name the kernel.
      model_config: of the model.
      length: of the rows.
      mesh: to run on.
      isolated: documents of a row do not see one another.

    Raises:
      InputError: the kernel that the config names can't do them on this mesh.
    """
    kernel = attention.choose(
        config.model.attention,
        platform=mesh.devices.flat[0].platform,
        kind=mesh.devices.flat[0].device_kind,
        length=length,
        heads=model_config.num_attention_heads,
        hidden_size=model_config.hidden_size,
        tensor=mesh.shape["tensor"],
        dropout=model_config.attention_probs_dropout_prob,
        dtype=config.model.dtype,
    )
    return attention.make(kernel, heads=model_config.num_attention_heads, mesh=mesh, isolated=isolated)


def build_masking(config: ConfigDict, facts: DataFacts, starts_V: np.ndarray | None) -> TokenMasking:
    """Returns the masks of the training; see `build_model` for the arguments, and `Model.eval_masking`."""
    settings = config.masking.to_dict()
    kind, longest, span_p = (settings.pop(key) for key in ("kind", "longest", "span_p"))
    del settings["seed"]
    settings |= {"mask_id": facts.special_ids["mask"], "special_ids": facts.all_special_ids}
    settings["vocab_size"] = facts.vocab_size
    if kind == "token":
        return TokenMasking(**settings)
    if starts_V is not None and len(starts_V) != facts.vocab_size:
        raise InputError(
            f"config.masking.kind = {kind}: the tokenizer has {len(starts_V)} entries, the shards were made with one "
            f"of {facts.vocab_size}; use those that belong together."
        )
    settings |= {"starts": None if starts_V is None else starts_V.tobytes(), "longest": longest}
    return WordMasking(**settings) if kind == "word" else SpanMasking(**settings, span_p=span_p)


def build_run(config: ConfigDict, facts: DataFacts, mesh: Mesh, *, starts_V: np.ndarray | None = None) -> Run:
    """Returns the run of a config on a mesh; the arguments are those of `build_model`.

    Raises:
      InputError: a batch or a parameter that the mesh can't split, or rows longer than the model's positions.
    """
    model = build_model(config, facts, mesh, starts_V=starts_V)
    batch, accumulate = config.data.global_batch, config.train.accumulate
    sharding.check_batch(mesh, rows=batch // accumulate, key="data.global_batch / train.accumulate")
    steps = config.train.steps or math.ceil(config.train.epochs * facts.records / batch)
    tx = build_optimizer(config, steps)
    ema_decay = config.optimizer.ema_decay
    init, shapes = state.plan_state(
        model_config=model.config, tx=tx, seed=config.train.seed, ema=ema_decay > 0, mesh=mesh
    )
    shardings = state.shardings_of(shapes)

    def train_step(length: int) -> Callable:
        isolated = config.data.isolate_documents
        attend = build_attention(config, model.config, length, mesh, isolated=isolated)
        gradient = step.make_gradient(
            network=dataclasses.replace(model.network, attention=attend),
            masking=model.masking,
            mask_rate=build_mask_rate(config, steps),
            mask_seed=config.masking.seed,
            dropout_seed=config.train.seed,
            accumulate=accumulate,
            mesh=mesh,
            views=facts.length // length,
        )
        return build_train_step(config, gradient, tx, steps, mesh, shardings)

    eval_step = step.make_eval_step(
        network=model.network,
        masking=model.eval_masking,
        mask_seed=config.evaluate.seed,
        mesh=mesh,
        param_shardings=shardings.params,
    )
    short = config.data.short_length
    short_step, short_steps = (train_step(short), round(config.data.short_share * steps)) if short else (None, 0)
    return Run(model, mesh, steps, init, shapes, train_step(facts.length), eval_step, short_step, short_steps)


def host_input(config: ConfigDict, processes_SxT: np.ndarray) -> dict[str, Any]:
    """Returns how the hosts of a mesh are fed with the batches of a config, as `sharding.host_input`."""
    return sharding.host_input(
        processes_SxT,
        global_batch=config.data.global_batch,
        accumulate=config.train.accumulate,
        eval_batch=config.evaluate.batch,
        lanes=config.data.lanes,
    )


def flops_per_token(config: ConfigDict, facts: DataFacts, *, length: int | None = None) -> float:
    """Returns the useful FLOPs of a training step per token read, of rows of `length` tokens or as in the data."""
    return flops.train_flops_per_token(
        hidden=config.model.hidden_size,
        layers=config.model.layers,
        intermediate=config.model.intermediate_size,
        length=length or facts.length,
        vocab_size=facts.vocab_size,
        predicted_share=(config.masking.rate + (config.masking.end_rate or config.masking.rate)) / 2,
    )


def build_optimizer(config: ConfigDict, steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of a run of `steps` updates."""
    rest = {key: config.optimizer[key] for key in ("name", "b1", "b2", "eps", "weight_decay", "clip_norm")}
    return optimizer.make_optimizer(schedule=build_schedule(config, steps), **rest)


def build_train_step(
    config: ConfigDict,
    gradient: Callable,
    tx: optax.GradientTransformation,
    steps: int,
    mesh: Mesh,
    shardings: state.TrainState,
    has_accuracy: bool = True,
) -> Callable:
    """Returns the step of a run of `steps` updates; the arguments are those of `step.make_train_step`."""
    return step.make_train_step(
        gradient=gradient,
        tx=tx,
        schedule=build_schedule(config, steps),
        ema_decay=config.optimizer.ema_decay,
        guard_limit=config.train.guard_limit,
        log_every=config.log.every,
        mesh=mesh,
        shardings=shardings,
        has_accuracy=has_accuracy,
    )


def build_mask_rate(config: ConfigDict, steps: int) -> optax.Schedule | None:
    """Returns the masking rate of each of `steps` updates; None where it is always the same.

    A rate that falls (Ankner et al., 2024, Dynamic Masking Rate Schedules) or stays high (Wettig et al., 2023, Should
    You Mask 15%) has been found better than a constant 0.15.
    """
    if not config.masking.end_rate:
        return None
    return optax.linear_schedule(config.masking.rate, config.masking.end_rate, max(steps - 1, 1))


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
