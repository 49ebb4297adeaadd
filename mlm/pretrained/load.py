"""A trained model to use: from a run's newest checkpoint, or from any RoBERTa folder of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh
from safetensors.numpy import load_file
from transformers import RobertaConfig
from transformers.modeling_flax_utils import ACT2FN

from mlm import config as configs
from mlm import logs
from mlm.data.dataset_info import DatasetInfo
from mlm.errors import DamageError, InputError
from mlm.model import factory, roberta, weights
from mlm.model.roberta import Params
from mlm.paths import UPath, local_folder
from mlm.text import printable
from mlm.training import checkpoint, sharding
from mlm.workdir import Workdir

UNREADABLE = (  # what libraries raise at a file of parameters that is not one
    safetensors.SafetensorError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
)


SIZES = {  # of config.json, and the least that each can be
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 2,
    "type_vocab_size": 1,
    "pad_token_id": 0,
}
RATES = ("layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with its parameters on the host.

    Attributes:
      config: transformers' config; its vocabulary is the tokenizer's, without the padding of training.
      params: numpy float32, of that size.
      tokenizer: folder of the tokenizer.
      step: updates made; None where it isn't known.
      run_config: the config of the run, flattened; None for a folder from elsewhere.
      source: where it was read from, for a person.
    """

    config: RobertaConfig
    params: Params
    tokenizer: str
    step: int | None
    run_config: dict | None
    source: str

    @property
    def network(self) -> roberta.Network:
        """The forward pass, in float32."""
        return roberta.Network(self.config)


def from_checkpoint(workdir: Workdir, *, on_damage: str = "stop") -> Trained:
    """Returns the model of a run's newest checkpoint: the averaged parameters if the run keeps an average.

    Raises:
      InputError: there is no checkpoint.
      DamageError: it is not what was written.
    """
    step = checkpoint.choose(workdir.checkpoints, on_damage=on_damage)
    if step is None:
        raise InputError(f"{workdir.checkpoints}: there is no complete checkpoint; train first.")
    meta = checkpoint.read_meta(workdir.checkpoints, step)
    if "labels" in meta["dataset"]:
        raise InputError(f"{workdir.checkpoints}: is of a classifier, and has no language-model head.")
    info = DatasetInfo(**meta["dataset"])
    config = configs.unflatten(meta["config"])
    own = factory.make_network(config.model.to_dict(), info).config
    shapes = jax.eval_shape(lambda: roberta.init_params(own, jax.random.key(0)))
    params = read_params(workdir, step, shapes, averaged=config.optimizer.ema_decay > 0)
    own.vocab_size = info.vocab_size
    return Trained(
        config=own,
        params=weights.resize_vocabulary(params, info.vocab_size),
        tokenizer=str(workdir.tokenizer),
        step=step,
        run_config=meta["config"],
        source=str(workdir.checkpoints / str(step)),
    )


def read_params(workdir: Workdir, step: int, shapes: Params, *, averaged: bool) -> Params:
    """Returns the parameters of a checkpoint, or their average, in numpy; `shapes` is their tree."""
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), sharding.AXES)
    places = sharding.tree_shardings(shapes, mesh, shapes)
    shapes = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)
    name = "ema" if averaged else "params"
    return jax.device_get(checkpoint.restore_params(workdir.checkpoints, step, shapes, name))


def from_folder(folder: str) -> Trained:
    """Returns the model of a transformers folder: config.json, model.safetensors and the tokenizer's files.

    Raises:
      InputError: a file is missing or unreadable, or it is no RoBERTa with a language-model head.
    """
    root = UPath(folder)
    for name in ("config.json", "model.safetensors"):
        if not (root / name).is_file():
            raise InputError(
                f"{folder}: there is no {name}; name a folder that export wrote, or a transformers folder."
            )
    root = UPath(local_folder(folder))  # safetensors reads local files alone
    config = read_config(root, folder)
    if not config.tie_word_embeddings:
        raise InputError(f"{folder}: its embeddings are not tied; a RoBERTa with tied ones is needed.")
    params = read_safetensors(root, folder)
    if isinstance(body := params.get("roberta"), dict):
        body.pop("pooler", None)
    shapes = jax.eval_shape(lambda: roberta.init_params(config, jax.random.key(0)))
    refuse_misshapen(folder, shapes, params)
    return Trained(config, params, folder, None, None, folder)


def read_config(root: UPath, name: str) -> RobertaConfig:
    """Returns the config of a RoBERTa folder: of config.json alone, every value that the model is built from checked.

    Args:
      root: the folder.
      name: of it, for a person.

    Raises:
      InputError: config.json can't be read, or is not of a RoBERTa.
    """
    try:
        content = logs.read_object(root / "config.json")
    except DamageError:
        raise InputError(f"{name}: its config.json can't be read (it is no JSON object); take a good copy.") from None
    kind = content.get("model_type")
    if kind != "roberta":
        raise InputError(f"{name}: is a {printable(str(kind))[:80]}, by its config.json; a RoBERTa is needed.")
    try:
        config = RobertaConfig.from_dict(content)
    except Exception as error:  # whatever transformers raises at values of another type
        words = printable(f"{type(error).__name__}: {error}")[:200]
        raise InputError(f"{name}: its config.json can't be read ({words}); take a good copy.") from None
    _check_values(config, name)
    return config


def _check_values(config: RobertaConfig, name: str) -> None:
    for key in (*SIZES, *RATES, "hidden_act"):
        value: Any = getattr(config, key)
        if key in SIZES:
            good, words = type(value) is int and SIZES[key] <= value < 2**31, f"a whole number from {SIZES[key]} up"
        elif key in RATES:
            good, words = type(value) in (int, float) and 0 <= value < 1, "a number from 0 up, and below 1"
        else:
            good, words = isinstance(value, str) and value in ACT2FN, "an activation that transformers knows"
        if not good:
            raise InputError(f"{name}: its config.json has {key} = {value!r:.80}; it must be {words}.")
    if config.hidden_size % config.num_attention_heads or config.pad_token_id >= config.vocab_size:
        raise InputError(f"{name}: the heads or the padding id of its config.json don't fit it; take a good copy.")


def read_safetensors(root: UPath, name: str) -> Params:
    """Returns the parameters of a folder's model.safetensors; raises InputError if it can't be read."""
    try:
        return weights.from_torch(load_file(str(root / "model.safetensors")))
    except UNREADABLE as error:
        raise InputError(f"{name}/model.safetensors: can't be read ({printable(str(error))[:300]}).") from None


def refuse_misshapen(folder: str, shapes: Params, params: Params) -> None:
    """Raises InputError for the first parameter that is missing, left over or of another shape than in `shapes`."""
    wanted, found = ({k: tuple(v.shape) for k, v in sharding.named_leaves(tree)} for tree in (shapes, params))
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise InputError(f"{folder}: {name} is {found.get(name)} where config.json asks for {wanted.get(name)}.")
