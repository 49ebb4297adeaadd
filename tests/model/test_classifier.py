"""Classifiers of texts and of words: their configs, losses and dropout; tests/model/test_models.py has their logits."""

import jax
import numpy as np
import pytest

from mlm.model import bert, classifier
from tests.model.models import config_of

LABELS = ("no", "perhaps", "yes")


def make_config(
    name: str = "Roberta", labels: tuple[str, ...] = LABELS, *, of_tokens: bool = False, **settings
):
    return classifier.make_config(config_of(name, **settings), labels, of_tokens=of_tokens)


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("Roberta", "tokens", None),
        ("Bert", "classes", "single_label_classification"),
        ("ModernBert", "classes", "single_label_classification"),
    ],
)
def test_the_config_names_its_classes(name, kind, problem, tmp_path):
    make_config(name, of_tokens=kind == "tokens").save_pretrained(tmp_path)
    again = type(make_config(name)).from_pretrained(tmp_path)
    assert again.num_labels == 3 and again.label2id == {"no": 0, "perhaps": 1, "yes": 2}
    assert again.problem_type == problem and classifier.class_names(again) == LABELS
    head = {"classes": "SequenceClassification", "tokens": "TokenClassification"}[kind]
    assert again.architectures == [f"{name}For{head}"]
    assert (classifier.kind(again), classifier.head_name(again)) == (kind, head)
    assert getattr(again, "classifier_pooling", "cls") == "cls"


def test_a_regression_has_no_classes():
    config = make_config(labels=())
    assert config.num_labels == 1 and config.problem_type == classifier.kind(config) == "regression"
    assert classifier.class_names(config) == ()
    config.problem_type = None
    assert classifier.kind(config) == "regression", "one number, in a folder made elsewhere"


def test_the_second_text_of_a_bert_s_pair_has_another_type():
    ids = np.array([[0, 7, 2, 8, 9, 2, 1], [0, 7, 8, 9, 9, 9, 2]])
    found = bert.second_texts(ids, (ids != 1).astype(np.int32), 2)
    assert found.tolist() == [[0, 0, 0, 1, 1, 1, 0], [0] * 7]
    for sep_id in (2, None):
        config = make_config("Bert", sep_token_id=sep_id)
        rows = classifier.make_module(config).make_rows(
            ids, (ids != 1).astype(np.int32), None, None, None
        )
        assert (rows.token_types_BxL is None) == (sep_id is None)


# Losses --------------------------------------------------------------------------------------------------------------


def test_loss_of_tokens():
    logits = jax.random.normal(jax.random.key(0), (2, 4, 3))
    labels = np.array([[-1, 2, -1, 0], [-1, -1, 1, -1]], np.int32)
    sums = classifier.row_sums(logits, labels)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(
        sums.loss_B, [-log_probs[0, 1, 2] - log_probs[0, 3, 0], -log_probs[1, 2, 1]], atol=1e-6
    )
    assert sums.weight_B.tolist() == [2, 1]
    assert sums.correct_B.tolist() == (np.argmax(logits, -1) == labels).sum(axis=1).tolist()
    np.testing.assert_array_equal(classifier.row_scores(logits, labels)[1], np.argmax(logits, -1))
    grads = jax.grad(lambda x: classifier.row_sums(x, labels).loss_B.sum())(logits)
    np.testing.assert_array_equal(np.abs(grads).sum(-1) > 0, labels >= 0)


def test_loss_of_numbers():
    logits = np.array([[1.5], [-2.0]], np.float32)
    targets = np.array([1.0, 0.5], np.float32)
    sums = classifier.row_sums(logits, targets)
    assert (
        sums.loss_B.tolist() == [0.25, 6.25]
        and sums.weight_B.tolist() == [1, 1]
        and sums.correct_B is None
    )
    assert classifier.row_scores(logits, targets)[1].tolist() == [1.5, -2.0]
