"""The forward pass against transformers' FlaxRobertaForMaskedLM, in float32."""

import dataclasses

import jax
import numpy as np
import pytest

from mlm import stock
from mlm.model import attention, roberta
from mlm.training import sharding
from tests.fixtures import FACTS, random_batch, tiny_run

LONG = dataclasses.replace(FACTS, length=128)
SIZES = ("model.hidden_size=128", "model.heads=4", "model.layers=2", "model.positions=128", "model.init_stddev=0.1")


def logits_of_both(network, params, batch):
    positions = np.tile(np.arange(batch["input_ids"].shape[1], dtype=np.int32), (len(batch["input_ids"]), 1))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ours = jax.jit(network.masked_logits)(params, ids, mask, positions)
    places = roberta.position_ids(jax.numpy.asarray(mask), network.config.pad_token_id)
    module = stock.make_module(network.config, network.dtype)
    theirs = module.apply({"params": params}, ids, mask, np.zeros_like(ids), places, None).logits
    real = mask > 0
    return np.asarray(ours)[real], np.asarray(theirs)[real]


CASES = [("xla", "gelu"), ("fused", "gelu"), ("splash", "gelu"), ("xla", "gelu_new"), ("xla", "relu"), ("xla", "silu")]


@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_logits_are_those_of_transformers(kernel, name):
    run = tiny_run(*SIZES, f"model.activation={name}", facts=LONG)
    params = run.init().params
    params = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(jax.random.key(p.size), p.shape), params)
    mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
    network = dataclasses.replace(run.model.network, attention=attention.make(kernel, heads=4, mesh=mesh))
    ours, theirs = logits_of_both(network, params, random_batch(16, facts=LONG))
    assert np.abs(theirs).max() > 1, "too small to tell"
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("remat", [{}, {"remat": True}, {"remat_feed_forward": 1}])
def test_tokens_that_nobody_reads_change_nothing(remat):
    """The last layer on some tokens alone: what it makes of them among all, dropout included, for any part of rows."""
    run = tiny_run("model.layers=2", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    network = dataclasses.replace(run.model.network, **remat)
    params, batch, key = run.init().params, random_batch(16), jax.random.key(3)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    wanted = np.random.default_rng(0).integers(0, 16, (16, 5)).astype(np.int32)
    whole = jax.jit(network.encode)(params, ids, mask, key)
    expected = np.take_along_axis(np.asarray(whole), wanted[..., None], axis=1)
    for rows in (slice(0, 16), slice(8, 16)):
        numbers = np.arange(16, dtype=np.uint32)[rows]
        found = jax.jit(network.encode)(params, ids[rows], mask[rows], key, wanted[rows], numbers)
        np.testing.assert_allclose(found, expected[rows], atol=1e-5)


def test_dropout_changes_every_layer_and_every_step():
    run = tiny_run("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    params, batch = run.init().params, random_batch(16)
    encode = jax.jit(run.model.network.encode)
    plain, *others = (
        encode(params, batch["input_ids"], batch["attention_mask"], key)
        for key in (None, jax.random.key(0), jax.random.key(0), jax.random.key(1))
    )
    np.testing.assert_array_equal(others[0], others[1])
    assert np.abs(others[0] - plain).max() > 0.1 and np.abs(others[0] - others[2]).max() > 0.1
    rows = np.repeat(batch["input_ids"][:1], 16, 0)
    same = encode(params, rows, np.ones_like(rows), jax.random.key(0))
    assert all(np.abs(same[0] - row).max() > 0.1 for row in same[1:]), "two rows with the same dropout"
