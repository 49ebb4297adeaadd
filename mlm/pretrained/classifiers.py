"""Classifiers: one to use, of a run's best checkpoint or of a transformers folder, and what a new one starts from."""

from __future__ import annotations

import re

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from transformers import RobertaConfig

from mlm.errors import InputError
from mlm.model import classifier, weights
from mlm.model.roberta import Params
from mlm.paths import UPath, local_folder
from mlm.pretrained import load, warm_start
from mlm.pretrained.load import Trained
from mlm.training import checkpoint, sharding
from mlm.workdir import Workdir

BODY = re.compile(r"roberta/(?!pooler/)")


def from_checkpoint(workdir: Workdir, *, on_damage: str = "stop") -> Trained:
    """Returns the classifier of a run's best checkpoint; its config names the classes (`classifier.class_names`).

    Raises:
      InputError: there is no checkpoint.
      DamageError: it is not what was written.
    """
    step = checkpoint.choose(workdir.checkpoints, on_damage=on_damage, best=True)
    if step is None:
        raise InputError(f"{workdir.checkpoints}: there is no complete checkpoint; train first.")
    meta = checkpoint.read_meta(workdir.checkpoints, step)
    config = RobertaConfig.from_dict(meta["dataset"]["model"])
    averaged = meta["config"]["optimizer.ema_decay"] > 0
    params = load.read_params(workdir, step, _shapes(config), averaged=averaged)
    config.vocab_size = meta["dataset"]["vocab_size"]
    return Trained(
        config=config,
        params=weights.resize_vocabulary(params, config.vocab_size),
        tokenizer=str(workdir.tokenizer),
        step=step,
        run_config=meta["config"],
        source=str(workdir.checkpoints / str(step)),
    )


def from_folder(folder: str) -> Trained:
    """Returns the classifier of a transformers folder: config.json, model.safetensors and the tokenizer's files.

    Raises:
      InputError: a file is missing or unreadable, or it is no RoBERTa that classifies.
    """
    root = UPath(folder)
    for name in ("config.json", "model.safetensors"):
        if not (root / name).is_file():
            raise InputError(f"{folder}: there is no {name}; name a folder that export wrote, or a transformers one.")
    root = UPath(local_folder(folder))  # safetensors reads local files alone
    config = load.read_config(root, folder)
    if config.problem_type == "multi_label_classification":
        raise InputError(f"{folder}: is a multi-label one; a RoBERTa of one label a row, or of regression, is needed.")
    params = load.read_safetensors(root, folder)
    load.refuse_misshapen(folder, _shapes(config), params)
    return Trained(config, params, folder, None, None, folder)


def _shapes(config: RobertaConfig) -> Params:
    return jax.eval_shape(lambda: classifier.init_params(config, jax.random.key(0)))


def start(init_from: str, *, multiple: int) -> tuple[RobertaConfig, Params]:
    """Returns transformers' config of a model and the parameters of its body: all but its heads.

    Args:
      init_from: as `initial.read` takes it.
      multiple: the vocabulary is padded up to one of this.

    Raises:
      InputError, DamageError: as `initial.read`; its parameters are not those of its config.
    """
    source = warm_start.read(init_from)
    own = {tuple(name.split("/")): values for name, values in source.leaves.items() if BODY.match(name)}
    body = unflatten_dict(own)
    load.refuse_misshapen(init_from, {"roberta": _shapes(source.config)["roberta"]}, body)
    size = -(-source.config.vocab_size // multiple) * multiple
    source.config.vocab_size = size
    return source.config, weights.resize_vocabulary(body, size)["roberta"]


def is_workdir(init_from: str) -> bool:
    """Returns whether a folder is of a run."""
    return (UPath(init_from) / "checkpoints").is_dir()


def on_mesh(params: Params, shapes: Params) -> Params:
    """Returns arrays over all devices of all hosts from numpy's, the same on each; `shapes` says where they live."""

    def place(value: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(value.shape, shape.sharding, lambda index: value[index])

    return jax.tree.map(place, params, shapes)


def sized(found: Trained, multiple: int, mesh: jax.sharding.Mesh) -> tuple[RobertaConfig, Params]:
    """Returns the config and the parameters, placed, of a classifier with its vocabulary padded for a mesh."""
    config = RobertaConfig.from_dict(found.config.to_dict())
    config.vocab_size = -(-config.vocab_size // multiple) * multiple
    params = weights.resize_vocabulary(found.params, config.vocab_size)
    places = sharding.tree_shardings(params, mesh, params)
    shapes = jax.tree.map(lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s), params, places)
    return config, on_mesh(params, shapes)
