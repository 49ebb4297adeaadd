"""Runs that start from another model."""

import jax
import numpy as np

from mlm.data import tokenizer
from mlm.pretrained import load, warm_start
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.support.tiny import tiny_config
from tests.support.trained_model import facts_of

SAME_MODEL = ("model.positions=32", "model.layers=2", "model.hidden_size=64")


def read(name: str) -> load.Pretrained:
    return load.load(name, head=None, flag=load.INIT_FROM)


def fresh(*overrides: str, tok=None, folder: str):
    """Returns (the run of a fresh model, its parameters by name)."""
    tok = tok or tokenizer.load(folder)
    mesh = sharding.make_mesh(data=4, fsdp=2, tensor=1)
    return Pretraining(tiny_config(*SAME_MODEL, *overrides), facts_of(tok), mesh=mesh)


def started(name: str, folder: str | None, *overrides: str, tok=None):
    """Returns (parameters before, parameters after, the lines), by name, on a mesh that splits them."""
    run = fresh(*overrides, tok=tok, folder=folder)
    source = read(name)
    warm_start.refuse_another_model(source, run.module.config)
    state = run.init()
    before = {name: np.asarray(leaf) for name, leaf in sharding.named_leaves(state.params)}
    taken, lines = warm_start.fit(
        source,
        state.params,
        pad_id=run.module.config.pad_token_id,
        vocab_size=len(tok or tokenizer.load(folder)),
        tokens=folder,
    )
    params = warm_start.start(state.params, taken)
    assert jax.tree.map(lambda p: p.sharding, params) == jax.tree.map(lambda p: p.sharding, state.params)
    return before, {name: np.asarray(leaf) for name, leaf in sharding.named_leaves(params)}, lines


def source_leaves(model) -> dict[str, np.ndarray]:
    return dict(sharding.named_leaves(model.params))
