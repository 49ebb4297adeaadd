"""Scores of predicted classes and numbers, against their definitions written out."""

import numpy as np
import pytest

from mlm.tasks import classification


def f1_by_definition(labels: list[int], predicted: list[int]) -> float:
    """Precision, recall and their harmonic mean of each class, weighted by its rows: as scikit-learn says it."""
    total = 0.0
    for each in set(labels):
        right = sum(a == b == each for a, b in zip(labels, predicted, strict=True))
        precision = right / predicted.count(each) if each in predicted else 0.0
        recall = right / labels.count(each)
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        total += f1 * labels.count(each) / len(labels)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_classes(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, 60)
    labels[labels == 3] = 2  # a class without rows
    predicted = np.where(rng.random(60) < 0.6, labels, rng.integers(0, 4 + seed % 2, 60))
    found = classification.score_classes(labels, predicted.astype(np.float32), 6)
    assert found["accuracy"] == pytest.approx(np.mean(labels == predicted))
    assert found["f1"] == pytest.approx(f1_by_definition(labels.tolist(), predicted.tolist()))


def test_scores_of_scikit_learn():
    """Figures of scikit-learn 1.9.1's accuracy_score and f1_score(average="weighted") on these very predictions."""
    labels = np.array([0, 1, 2, 3] * 10)
    predicted = (labels + (np.arange(40) % 7 == 0) + 2 * (np.arange(40) % 11 == 5)) % 4
    found = classification.score_classes(labels, predicted, 4)
    assert found == pytest.approx({"accuracy": 0.75, "f1": 0.74968671679198}, abs=1e-12)


def test_confusion_has_rows_of_the_true_class():
    table = classification.confusion(np.array([0, 0, 1, 2]), np.array([0.0, 1.0, 1.0, 0.0]), 3)
    assert table.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_scores_of_numbers():
    rng = np.random.default_rng(0)
    targets = rng.normal(size=50).round(1)  # with ties
    predicted = (targets + rng.normal(size=50)).astype(np.float32)
    found = classification.score_numbers(targets, predicted)
    ranks = [np.array([(x < y).sum() + ((x == y).sum() + 1) / 2 for y in x]) for x in (targets, predicted)]
    assert found["mse"] == pytest.approx(np.mean((targets - predicted) ** 2))
    assert found["pearson"] == pytest.approx(np.corrcoef(targets, predicted)[0, 1])
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_a_constant_has_no_correlation():
    found = classification.score_numbers(np.arange(4.0), np.ones(4))
    assert np.isnan(found["pearson"]) and np.isnan(found["spearman"]) and found["mse"] == 1.5
