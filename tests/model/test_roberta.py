"""The forward pass against transformers' FlaxRobertaForMaskedLM and its pre-norm twin, in float32."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mlm.model import attention
from mlm.model.families import family_of
from mlm.model.layers import Noise
from mlm.model.module import Compute, position_ids, segment_and_position_ids
from mlm.training import sharding
from tests.support.tiny import INFO, random_batch, shared_run, slow, tiny_run

LONG = dataclasses.replace(INFO, length=128)
SIZES = ("model.hidden_size=128", "model.heads=4", "model.layers=2", "model.positions=128", "model.init_stddev=0.1")


def logits_of_both(module, params, batch):
    positions = np.tile(np.arange(batch["input_ids"].shape[1], dtype=np.int32), (len(batch["input_ids"]), 1))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ours = jax.jit(module.logits)(params, ids, mask, positions)
    first = 0 if module.config.model_type == "bert" else module.config.pad_token_id + 1
    position_ids_BxL = position_ids(jax.numpy.asarray(mask), first)
    reference = family_of(module.config).flax_class("MaskedLM").module_class(module.config)
    stock = jax.jit(lambda params, *columns: reference.apply({"params": params}, *columns, None).logits)
    theirs = stock(params, ids, mask, np.zeros_like(ids), position_ids_BxL)
    real = mask > 0
    return np.asarray(ours)[real], np.asarray(theirs)[real]


@functools.cache
def shared(family: str):
    """A module of SIZES, and parameters none of which is 0 or 1."""
    run = tiny_run(*SIZES, f"model.family={family}", info=LONG)
    params = run.init().params
    return run.module, jax.tree.map(lambda p: p + 0.05 * jax.random.normal(jax.random.key(p.size), p.shape), params)


CASES = [
    ("bert", "xla", "gelu"),
    ("roberta", "xla", "gelu"),
    ("roberta", "fused", "gelu"),
    ("roberta_prelayernorm", "xla", "gelu"),
]
CASES += [slow("roberta", "xla", name) for name in ("gelu_new", "relu", "silu")]


@pytest.mark.standard
@pytest.mark.parametrize(("family", "kernel", "name"), CASES)
def test_logits_are_those_of_transformers(family, kernel, name):
    _, params = shared(family)
    run = tiny_run(*SIZES, f"model.family={family}", f"model.activation={name}", info=LONG)
    mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
    module = run.module.with_attention(lambda _: attention.make_kernel(kernel, heads=4, mesh=mesh))
    ours, theirs = logits_of_both(module, params, random_batch(16, info=LONG))
    assert np.abs(theirs).max() > 1, "too small to tell"
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def two_documents() -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """Eight rows, each of the end of a document, a whole one and the begin of another, the last with padding too."""
    ids = np.random.default_rng(0).integers(5, INFO.vocab_size, (8, 128)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[-1, 110:] = 0
    ids[:, [19, 69]] = INFO.special_ids["sep"]
    ids[:, [20, 70]] = INFO.special_ids["cls"]
    ids[mask == 0] = INFO.special_ids["pad"]
    return ids, mask, [slice(0, 20), slice(20, 70), slice(70, 128)]


@functools.cache
def alone_logits(family: str):
    return jax.jit(shared(family)[0].clone(compute=Compute()).logits)


@pytest.mark.standard
@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *(("roberta", kernel) for kernel in ("default", "xla", "fused")),
        slow("roberta_prelayernorm", "default"),
        ("modernbert", "default"),
    ],
)
def test_isolated_documents_have_the_logits_that_they_have_alone(family, kernel):
    (module, params), (ids, mask, parts) = shared(family), two_documents()
    attend = None
    if kernel != "default":
        mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
        attend = attention.make_kernel(kernel, heads=4, mesh=mesh, isolated=True)
    isolated = module.clone(compute=Compute(attend=attend, cls_id=INFO.special_ids["cls"]))
    alone = alone_logits(family)
    everywhere = np.tile(np.arange(128, dtype=np.int32), (8, 1))
    together = np.asarray(jax.jit(isolated.logits)(params, ids, mask, everywhere))
    as_a_row = np.asarray(alone(params, ids, mask, everywhere))
    for part in parts:
        own, own_mask = np.full_like(ids, INFO.special_ids["pad"]), np.zeros_like(mask)
        size = part.stop - part.start
        own[:, :size], own_mask[:, :size] = ids[:, part], mask[:, part]
        expected = np.asarray(alone(params, own, own_mask, everywhere))[:, :size]
        real = mask[:, part] > 0
        scale = np.abs(expected).max()
        np.testing.assert_allclose(together[:, part][real], expected[real], atol=1e-5 * scale)
        assert np.abs(as_a_row[:, part][real] - expected[real]).max() > 0.05 * scale, "isolation must make a difference"


def test_positions_begin_anew_with_each_document():
    ids = np.array([[7, 0, 8, 9, 0, 7, 1, 1], [0, 7, 7, 7, 7, 7, 7, 2]])
    segments, positions = segment_and_position_ids(ids, (ids != 1).astype(np.int32), 2, cls_id=0)
    assert segments.tolist() == [[1, 2, 2, 2, 3, 3, 0, 0], [2] * 8]
    assert positions.tolist() == [[2, 2, 3, 4, 2, 3, 1, 1], [2, 3, 4, 5, 6, 7, 8, 9]]
    segments, positions = segment_and_position_ids(ids, (ids != 1).astype(np.int32), 2)
    assert segments.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]
    assert positions.tolist() == [[2, 3, 4, 5, 6, 7, 1, 1], [2, 3, 4, 5, 6, 7, 8, 9]]


def encode(module, params, ids, mask, tokens=None, key=None, rows=None):
    """The last hidden states, with dropout if there is a key."""
    rows = np.arange(len(ids), dtype=np.uint32) if rows is None else rows
    noise = None if key is None else Noise(jax.random.bits(key), rows)

    def states(bound):
        return bound.body(ids, bound.make_rows(ids, mask, None, None, noise), tokens)

    return module.apply({"params": params}, method=states)[-1]


@pytest.mark.parametrize("remat", [{}, {"recompute_layers": True}, {"recomputed_feed_forwards": 1}])
def test_tokens_that_nobody_reads_change_nothing(remat):
    """The last layer on some tokens alone: what it makes of them among all, dropout included, for any part of rows."""
    run = shared_run("model.layers=2", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    module = run.module.clone(compute=dataclasses.replace(run.module.compute, **remat))
    params, batch, key = run.init().params, random_batch(16), jax.random.key(3)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    wanted = np.random.default_rng(0).integers(0, 16, (16, 5)).astype(np.int32)
    whole = jax.jit(functools.partial(encode, module))(params, ids, mask, None, key)
    expected = np.take_along_axis(np.asarray(whole), wanted[..., None], axis=1)
    for rows in (slice(0, 16), slice(8, 16)):
        numbers = np.arange(16, dtype=np.uint32)[rows]
        found = jax.jit(functools.partial(encode, module))(params, ids[rows], mask[rows], wanted[rows], key, numbers)
        np.testing.assert_allclose(found, expected[rows], atol=1e-5)


def test_dropout_changes_every_layer_and_every_step():
    run = shared_run("model.layers=2", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    params, batch = run.init().params, random_batch(16)
    encoded = jax.jit(functools.partial(encode, run.module))
    plain, *others = (
        encoded(params, batch["input_ids"], batch["attention_mask"], None, key)
        for key in (None, jax.random.key(0), jax.random.key(0), jax.random.key(1))
    )
    np.testing.assert_array_equal(others[0], others[1])
    assert np.abs(others[0] - plain).max() > 0.1 and np.abs(others[0] - others[2]).max() > 0.1
    rows = np.repeat(batch["input_ids"][:1], 16, 0)
    same = encoded(params, rows, np.ones_like(rows), None, jax.random.key(0))
    assert all(np.abs(same[0] - row).max() > 0.1 for row in same[1:]), "two rows with the same dropout"
