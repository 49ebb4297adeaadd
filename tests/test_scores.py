"""Scores of predicted classes and numbers, against their definitions written out."""

import itertools
import json
import subprocess

import numpy as np
import pytest

from mlm.tasks import scores
from tests.processes import ROOT

SKLEARN = """
import json, sys, warnings
from scipy import stats
from sklearn import metrics
warnings.simplefilter("ignore")
for line in sys.stdin:
    labels, predicted, numbers = json.loads(line)
    found = {"accuracy": metrics.accuracy_score(labels, predicted)}
    found["f1"] = metrics.f1_score(labels, predicted, average="weighted")
    found["f1_macro"] = metrics.f1_score(labels, predicted, average="macro")
    found["matthews"] = metrics.matthews_corrcoef(labels, predicted)
    found["f1_positive"] = metrics.f1_score(labels, predicted) if max(labels + predicted) < 2 else None
    found["mse"] = metrics.mean_squared_error(labels, numbers)
    found["pearson"], found["spearman"] = stats.pearsonr(labels, numbers)[0], stats.spearmanr(labels, numbers)[0]
    print(json.dumps(found))
"""


def test_scores_are_those_of_scikit_learn_and_scipy():
    rng, cases, found = np.random.default_rng(0), [], []
    for count, rows, right in itertools.product((2, 3, 5), (7, 200), (0.0, 0.5, 0.95, 1.0)):
        labels = rng.integers(0, count, rows)
        labels[labels == 4] = 1  # a class without rows
        predicted = np.where(rng.random(rows) < right, labels, rng.integers(0, count, rows))
        numbers = (labels + rng.normal(size=rows)).astype(np.float32)
        cases.append([labels.tolist(), predicted.tolist(), numbers.tolist()])
        found.append(scores.score_classes(labels, predicted.astype(np.float32), count))
        found[-1] |= scores.score_numbers(labels, numbers)
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    python = ROOT / ".venv-torch4" / "bin" / "python"
    done = subprocess.run([python, "-c", SKLEARN], input=lines, capture_output=True, text=True, check=True)
    for own, line in zip(found, done.stdout.splitlines(), strict=True):
        theirs = json.loads(line)
        assert own == pytest.approx({name: theirs[name] for name in own}, abs=1e-12)


def test_one_class_alone_has_no_correlation():
    found = scores.score_classes(np.zeros(5, int), np.zeros(5), 2)
    assert found == {"accuracy": 1.0, "f1": 1.0, "f1_macro": 1.0, "matthews": 0.0, "f1_positive": 0.0}


def test_what_chooses_a_checkpoint():
    found = {"pearson": 0.5, "spearman": float("nan"), "accuracy": 0.75, "f1": None}
    assert scores.selected(found, ("accuracy", "pearson")) == 0.625
    assert scores.selected(found, ("pearson", "spearman")) == scores.selected(found, ("f1", "pearson")) == -0.25


def test_confusion_has_rows_of_the_true_class():
    table = scores.confusion(np.array([0, 0, 1, 2]), np.array([0.0, 1.0, 1.0, 0.0]), 3)
    assert table.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_a_constant_has_no_correlation():
    found = scores.score_numbers(np.arange(4.0), np.ones(4))
    assert np.isnan(found["pearson"]) and np.isnan(found["spearman"]) and found["mse"] == 1.5
