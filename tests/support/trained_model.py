"""A small model of random values in a workdir with its tokenizer and a checkpoint, as a run leaves it.

Nothing is compiled for it. The values are large, so that its fillings depend on the text around the mask, and none is
0 or 1, so that a bias or a norm that is lost changes an answer.
"""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from transformers import ModernBertConfig

from mlm.data import tokenizer
from mlm.data.manifest import DatasetInfo
from mlm.data.train_tokenizer import train
from mlm.export import export
from mlm.model.families import MODERNBERT, ROBERTA
from mlm.model.module import Params
from mlm.pretrained import checkpoint_files, load
from mlm.tasks.pretraining import Pretraining
from mlm.training import checkpoint, sharding
from mlm.workdir import Workdir
from tests.support.corpora import real_texts
from tests.support.tiny import tiny_config

LENGTH = 32
STEP = 5


def train_tokenizer(folder: pathlib.Path, kind: str = "unigram", vocab_size: int = 1000) -> str:
    options = {"kind": kind, "vocab_size": vocab_size, "lowercase": False, "length": LENGTH}
    train(real_texts(), **options, folder=str(folder))
    return str(folder)


def random_params(shapes: Params, stddev: float = 0.3) -> Params:
    """Returns normal values for the arrays of a tree; those of norms are around 1."""
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: Any) -> np.ndarray:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return rng.normal(mean, stddev, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def special_ids_of(tok) -> dict[str, int]:
    return {role: getattr(tok, f"{role}_token_id") for role in tokenizer.ROLES}


def info_of(tok, records: int = 0) -> DatasetInfo:
    return DatasetInfo(len(tok), special_ids_of(tok), tuple(tok.all_special_ids), LENGTH, records)


def save_checkpoint(workdir: Workdir, config: ConfigDict, info: DatasetInfo, step: int) -> None:
    """Saves a state of random values, and averages of their own if the config asks for them."""
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    shapes = Pretraining(config, info, mesh=mesh).abstract_state
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    ema = None if shapes.ema is None else random_params(shapes.ema, stddev=0.2)
    state = zeros.replace(step=np.int32(step), params=random_params(shapes.params), ema=ema)
    model_config = ROBERTA.make_config(config.model, info.vocab_size, info.special_ids).to_dict()
    meta = {
        "format": checkpoint_files.FORMAT,
        "config": config,
        "dataset": dataclasses.asdict(info) | {"model": model_config},
        "class": {},
        "step": step,
        "useful_flops": 1.25e18,
    }
    with checkpoint.Checkpoints(workdir.checkpoints, keep=1) as checkpoints:
        checkpoints.save(step, jax.device_put(state), meta, None)


def write_folder(model: load.Pretrained, target: pathlib.Path) -> pathlib.Path:
    """Writes a model with its tokenizer as transformers does."""
    folder = pathlib.Path(shutil.copytree(model.tokenizer, target))
    export.write_model(model, folder)
    return folder


def publish(model: load.Pretrained, name: str, cache: pathlib.Path) -> pathlib.Path:
    """Writes a model's folder where huggingface_hub caches the repository `name`, and returns that folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    folder = write_folder(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return folder


def write_workdir(folder: pathlib.Path) -> Workdir:
    workdir = Workdir(str(folder))
    tok = tokenizer.load(train_tokenizer(pathlib.Path(str(workdir.tokenizer))))
    sizes = ("model.positions=32", "model.layers=2", "model.hidden_size=64", "data.global_batch=32")
    save_checkpoint(
        workdir, tiny_config(*sizes, f"train.steps={STEP}"), info_of(tok, records=1000), STEP
    )
    return workdir


def write_modernbert(model: load.Pretrained, target: pathlib.Path) -> str:
    """A transformers folder of a ModernBERT with the same tokenizer, and rotary bases of its own."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    rotation = {"global_rope_theta": 9000.0, "local_rope_theta": 800.0, "local_attention": 8}
    special = {"pad_token_id": model.config.pad_token_id, "cls_token_id": model.config.bos_token_id}
    config = ModernBertConfig(
        vocab_size=1000, max_position_embeddings=LENGTH, **sizes, **rotation, **special
    )
    shapes = jax.eval_shape(MODERNBERT.make_module(config).init_params, jax.random.key(0))
    params = random_params(shapes, stddev=0.02)
    return str(write_folder(dataclasses.replace(model, config=config, params=params), target))
