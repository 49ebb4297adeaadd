"""The classifiers of texts and of words are transformers' Flax classes: their trees, their numbers, their losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from ml_collections import ConfigDict
from transformers import FlaxRobertaForSequenceClassification, FlaxRobertaForTokenClassification

from mlm.model import classifier
from mlm.model.families import ROBERTA
from mlm.model.layers import Noise
from tests.support.tiny import INFO, random_batch

LABELS = ("no", "perhaps", "yes")


def make(labels: tuple[str, ...] = LABELS, *, of_tokens: bool = False, **sizes):
    """Returns (transformers' config, parameters with a head that is not near zero)."""
    settings = {
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "intermediate_size": 64,
        "positions": 32,
        "activation": "gelu",
        "hidden_dropout": 0.3,
        "attention_dropout": 0.2,
        "layer_norm_eps": 1e-5,
        "init_stddev": 0.3,
        "vocab_multiple": 8,
    }
    body = ROBERTA.make_config(ConfigDict(settings | sizes), INFO.vocab_size, INFO.special_ids)
    config = classifier.make_config(body, labels, of_tokens=of_tokens)
    return config, jax.jit(classifier.make_module(config).init_params)(jax.random.key(0))


@pytest.mark.parametrize("labels", [LABELS, ()], ids=["classes", "regression"])
def test_logits_are_the_stock_ones(labels):
    config, params = make(labels)
    columns = [random_batch(rows=6)[name] for name in ("input_ids", "attention_mask")]
    stock = FlaxRobertaForSequenceClassification(config, _do_init=False)
    wanted = jax.jit(lambda params, *columns: stock(*columns, params=params, train=False).logits)(params, *columns)
    found = jax.jit(classifier.make_module(config).logits)(params, *columns)
    assert found.shape == (6, max(len(labels), 1)) and found.dtype == jnp.float32
    assert float(jnp.std(wanted)) > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_logits_of_tokens_are_the_stock_ones():
    config, params = make(of_tokens=True)
    assert classifier.kind(config) == "tokens" and classifier.class_names(config) == LABELS
    assert params["roberta"].keys() == {"embeddings", "encoder"} and params["classifier"].keys() == {"kernel", "bias"}
    columns = [random_batch(rows=6)[name] for name in ("input_ids", "attention_mask")]
    stock = FlaxRobertaForTokenClassification(config, _do_init=False)
    wanted = jax.jit(lambda params, *columns: stock(*columns, params=params, train=False).logits)(params, *columns)
    found = jax.jit(classifier.make_module(config).logits)(params, *columns)
    assert found.shape == (*columns[0].shape, 3) and float(jnp.std(wanted)) > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    key = jax.random.key(1)
    module = classifier.make_module(config)
    seed = module.apply({}, method=lambda bound: jax.random.bits(bound.make_rng("dropout")), rngs={"dropout": key})
    noise = Noise(seed, np.arange(6, dtype=np.uint32))
    rows = module.make_rows(*columns, None, None, noise)
    hidden = module.apply({"params": params}, method=lambda bound: bound.body(columns[0], rows, None))[-1]
    without = hidden @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    assert np.abs(module.logits(params, *columns, None, key) - without).max() > 0.1, "no dropout before it"


def test_loss_of_tokens():
    logits = jax.random.normal(jax.random.key(0), (2, 4, 3))
    labels = np.array([[-1, 2, -1, 0], [-1, -1, 1, -1]], np.int32)
    sums = classifier.row_sums(logits, labels)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(sums.loss_B, [-log_probs[0, 1, 2] - log_probs[0, 3, 0], -log_probs[1, 2, 1]], atol=1e-6)
    assert sums.weight_B.tolist() == [2, 1]
    right = np.argmax(logits, -1) == labels
    assert sums.correct_B.tolist() == right.sum(axis=1).tolist()
    np.testing.assert_array_equal(classifier.row_scores(logits, labels)[1], np.argmax(logits, -1))
    grads = jax.grad(lambda x: classifier.row_sums(x, labels).loss_B.sum())(logits)
    np.testing.assert_array_equal(np.abs(grads).sum(-1) > 0, labels >= 0)


def test_the_tree_is_the_stock_one_without_pooler():
    _, params = make()
    assert params.keys() == {"roberta", "classifier"}
    assert params["roberta"].keys() == {"embeddings", "encoder"}
    assert params["classifier"]["out_proj"]["kernel"].shape == (32, 3)


@pytest.mark.slow
def test_padding_is_not_attended_to():
    """Whatever ids lie in the padding, and however much of it there is."""
    config, params = make()
    batch, module = random_batch(rows=3), classifier.make_module(config)
    attention = np.zeros_like(batch["attention_mask"])
    attention[:, :20] = 1
    ids = np.where(attention, batch["input_ids"], 77)
    wanted = module.logits(params, ids[:, :20], attention[:, :20])
    np.testing.assert_allclose(module.logits(params, ids, attention), wanted, atol=1e-5)


@pytest.mark.slow
def test_dropout_of_the_head():
    """On with a key alone, of the hidden rate, and a function of the key and the row."""
    config, params = make(hidden_dropout=0.5, attention_dropout=0.0, layers=1)
    batch = random_batch(rows=4)
    ids, attention = (np.repeat(batch[name][:1], 4, axis=0) for name in ("input_ids", "attention_mask"))

    def logits(key, rows=None):
        return np.asarray(classifier.make_module(config).logits(params, ids, attention, None, key, rows))

    assert np.ptp(logits(None), axis=0).max() < 1e-5
    one, other = logits(jax.random.key(1)), logits(jax.random.key(2))
    assert np.abs(one - other).min(axis=1).max() > 1e-3 and np.ptp(one, axis=0).max() > 1e-3
    np.testing.assert_array_equal(logits(jax.random.key(1)), one)
    again = logits(jax.random.key(1), np.array([2, 2, 0, 1], np.uint32))
    np.testing.assert_allclose(again, one[[2, 2, 0, 1]], atol=1e-6)
    config.hidden_dropout_prob = 0.0
    assert np.abs(logits(jax.random.key(1)) - logits(None)).max() < 1e-5, "another rate than the hidden one"


def test_loss_of_classes():
    logits = jax.random.normal(jax.random.key(0), (5, 3))
    labels = np.array([0, 2, 1, 1, 0], np.int32)
    sums = classifier.row_sums(logits, labels)
    wanted = -jax.nn.log_softmax(logits)[np.arange(5), labels]
    np.testing.assert_allclose(sums.loss_B, wanted, atol=1e-6)
    np.testing.assert_array_equal(sums.correct_B, np.argmax(logits, -1) == labels)
    np.testing.assert_array_equal(sums.weight_B, np.ones(5))
    check_grads(lambda x: classifier.row_sums(x, labels).loss_B.sum(), (logits,), order=1, modes=["rev"], atol=1e-2)
    np.testing.assert_array_equal(classifier.row_scores(logits, labels)[1], np.argmax(logits, -1))


def test_loss_of_numbers():
    logits, targets = np.array([[1.5], [-2.0]], np.float32), np.array([1.0, 0.5], np.float32)
    assert classifier.row_sums(logits, targets).loss_B.tolist() == [0.25, 6.25]
    assert classifier.row_scores(logits, targets)[1].tolist() == [1.5, -2.0]


@pytest.mark.standard
def test_the_config_names_its_classes(tmp_path):
    config, _ = make()
    config.save_pretrained(tmp_path)
    again = type(config).from_pretrained(tmp_path)
    assert again.num_labels == 3 and again.label2id == {"no": 0, "perhaps": 1, "yes": 2}
    assert again.problem_type == "single_label_classification"
    assert again.architectures == ["RobertaForSequenceClassification"]
    assert classifier.class_names(again) == LABELS
    number, _ = make(())
    assert number.num_labels == 1 and number.problem_type == "regression" and classifier.class_names(number) == ()
