"""Scores of predicted classes, numbers and labels of words: scikit-learn's, scipy's and seqeval's definitions.

Dimensions: N rows, C classes, W words.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np


def score_classes(labels_N: np.ndarray, predicted_N: np.ndarray, count: int) -> dict[str, float]:
    """Returns scores of `count` classes: those of scikit-learn's functions of these names.

    accuracy, f1 (average="weighted"), f1_macro, matthews (0 if undefined) and, of two classes, f1_positive, that of the
    second. A class without rows and predictions has no weight; one that is never right has F1 0.
    """
    table = confusion(labels_N, predicted_N, count)
    total = len(labels_N)
    right = np.diag(table)
    rows_C = table.sum(axis=1)
    predicted_C = table.sum(axis=0)
    f1_C = 2 * right / np.maximum(rows_C + predicted_C, 1)
    # > 2^63
    spread = math.sqrt(
        math.prod(total**2 - int(counts_C @ counts_C) for counts_C in (rows_C, predicted_C))
    )
    scores = {
        "accuracy": right.sum() / total,
        "f1": f1_C @ rows_C / total,
        "f1_macro": f1_C[rows_C + predicted_C > 0].mean(),
        "matthews": (right.sum() * total - rows_C @ predicted_C) / spread if spread else 0.0,
    }
    if count == 2:
        scores["f1_positive"] = f1_C[1]
    return {name: float(score) for name, score in scores.items()}


def score_numbers(targets_N: np.ndarray, predicted_N: np.ndarray) -> dict[str, float]:
    """Returns mean squared error and Pearson and Spearman correlations (NaN if labels or predictions are constant)."""
    from scipy import stats  # takes a second

    targets_N = targets_N.astype(np.float64)
    predicted_N = predicted_N.astype(np.float64)
    scores = {
        "mse": float(np.mean((targets_N - predicted_N) ** 2)),
        "pearson": math.nan,
        "spearman": math.nan,
    }
    if len(targets_N) > 1 and np.ptp(targets_N) > 0 and np.ptp(predicted_N) > 0:
        scores["pearson"] = float(stats.pearsonr(targets_N, predicted_N).statistic)
        scores["spearman"] = float(stats.spearmanr(targets_N, predicted_N).statistic)
    return scores


def score_words(
    labels_W: np.ndarray, predicted_W: np.ndarray, row_W: np.ndarray, names: Sequence[str]
) -> dict[str, float]:
    """Returns the accuracy over words, and precision, recall and F1 of all spans together, as seqeval does by default.

    A word that the model could not read, -1 in `predicted_W`, is wrong, and "O" to the spans. `row_W` rises.
    """
    ends = np.flatnonzero(np.diff(row_W, append=-1)) + 1  # a span ends with its row
    true, predicted = (
        spans([(*names, "O")[int(label)] for label in np.insert(tags_W, ends, -1)])
        for tags_W in (labels_W, predicted_W)
    )
    right = len(true & predicted)
    return {
        "accuracy": float(np.mean(labels_W == predicted_W)),
        "precision": right / max(len(predicted), 1),
        "recall": right / max(len(true), 1),
        "f1": 2 * right / max(len(true) + len(predicted), 1),
    }


def spans(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Returns (first, last, type) of the spans in tags, the last of which is "O", as seqeval reads them by default.

    Of IOB1, IOB2 and IOBES alike: a span begins and ends where prefix or type say so, whatever the scheme allows.
    """
    complete = set()
    first = 0
    before = "O"
    type_before = ""
    for index, (prefix, *rest) in enumerate(tags):
        span_type = "".join(rest).split("-", 1)[-1] or "_"
        differs = span_type != type_before
        if (
            before in "ES"
            or (before in "BI" and prefix in "BSO")
            or (before not in "O." and differs)
        ):
            complete.add((first, index - 1, type_before))
        if (
            prefix in "BS"
            or (before in "ESO" and prefix in "EI")
            or (prefix not in "O." and differs)
        ):
            first = index
        before = prefix
        type_before = span_type
    return complete


def confusion(labels_N: np.ndarray, predicted_N: np.ndarray, count: int) -> np.ndarray:
    """Returns int64 [C, C]: the number of rows of each class (first axis) by predicted class (second)."""
    cells = np.bincount(
        labels_N.astype(np.int64) * count + predicted_N.astype(np.int64), minlength=count * count
    )
    return cells.reshape(count, count)


def selected(scores: Mapping[str, float | None], metrics: Sequence[str]) -> float:
    """Returns the mean of the metrics that choose a checkpoint; one that is undefined counts as its worst, -1."""
    values = [scores[name] for name in metrics]
    return sum(-1.0 if value is None or math.isnan(value) else value for value in values) / len(
        values
    )
