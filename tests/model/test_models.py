"""The models as a Flax user has them: transformers' classes, their numbers and initial values, linen's own tools."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax.traverse_util import flatten_dict
from transformers import FlaxPreTrainedModel

from mlm.model import rotary
from mlm.model.module import Compute
from tests.model.models import PAD, class_of, config_of, inputs, make
from tests.support.tiny import slow

# drawn by Flax's classes
WIDER = {
    ("classifier", "kernel"),
    ("cls", "predictions", "transform", "dense", "kernel"),
}
CLASSES = [
    *("RobertaForMaskedLM", "RobertaForSequenceClassification", "RobertaForTokenClassification"),
    *("BertForMaskedLM", "BertForSequenceClassification", slow("BertForTokenClassification")),
    "RobertaPreLayerNormForMaskedLM",
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_is_transformers_own(name):
    """Its class, its tree, its logits and hidden states, with token types and positions given too."""
    model = make(name, num_labels=3)
    stock = getattr(transformers, f"Flax{name}")
    assert isinstance(model, stock)
    reference = stock(model.config, _do_init=False)
    shapes, expected = (
        jax.tree.map(jnp.shape, tree) for tree in (model.params, reference.params_shape_tree)
    )
    assert shapes == expected
    ids, mask = inputs()
    given = {
        "token_type_ids": np.repeat([[0] * 16 + [1] * 16], 4, 0),
        "position_ids": np.tile(np.arange(5, 37), (4, 1)),
    }

    def outputs(each: FlaxPreTrainedModel, params):
        return [
            each(ids, mask, params=params, output_hidden_states=True, **more)
            for more in ({}, given)
        ]

    ours, theirs = (
        jax.jit(functools.partial(outputs, each))(model.params) for each in (model, reference)
    )
    real = mask > 0 if ours[0].logits.ndim == 3 else ...
    logits = jax.jit(model.module.logits)(model.params, ids, mask)  # positions by our own count
    np.testing.assert_allclose(logits[real], ours[0].logits[real], atol=1e-4)
    for found, expected in zip(ours, theirs, strict=True):
        assert np.std(expected.logits) > 0.1
        np.testing.assert_allclose(
            found.logits[real], expected.logits[real], atol=1e-5 * np.abs(expected.logits).max()
        )
        for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            np.testing.assert_allclose(one[mask > 0], other[mask > 0], atol=1e-5)


@pytest.mark.standard
@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "BertForSequenceClassification"])
def test_a_model_is_drawn_as_transformers_draws_it(name):
    cls = class_of(name)
    stock = getattr(transformers, f"Flax{name}")
    config = config_of(name, num_labels=3)
    seed = jax.random.key(3)
    models = (each(config, _do_init=False) for each in (cls, stock))
    ours, theirs = (
        flatten_dict(jax.jit(lambda key, model=each: model.init_weights(key, (1, 1)))(seed))
        for each in models
    )
    for path, value in theirs.items():
        if path in WIDER:
            assert np.std(ours[path]) == pytest.approx(config.initializer_range, rel=0.2)
        else:
            np.testing.assert_array_equal(ours[path], value, err_msg="/".join(path))


def test_modernbert_s_classifier_has_the_logits_of_pytorch_s():
    """Those of a row's three classes; tests/pretrained/test_warm_start_torch.py has those of its language model."""
    model = make("ModernBertForSequenceClassification", num_labels=3)
    logits = jax.jit(lambda params: model(*inputs(), params=params).logits)(model.params)
    np.testing.assert_allclose(logits[1], [-0.738, -0.17923, 0.83347], atol=1e-4)


def test_rotary_frequencies_have_the_last_bits_of_pytorch_s():
    """A cosine late in a row shows them; sums weighted by the number of the plane, from ModernBertRotaryEmbedding."""
    config = transformers.ModernBertConfig(hidden_size=64, num_attention_heads=1)
    found = rotary.rotations(config, np.array([[2**17]]))
    cosines = {kind: cos[0, 0] @ np.arange(32.0) for kind, (cos, _) in found.items()}
    assert cosines == pytest.approx({"global": -6.09241, "local": 40.26922}, abs=1e-3)


def test_what_is_beyond_a_table_gives_nan_as_in_transformers():
    """A longer row, an unknown token or type; padding, of any length, does not."""
    model = make("RobertaForMaskedLM")
    row = np.full((1, 40 - PAD - 1), 5)
    longer = np.full((1, 40 - PAD), 5)
    logits = jax.jit(lambda ids, types=0: model(ids, ids != PAD, types + 0 * ids).logits[:, :8])
    for beyond in ((np.full_like(row, 100),), (row, np.full_like(row, 2)), (longer,)):
        assert np.isnan(logits(*beyond)).all()
    longer[:, -1] = PAD
    assert np.isfinite(logits(longer)).all()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ModernBertForMaskedLM"])
def test_what_is_asked_for_is_recomputed(name):
    """For the gradient: layers, or the feed-forward blocks of the first ones."""
    model = make(name, num_labels=3)
    (ids, mask) = inputs()
    layers = model.config.num_hidden_layers

    def count(**settings) -> int:
        module = model.module.clone(**settings)
        return str(jax.make_jaxpr(module.logits)(model.params, ids, mask)).count("remat2[")

    assert count() == 0
    assert count(compute=Compute(recomputed_feed_forwards=1)) == 1
    assert count(gradient_checkpointing=True) == layers


def test_camembert_is_a_roberta_with_a_config_of_its_own():
    model = make("CamembertForMaskedLM")
    assert isinstance(model, transformers.FlaxRobertaForMaskedLM)
    assert (type(model).config_class, type(model.config)) == (transformers.CamembertConfig,) * 2


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("RobertaForMaskedLM", "tie_word_embeddings", False),
        ("BertForMaskedLM", "is_decoder", True),
        ("ModernBertForMaskedLM", "local_attention", 1),
        ("ModernBertForMaskedLM", "attention_bias", True),
        ("ModernBertForMaskedLM", "hidden_activation", "tanh"),
        ("ModernBertForSequenceClassification", "classifier_pooling", "mean"),
    ],
)
def test_a_config_that_asks_for_what_is_not_computed_is_refused(name, key, value):
    model = make(name, num_labels=3)
    (ids, mask) = inputs()
    setattr(model.config, key, value)
    with pytest.raises(ValueError, match=f"{key} = {value!r}"):
        model(ids, mask)


def test_what_kernels_do_not_return_or_read_is_refused():
    model = make("RobertaForMaskedLM")
    (ids, mask) = inputs()
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, mask, output_attentions=True)
    with pytest.raises(ValueError, match="head_mask"):
        model(ids, mask, head_mask=np.zeros((2, 4)))
