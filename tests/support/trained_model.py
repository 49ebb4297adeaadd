"""A small model trained on real text, in a workdir with its tokenizer and a checkpoint: seconds, once a session.

It starts from large random values and makes a few updates: its fillings are poor, and depend on the text around the
mask, which those of a small model do only after thousands of updates.
"""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
from jax.sharding import AxisType
from transformers import ModernBertConfig

from mlm.data import tokenizer
from mlm.data.manifest import DatasetInfo
from mlm.export import export
from mlm.model.families import MODERNBERT, ROBERTA
from mlm.pretrained import checkpoint_files, load
from mlm.tasks.pretraining import Pretraining
from mlm.training import checkpoint, sharding
from mlm.workdir import Workdir
from tests.support.corpora import stdlib_docstrings
from tests.support.tiny import tiny_config

LENGTH = 32
STEPS = 5


def train_tokenizer(folder: pathlib.Path, kind: str = "unigram", vocab_size: int = 1000) -> str:
    options = {"kind": kind, "vocab_size": vocab_size, "lowercase": False, "length": LENGTH}
    tokenizer.train(stdlib_docstrings(), **options, folder=str(folder))
    return str(folder)


def facts_of(tok, records: int = 0) -> DatasetInfo:
    special = {role: getattr(tok, f"{role}_token_id") for role in ("cls", "pad", "sep", "unk", "mask")}
    return DatasetInfo(len(tok), special, tuple(tok.all_special_ids), LENGTH, records)


def save_checkpoint(workdir: Workdir, config, info: DatasetInfo, state, step: int) -> None:
    own = ROBERTA.make_config(config.model, info.vocab_size, info.special_ids).to_dict()
    meta = {
        "format": checkpoint_files.FORMAT,
        "config": config,
        "dataset": dataclasses.asdict(info) | {"model": own},
        "class": {},
        "step": step,
        "useful_flops": 1.25e18,
    }
    with checkpoint.Checkpoints(workdir.checkpoints, keep=1) as checkpoints:
        checkpoints.save(step, state, meta, None)


def publish(model: load.Pretrained, name: str, cache: pathlib.Path) -> pathlib.Path:
    """Writes a model's folder where huggingface_hub caches the repository `name`, and returns that folder."""
    repository, commit = cache / f"models--{name.replace('/', '--')}", "0" * 40
    folder = pathlib.Path(shutil.copytree(model.tokenizer, repository / "snapshots" / commit))
    export.write_model(model, folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return folder


def train_model(folder: pathlib.Path) -> Workdir:
    workdir = Workdir(str(folder))
    tok = tokenizer.load(train_tokenizer(pathlib.Path(str(workdir.tokenizer))))
    ids = np.concatenate(tok(stdlib_docstrings())["input_ids"])
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int32)
    info = facts_of(tok, len(rows))
    config = tiny_config(
        "model.positions=32",
        "model.layers=2",
        "model.hidden_size=64",
        "data.global_batch=32",
        "model.init_stddev=0.3",
        f"train.steps={STEPS}",
    )
    mesh = jax.make_mesh((1, 1, 1), sharding.AXES, devices=jax.devices()[:1], axis_types=(AxisType.Auto,) * 3)
    run = Pretraining(config, info, mesh=mesh)
    state, order = run.init(), np.random.default_rng(0).permutation(len(rows))
    for step in range(STEPS):
        chosen = np.take(order, range(step * 32, step * 32 + 32), mode="wrap")
        batch = {
            "input_ids": rows[chosen],
            "attention_mask": np.ones((32, LENGTH), np.int32),
            "record_id": chosen.astype(np.uint32),
            "epoch": np.zeros(32, np.uint32),
        }
        state, _ = run.train_step(state, sharding.put_batch(batch, run.mesh, 32))
    save_checkpoint(workdir, config, info, jax.block_until_ready(state), STEPS)
    return workdir


def write_modernbert(model: load.Pretrained, target: pathlib.Path) -> str:
    """A transformers folder of an untrained ModernBERT with the same tokenizer, and rotary bases of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    rotation = {"global_rope_theta": 9000.0, "local_rope_theta": 800.0, "local_attention": 8}
    special = {"pad_token_id": model.config.pad_token_id, "cls_token_id": model.config.bos_token_id}
    config = ModernBertConfig(vocab_size=1000, max_position_embeddings=LENGTH, **sizes, **rotation, **special)
    params = jax.device_get(MODERNBERT.make_module(config).init_params(jax.random.key(0)))
    folder = pathlib.Path(shutil.copytree(model.tokenizer, target))
    export.write_model(dataclasses.replace(model, config=config, params=params), folder)
    return str(folder)
