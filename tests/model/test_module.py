"""What all models share: documents that see no other, positions, dropout, and the tokens that nobody reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.model import layers
from mlm.model.layers import Noise
from mlm.model.module import Compute, segment_and_position_ids
from tests.model.models import PAD, inputs, make

RATES = {
    "Roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "ModernBert": ("embedding_dropout", "mlp_dropout", "attention_dropout"),
}


def rates(name: str, rate: float) -> dict[str, float]:
    return dict.fromkeys(RATES["ModernBert" if name.startswith("ModernBert") else "Roberta"], rate)


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
    ids[-1, -4:] = PAD
    mask[-1, -4:] = 0
    isolated = module.clone(compute=Compute(cls_id=0))
    together = np.asarray(jax.jit(isolated.logits)(params, ids, mask))
    alone = jax.jit(module.logits)
    as_a_row = np.asarray(alone(params, ids, mask))
    for part in (slice(0, first), slice(first, second), slice(second, length)):
        size = part.stop - part.start
        document = np.full_like(ids, PAD)
        real = np.zeros_like(mask)
        document[:, :size] = ids[:, part]
        real[:, :size] = mask[:, part]
        expected = np.asarray(alone(params, document, real))[:, :size]
        real = mask[:, part] > 0
        scale = np.abs(expected).max()
        np.testing.assert_allclose(together[:, part][real], expected[real], atol=1e-5 * scale)
        assert np.abs(as_a_row[:, part][real] - expected[real]).max() > 0.05 * scale, (
            "isolation must make a difference"
        )


def test_positions_begin_anew_with_each_document():
    ids = np.array([[7, 0, 8, 9, 0, 7, 1, 1], [0, 7, 7, 7, 7, 7, 7, 2]])
    segments, positions = segment_and_position_ids(ids, (ids != 1).astype(np.int32), 2, cls_id=0)
    assert segments.tolist() == [[1, 2, 2, 2, 3, 3, 0, 0], [2] * 8]
    assert positions.tolist() == [[2, 2, 3, 4, 2, 3, 1, 1], [2, 3, 4, 5, 6, 7, 8, 9]]
    segments, positions = segment_and_position_ids(ids, (ids != 1).astype(np.int32), 2)
    assert segments.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]
    assert positions.tolist() == [[2, 3, 4, 5, 6, 7, 1, 1], [2, 3, 4, 5, 6, 7, 8, 9]]


# Dropout -------------------------------------------------------------------------------------------------------------


def encode(module, params, ids, mask, tokens=None, key=None, rows=None):
    """The last hidden states, with dropout if there is a key."""
    noise = None if key is None else Noise(jax.random.bits(key, dtype=jnp.uint32), rows)

    def states(bound):
        rows = bound.make_rows(ids, mask, None, None, noise)
        return bound.body(ids, rows._replace(tokens_BxK=tokens))

    return module.apply({"params": params}, method=states)[-1]


@pytest.mark.parametrize(
    ("name", "rate"), [(name, rate) for name, rates in RATES.items() for rate in rates]
)
def test_each_rate_of_dropout_drops(name, rate):
    model = make(name, **rates(name, 0.0) | {rate: 0.5})
    states = jax.jit(functools.partial(encode, model.module))
    plain, dropped = (
        states(model.params, *inputs(), None, key, np.arange(4))
        for key in (None, jax.random.key(0))
    )
    assert np.abs(plain - dropped).max() > 0.1


@pytest.mark.parametrize(
    # of the embeddings; of a layer's probabilities and its two blocks; of the head
    ("name", "count"),
    [
        ("RobertaForSequenceClassification", 1 + 2 * 3 + 2),
        ("RobertaPreLayerNormForTokenClassification", 1 + 2 * 3 + 1),
        ("ModernBertForSequenceClassification", 1 + 4 * 3 + 1),
    ],
)
def test_no_two_places_of_a_model_drop_the_same(name, count, monkeypatch):
    """Layers neither: each draws from a seed of its own."""
    model = make(name, **rates(name, 0.1), classifier_dropout=0.1)
    seeds = []

    def dropout(x_BxLxH, rate, seed, *rest):
        seeds.append(seed)
        return x_BxLxH

    monkeypatch.setattr(layers, "dropout", dropout)
    run = jax.jit(
        lambda params: (
            model.module.logits(params, *inputs(), None, jax.random.key(0)),
            jnp.stack(seeds),
        )
    )
    assert len(set(run(model.params)[1].tolist())) == len(seeds) == count


@pytest.mark.parametrize(
    "name", ["Roberta", pytest.param("ModernBert", marks=pytest.mark.standard)]
)
def test_dropout_is_a_function_of_key_row_and_token(name):
    """Of the last layer on some tokens alone, for any part of the rows, recomputed or not; logits are of the same."""
    model = make(name, **rates(name, 0.1))
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
    recomputed = {"compute": Compute(recomputed_feed_forwards=1)}
    for changes in ({}, {"gradient_checkpointing": True}, recomputed):
        some = jax.jit(functools.partial(encode, module.clone(**changes)))
        states = some(params, ids[2:], mask[2:], tokens[2:], key, numbers[2:])
        np.testing.assert_allclose(states, expected, atol=1e-5)
    logits = np.asarray(jax.jit(module.logits)(params, ids, mask))
    np.testing.assert_allclose(
        jax.jit(module.logits)(params, ids, mask, tokens),
        np.take_along_axis(logits, tokens[..., None], 1),
        atol=1e-5,
    )


# A module of one's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Roberta", "RobertaPreLayerNorm", "ModernBert"])
def test_a_layer_of_ones_own_computes_its_feed_forward(name):
    model = make(name)

    class Scaled(model.module.layer_class):
        def feed_forward(self, sum_BxLxH, rows):
            return 0.5 * super().feed_forward(sum_BxLxH, rows) + 0.5 * sum_BxLxH

    class Changed(type(model.module)):
        layer_class = Scaled

    logits = jax.jit(model.module.logits)(model.params, *inputs())
    for compute in (Compute(), Compute(recomputed_feed_forwards=1)):
        changed = jax.jit(Changed(model.config, compute=compute).logits)(model.params, *inputs())
        assert np.abs(changed - logits).max() > 0.01


def test_layers_attend_to_the_windows_of_the_config():
    for count, every, windows in ((4, 3, [0, 8, 8, 0]), (2, 1, [0, 0])):
        model = make(
            "ModernBert",
            num_hidden_layers=count,
            global_attn_every_n_layers=every,
            local_attention=16,
        )
        attended = []

        def attend(q_BxLxH, *_, window, **settings):
            attended.append(window)  # noqa: B023
            return q_BxLxH

        module = model.module.clone(compute=Compute(attend))
        jax.eval_shape(module.logits, model.params, *inputs())
        assert module.windows() == attended == windows
