"""Classifiers of texts and of words: their losses; tests/model/test_models.py has their logits."""

import jax
import numpy as np
import pytest

from mlm.model import classifier
from tests.model.models import config_of


def test_a_regression_has_no_classes():
    """One number in a folder made elsewhere is one, too."""
    config = classifier.make_config(config_of("Roberta"), (), of_tokens=False)
    assert config.num_labels == 1 and config.problem_type == classifier.kind(config) == "regression"
    config.problem_type = None
    assert classifier.kind(config) == "regression" and classifier.class_names(config) == ()


# Losses --------------------------------------------------------------------------------------------------------------


def test_loss_of_tokens():
    logits = jax.random.normal(jax.random.key(0), (2, 4, 3))
    labels = np.array([[-1, 2, -1, 0], [-1, -1, 1, -1]], np.int32)
    sums = classifier.row_sums(logits, labels)
    nats = -np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(
        sums.loss_B, [nats[0, 1, 2] + nats[0, 3, 0], nats[1, 2, 1]], atol=1e-6
    )
    assert sums.weight_B.tolist() == [2, 1]
    best = np.argmax(logits, -1)
    assert sums.correct_B.tolist() == (best == labels).sum(axis=1).tolist()
    np.testing.assert_array_equal(classifier.row_scores(logits, labels)[1], best)


def test_loss_of_numbers():
    logits = np.array([[1.5], [-2.0]], np.float32)
    targets = np.array([1.0, 0.5], np.float32)
    sums = classifier.row_sums(logits, targets)
    assert (sums.loss_B.tolist(), sums.weight_B.tolist()) == ([0.25, 6.25], [1, 1])
    assert sums.correct_B is None
    assert classifier.row_scores(logits, targets)[1].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("name", "of_tokens"), [("Bert", False), ("ModernBert", False), ("Roberta", True)]
)
def test_the_config_names_its_classes(name, of_tokens):
    body = config_of(name, **{"classifier_pooling": "mean"} if name == "ModernBert" else {})
    config = classifier.make_config(body, ("no", "yes"), of_tokens=of_tokens)
    assert (config.num_labels, config.label2id) == (2, {"no": 0, "yes": 1})
    assert config.problem_type == (None if of_tokens else "single_label_classification")
    assert getattr(config, "classifier_pooling", "cls") == "cls"
