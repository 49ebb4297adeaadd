"""A trained model to use: from a run's newest checkpoint, or from any RoBERTa folder of transformers."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh
from safetensors.numpy import load_file
from transformers import RobertaConfig

from mlm import config as configs
from mlm.errors import InputError
from mlm.model import roberta, weights
from mlm.model.roberta import Params
from mlm.paths import UPath, local_folder
from mlm.training import build, checkpoint, sharding
from mlm.workdir import Workdir


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
    if "labels" in meta["facts"]:
        raise InputError(f"{workdir.checkpoints}: is of a classifier, and has no language-model head.")
    facts = build.DataFacts(**meta["facts"])
    config = configs.unflatten(meta["config"])
    model = build.build_model(config, facts)
    shapes = jax.eval_shape(lambda: roberta.init_params(model.config, jax.random.key(0)))
    params = read_params(workdir, step, shapes, averaged=config.optimizer.ema_decay > 0)
    model.config.vocab_size = facts.vocab_size
    return Trained(
        config=model.config,
        params=weights.resize_vocabulary(params, facts.vocab_size),
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
    root = UPath(local_folder(folder))  # transformers and safetensors read local files alone
    config = RobertaConfig.from_pretrained(str(root))
    if config.model_type != "roberta" or not config.tie_word_embeddings:
        raise InputError(f"{folder}: is a {config.model_type} (or its embeddings are not tied); a RoBERTa is needed.")
    try:
        params = weights.from_torch(load_file(str(root / "model.safetensors")))
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{root / 'model.safetensors'}: can't be read ({error}).") from None
    params.get("roberta", {}).pop("pooler", None)
    shapes = jax.eval_shape(lambda: roberta.init_params(config, jax.random.key(0)))
    refuse_misshapen(folder, shapes, params)
    return Trained(config, params, folder, None, None, folder)


def refuse_misshapen(folder: str, shapes: Params, params: Params) -> None:
    """Raises InputError for the first parameter that is missing, left over or of another shape than in `shapes`."""
    wanted, found = ({k: tuple(v.shape) for k, v in sharding.named_leaves(tree)} for tree in (shapes, params))
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise InputError(f"{folder}: {name} is {found.get(name)} where config.json asks for {wanted.get(name)}.")
