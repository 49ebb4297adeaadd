"""What all models share: documents that see no other, positions, dropout, and the tokens that nobody reads."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.model import layers
from mlm.model.layers import Noise
from mlm.model.module import Compute
from tests.model.models import PAD, inputs, make

RATES = {
    "Roberta": {
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.2,
        "classifier_dropout": 0.3,
    },
    "ModernBert": {
        "embedding_dropout": 0.1,
        "mlp_dropout": 0.2,
        "attention_dropout": 0.3,
        "classifier_dropout": 0.4,
    },
}


@pytest.mark.parametrize("name", ["Roberta", "ModernBert"])
def test_isolated_documents_have_the_logits_that_they_have_alone(name):
    """Rows of the end of a document, a whole one and the begin of another, the last with padding too."""
    length = 32
    model = make(name)
    module = model.module
    params = model.params
    ids = np.random.default_rng(0).integers(5, 100, (4, length)).astype(np.int32)
    mask = np.ones_like(ids)
    first = length // 5
    second = length // 2
    ids[:, [first, second]] = 0
    ids[0, 0] = 0  # and one that begins with a whole document
    ids[-1, -4:] = PAD
    mask[-1, -4:] = 0
    isolated = module.clone(compute=Compute(cls_id=0))
    together = np.asarray(jax.jit(isolated.logits)(params, ids, mask))
    alone = jax.jit(module.logits)
    as_a_row = np.asarray(alone(params, ids, mask))
    for start, stop in ((0, first), (first, second), (second, length)):
        place_L = np.arange(length)
        inside = (mask > 0) & (place_L >= start) & (place_L < stop)
        document = np.roll(np.where(inside, ids, PAD), -start, axis=1)
        expected = alone(params, document, np.roll(inside, -start, axis=1).astype(np.int32))
        expected = np.roll(expected, start, axis=1)[inside]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(together[inside], expected, atol=1e-5 * scale)
        assert np.abs(as_a_row[inside] - expected).max() > 0.05 * scale, (
            "isolation must make a difference"
        )


# Dropout -------------------------------------------------------------------------------------------------------------


def encode(module, params, ids, mask, tokens=None, key=None, rows=None):
    """The last hidden states, with dropout if there is a key."""
    noise = None if key is None else Noise(jax.random.bits(key, dtype=jnp.uint32), rows)

    def states(bound):
        rows = bound.make_rows(ids, mask, None, None, noise)
        return bound.body(ids, rows._replace(tokens_BxK=tokens))

    return module.apply({"params": params}, method=states)[-1]


@pytest.mark.parametrize(
    ("name", "family", "counts"),
    [
        ("RobertaForSequenceClassification", "Roberta", {0.1: 1 + 2 * 2, 0.2: 2, 0.3: 2}),
        ("RobertaPreLayerNormForTokenClassification", "Roberta", {0.1: 5, 0.2: 2, 0.3: 1}),
        ("ModernBertForSequenceClassification", "ModernBert", {0.1: 1, 0.2: 4, 0.3: 8, 0.4: 1}),
    ],
)
def test_each_place_drops_at_its_rate_and_no_two_drop_the_same(name, family, counts, monkeypatch):
    """Layers neither: each draws from a seed of its own."""
    model = make(name, **RATES[family])
    rates = []
    seeds = []

    def run(scales):
        def dropout(x_BxLxH, rate, seed, *rest):
            rates.append(rate)
            seeds.append(seed)
            return x_BxLxH.at[..., ::2].multiply(scales[rate])  # a norm would undo it in all units

        monkeypatch.setattr(layers, "dropout", dropout)
        logits = model.module.logits(model.params, *inputs(), None, jax.random.key(0))
        return logits, jnp.stack(seeds)

    run = jax.jit(run)
    ones = dict.fromkeys(counts, 1.0)
    logits, drawn = run(ones)
    assert collections.Counter(rates) == counts
    assert len(set(drawn.tolist())) == len(seeds)
    for rate in counts:
        assert np.abs(run(ones | {rate: 0.5})[0] - logits).max() > 1e-3, "it drops nothing"


@pytest.mark.parametrize(
    "name", ["Roberta", pytest.param("ModernBert", marks=pytest.mark.standard)]
)
def test_dropout_is_a_function_of_key_row_and_token(name):
    """Of the last layer on some tokens alone, for any part of the rows, recomputed or not."""
    model = make(name, **RATES[name], num_hidden_layers=2)
    module = model.module
    params = model.params
    # fewer tokens than units: none is taken for the other
    ids, mask = (columns[:, :28] for columns in inputs())
    key = jax.random.key(3)
    numbers = np.arange(4, dtype=np.uint32)
    tokens = np.random.default_rng(0).integers(0, 20, (4, 5)).astype(np.int32)
    whole = jax.jit(functools.partial(encode, module))
    dropped, other = (
        np.asarray(whole(params, ids, mask, None, key, numbers)) for key in (key, jax.random.key(1))
    )
    assert np.abs(dropped - other).max() > 0.1
    same = np.repeat(ids[:1], 4, 0)
    alike = whole(params, same, np.ones_like(same), None, key, numbers)
    assert all(np.abs(alike[0] - row).max() > 0.1 for row in alike[1:]), (
        "two rows with the same dropout"
    )
    expected = np.take_along_axis(dropped, tokens[..., None], axis=1)[2:]
    recomputed = {"gradient_checkpointing": True, "compute": Compute(recomputed_feed_forwards=1)}
    for changes in ({}, recomputed):
        some = jax.jit(functools.partial(encode, module.clone(**changes)))
        states = some(params, ids[2:], mask[2:], tokens[2:], key, numbers[2:])
        np.testing.assert_allclose(states, expected, atol=1e-5)


# A module of one's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Roberta", "RobertaPreLayerNorm", "ModernBert"])
def test_a_layer_of_ones_own_computes_its_feed_forward(name):
    model = make(name)

    computed = []

    class Counted(model.module.layer_class):
        def feed_forward(self, sum_BxLxH, rows):
            computed.append(self.index)
            return super().feed_forward(sum_BxLxH, rows)

    class Changed(type(model.module)):
        layer_class = Counted

    for compute in (Compute(), Compute(recomputed_feed_forwards=1)):
        computed.clear()
        changed = Changed(model.config, compute=compute)
        jax.eval_shape(changed.logits, model.params, *inputs())
        assert computed == list(range(model.config.num_hidden_layers))


def test_windows_are_those_of_the_config():
    model = make("ModernBert", num_hidden_layers=5, global_attn_every_n_layers=2)
    assert model.module.windows() == [0, 4, 0, 4, 0]
