"""The models as a Flax user has them: transformers' classes, their numbers and initial values, linen's own tools."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from transformers import FlaxPreTrainedModel

import mlm.model
from mlm.model import weights
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
@pytest.mark.parametrize("name", ["RobertaForMaskedLM", slow("BertForSequenceClassification")])
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


# Logits of two tokens under three entries, and of a row's three classes, as PyTorch's ModernBERT computes them.
GOLDEN = {
    "MaskedLM": [[-1.73404, 0.98843, -0.87125], [-1.74054, 1.57087, -0.70304]],
    "SequenceClassification": [-0.738, -0.17923, 0.83347],
}


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
def test_modernbert_has_the_logits_of_pytorch_s(head):
    """tests/model/test_torch.py has them computed again."""
    model = make(f"ModernBertFor{head}", num_labels=3)
    (ids, mask) = inputs()
    logits = jax.jit(lambda params: model(ids, mask, params=params).logits)(model.params)
    found = logits[1, (0, 19), :3] if head == "MaskedLM" else logits[1]
    np.testing.assert_allclose(found, GOLDEN[head], atol=1e-4)


def test_modernbert_is_drawn_as_pytorch_s():
    """Cut off at two deviations; output projections narrower, and a classifier as wide as its inputs ask for."""
    cls = mlm.model.FlaxModernBertForSequenceClassification
    config = config_of("ModernBert", hidden_size=256, intermediate_size=256)
    flat = flatten_dict(
        jax.jit(cls(config, _do_init=False).module.init_params)(jax.random.key(0)), sep="/"
    )
    narrow = 0.1 / np.sqrt(2 * 4)
    for name, stddev in {
        "model/embeddings/tok_embeddings/embedding": 0.1,
        "model/layers/1/attn/Wqkv/kernel": 0.1,
        "model/layers/1/attn/Wo/kernel": narrow,
        "model/layers/1/mlp/Wi/kernel": 0.1,
        "model/layers/1/mlp/Wo/kernel": narrow,
        "head/dense/kernel": narrow,
        "classifier/kernel": 256**-0.5,
    }.items():
        assert np.std(flat[name]) == pytest.approx(0.88 * stddev, rel=0.1), name
        assert np.abs(flat[name]).max() <= 2 * stddev, name


def test_weights_of_pytorch_s_modernbert_are_read_with_or_without_a_head_and_others_refused(
    tmp_path,
):
    model = make("ModernBertForMaskedLM")
    model.config.save_pretrained(tmp_path)
    whole = weights.to_torch(jax.device_get(model.params))
    body = {name: value for name, value in whole.items() if name.startswith("model.")}
    bare = {name.removeprefix("model."): value for name, value in body.items()}
    for tensors in (whole, body, bare):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        again = type(model).from_pretrained(str(tmp_path))
        parts = model.params if tensors is whole else ["model"]
        for part in parts:
            jax.tree.map(np.testing.assert_array_equal, again.params[part], model.params[part])
    with pytest.raises(ValueError, match=r"Wi/kernel is .*, 2, 8"):
        type(model).from_pretrained(tmp_path, intermediate_size=8)
    classifier = class_of("ModernBertForSequenceClassification")
    loaded = classifier.from_pretrained(
        tmp_path, num_labels=5, revision="main", ignore_mismatched_sizes=True
    )
    assert loaded.params["classifier"]["bias"].shape == (5,)


def test_a_modernbert_that_transformers_5_has_saved_keeps_its_layers_and_rotary_bases(tmp_path):
    bases = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 30.0}}
    types = ["sliding_attention" if index % 2 else "full_attention" for index in range(4)]
    cls = mlm.model.FlaxModernBertForMaskedLM
    model = make("ModernBertForMaskedLM")
    save_file(weights.to_torch(jax.device_get(model.params)), tmp_path / "model.safetensors")
    content = model.config.to_dict() | {"rope_parameters": bases, "layer_types": types}
    names = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")
    (tmp_path / "config.json").write_text(
        json.dumps({key: content[key] for key in content.keys() - {*names}})
    )
    for given in ({}, {"config": cls.config_class.from_pretrained(tmp_path)}):
        found = cls.from_pretrained(tmp_path, _do_init=False, **given)[0].module.config
        assert [getattr(found, name) for name in names] == [2, 500, 30]
    assert (
        cls.from_pretrained(tmp_path, _do_init=False, local_rope_theta=9.0)[
            0
        ].config.local_rope_theta
        == 9
    )


@pytest.mark.standard
def test_linen_s_tools_work():
    """`capture_intermediates`, and `sow` in a module of one's own."""
    model = make("RobertaForMaskedLM")
    (ids, mask) = inputs()

    class Entropy(type(model.module.clone())):
        def predict(self, x_BxKxH, noise):
            logits = super().predict(x_BxKxH, noise)
            self.sow(
                "intermediates",
                "entropy",
                -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1),
            )
            return logits

    module = Entropy(model.config)
    assert not module.in_transformers and model.module.in_transformers, (
        "it may compute something else"
    )

    def apply(params):
        return module.apply(
            {"params": params}, ids, mask, capture_intermediates=True, mutable=["intermediates"]
        )[1]

    state = jax.jit(apply)(model.params)
    shapes = {
        "/".join(path): jax.tree.leaves(value)[0].shape
        for path, value in flatten_dict(state).items()
    }
    assert shapes["intermediates/roberta/encoder/layer/1/__call__"] == (4, 32, 32)
    assert 0.1 < state["intermediates"]["entropy"][0].mean() < np.log(100)


@pytest.mark.parametrize(
    ("name", "longest"), [("RobertaForMaskedLM", 40 - PAD - 1), ("BertForMaskedLM", 40)]
)
def test_what_is_beyond_a_table_gives_nan_as_in_transformers(name, longest):
    """A longer row, an unknown token or type; RoBERTa's padding, of any length, does not."""
    model = make(name, num_labels=3)
    ids = np.full((1, longest), 5)
    logits = jax.jit(lambda ids, mask, types: model(ids, mask, types).logits[:, :8])
    zeros = np.zeros_like(ids)
    mask = np.ones_like(ids)
    assert np.isfinite(logits(ids, mask, zeros)).all()
    assert np.isnan(logits(np.full_like(ids, 100), mask, zeros)).all()
    assert np.isnan(logits(ids, mask, np.full_like(ids, 2))).all()
    ids, zeros, mask = (
        np.pad(array, ((0, 0), (0, 1)), mode="edge") for array in (ids, zeros, mask)
    )
    assert np.isnan(logits(ids, mask, zeros)).all()
    if model.module.first_position:
        ids[:, -1] = PAD
        mask[:, -1] = 0
        assert np.isfinite(logits(ids, mask, zeros)).all()


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "ModernBertForMaskedLM"])
def test_dropout_is_on_in_training_alone(name):
    model = make(name, num_labels=3)
    (ids, mask) = inputs()
    for key in ("hidden_dropout_prob", "mlp_dropout", "embedding_dropout"):
        setattr(model.config, key, 0.3)

    @jax.jit
    def logits(params):
        settings = (
            {},
            {"dropout_rng": jax.random.key(1)},
            {"dropout_rng": jax.random.key(1), "train": True},
        )
        return [model(ids, mask, params=params, **each).logits for each in settings]

    plain, with_key, in_training = logits(model.params)
    np.testing.assert_array_equal(with_key, plain)
    assert np.abs(in_training - plain).max() > 0.1


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
