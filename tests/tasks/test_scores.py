"""Scores of predicted classes and numbers, against their definitions written out."""

import itertools
import json
import subprocess

import numpy as np
import pytest

from mlm.tasks import scores
from tests import ROOT

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


def run(script: str, cases: list) -> list[dict[str, float]]:
    """What a script that reads a case from each line prints for it, where scikit-learn and seqeval are."""
    command = [ROOT / ".venv-torch4" / "bin" / "python", "-c", script]
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.standard
def test_scores_are_those_of_scikit_learn_and_scipy():
    rng = np.random.default_rng(0)
    cases = []
    found = []
    for count, rows, right in itertools.product((2, 3, 5), (7, 200), (0.0, 0.5, 0.95, 1.0)):
        labels = rng.integers(0, count, rows)
        labels[labels == 4] = 1  # a class without rows
        predicted = np.where(rng.random(rows) < right, labels, rng.integers(0, count, rows))
        numbers = (labels + rng.normal(size=rows)).astype(np.float32)
        cases.append([labels.tolist(), predicted.tolist(), numbers.tolist()])
        found.append(scores.score_classes(labels, predicted.astype(np.float32), count))
        found[-1] |= scores.score_numbers(labels, numbers)
    for own, theirs in zip(found, run(SKLEARN, cases), strict=True):
        assert own == pytest.approx({name: theirs[name] for name in own}, abs=1e-12)


def test_matthews_of_many_rows():
    """Products of their counts don't fit in 63 bits."""
    labels = np.arange(400_000) % 2
    assert scores.score_classes(labels, labels, 2)["matthews"] == 1.0
    assert scores.score_classes(labels, 1 - labels, 2)["matthews"] == -1.0


def test_what_chooses_a_checkpoint():
    found = {"pearson": 0.5, "spearman": float("nan"), "accuracy": 0.75, "f1": None}
    assert scores.selected(found, ("accuracy", "pearson")) == 0.625
    assert (
        scores.selected(found, ("pearson", "spearman"))
        == scores.selected(found, ("f1", "pearson"))
        == -0.25
    )


def test_a_constant_has_no_correlation():
    found = scores.score_numbers(np.arange(4.0), np.ones(4))
    assert np.isnan(found["pearson"]) and np.isnan(found["spearman"]) and found["mse"] == 1.5
    assert scores.score_classes(np.zeros(5, int), np.zeros(5), 2)["matthews"] == 0


SEQEVAL = """
import json, sys, warnings
from seqeval import metrics
warnings.simplefilter("ignore")
for line in sys.stdin:
    case = json.loads(line)
    found = {name: getattr(metrics, f"{name}_score")(*case) for name in ("accuracy", "precision", "recall", "f1")}
    print(json.dumps(found))
"""
ODD = [  # true and predicted tags of a few sentences, separated by "|"
    ("B-A I-A I-A | I-A O", "I-A I-A I-A | B-A O"),  # IOB1
    ("I-A I-B B-B | B-A I-B", "I-A B-B I-B | B-A B-B"),
    ("S-A B-A I-A E-A | E-A S-A", "B-A I-A I-A E-A | I-A E-A"),  # IOBES
    ("E-A I-A E-A E-A | S-B I-B", "E-A I-A I-A E-A | O I-B"),
    ("B I O | B-A-B I-A-B . I-A-B", "B B O | B-A-B I-A-C . I-A-B"),
    ("O O", "O O"),
    ("O B-A", "O O"),
    ("I-", "B-"),
]


@pytest.mark.standard
def test_scores_of_words_are_those_of_seqeval():
    rng = np.random.default_rng(0)
    cases = []
    for tags in (
        ["O", "B-A", "I-A", "B-B", "I-B"],
        ["O", *(f"{p}-{t}" for p in "BIESU" for t in "AB")],
        ["NN", "VB"],
    ):
        for right in (0.3, 0.7, 0.97):
            lengths = rng.integers(1, 9, 30)
            true = [rng.choice(tags, length).tolist() for length in lengths]
            found = [
                [t if rng.random() < right else str(rng.choice(tags)) for t in row] for row in true
            ]
            cases.append((true, found))
    cases += [tuple([part.split() for part in tags.split("|")] for tags in pair) for pair in ODD]
    for (true, predicted), theirs in zip(cases, run(SEQEVAL, cases), strict=True):
        names = sorted({tag for row in (*true, *predicted) for tag in row})
        labels, guesses = (
            np.array([names.index(tag) for row in rows for tag in row])
            for rows in (true, predicted)
        )
        rows = np.repeat(np.arange(len(true)) * 3, list(map(len, true)))
        found = scores.score_words(labels, guesses.astype(np.float32), rows, names)
        assert found == pytest.approx(theirs, abs=1e-12), (true, predicted)


def test_words_that_were_cut_off_are_wrong():
    """And "O" to the spans; a span does not go on in the next row."""
    names = ("B-A", "I-A", "O")
    rows = np.array([0, 0, 0, 1, 1])
    labels = np.array([0, 1, 2, 1, 2])
    predicted = np.array([0.0, 1.0, -1.0, 1.0, -1.0])
    found = scores.score_words(labels, predicted, rows, names)
    assert found == {"accuracy": 0.6, "precision": 1.0, "recall": 1.0, "f1": 1.0}
