"""Starts of a run from another model."""

import functools

import jax
import numpy as np

from mlm.data import tokenizer
from mlm.pretrained import load, warm_start
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.support.tiny import tiny_config
from tests.support.trained_model import info_of, random_params

SAME_MODEL = ("model.positions=32", "model.layers=2", "model.hidden_size=64")


def read(name: str) -> load.Pretrained:
    return load.load(name, head=None, flag=load.INIT_FROM)


@functools.cache
def run_of(folder: str, *overrides: str) -> Pretraining:
    """A run with the tokenizer in a folder, on a mesh that splits its parameters."""
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=1, devices=jax.devices()[:2])
    return Pretraining(tiny_config(*SAME_MODEL, *overrides), info_of(tokenizer.load(folder)), mesh=mesh)


def started(name: str, folder: str, *overrides: str):
    """Returns (parameters before, parameters after, the lines), by name."""
    run, source = run_of(folder, *overrides), read(name)
    warm_start.refuse_another_model(source, run.module.config)
    shapes = run.abstract_state.params
    params = jax.device_put(random_params(shapes, stddev=0.02), sharding.shardings_of(shapes))
    taken, lines = warm_start.fit(
        source, shapes, pad_id=run.module.config.pad_token_id, vocab_size=run.info.vocab_size, tokens=folder
    )
    new = warm_start.start(params, taken)
    assert jax.tree.map(lambda p: p.sharding, new) == jax.tree.map(lambda p: p.sharding, params)
    before, after = ({name: np.asarray(leaf) for name, leaf in sharding.named_leaves(tree)} for tree in (params, new))
    return before, after, lines
