"""Scores of predicted classes and numbers, as scikit-learn and scipy define them, and the confusion table."""

from __future__ import annotations

import math

import numpy as np


def of_classes(labels_N: np.ndarray, predicted_N: np.ndarray, count: int) -> dict[str, float]:
    """Returns the accuracy of `count` classes, and F1 as scikit-learn's `f1_score(average="weighted")`.

    A class without rows and predictions has no weight; one that is never right has F1 0.
    """
    table = confusion(labels_N, predicted_N, count)
    right, rows, predicted = np.diag(table), table.sum(axis=1), table.sum(axis=0)
    f1 = 2 * right / np.maximum(rows + predicted, 1)
    return {"accuracy": float(right.sum() / table.sum()), "f1": float((f1 * rows).sum() / table.sum())}


def of_numbers(targets_N: np.ndarray, predicted_N: np.ndarray) -> dict[str, float]:
    """Returns mean squared error and Pearson and Spearman correlations (NaN if labels or predictions are constant)."""
    from scipy import stats  # takes a second

    targets_N, predicted_N = targets_N.astype(np.float64), predicted_N.astype(np.float64)
    scores = {"mse": float(np.mean((targets_N - predicted_N) ** 2)), "pearson": math.nan, "spearman": math.nan}
    if len(targets_N) > 1 and np.ptp(targets_N) > 0 and np.ptp(predicted_N) > 0:
        scores["pearson"] = float(stats.pearsonr(targets_N, predicted_N).statistic)
        scores["spearman"] = float(stats.spearmanr(targets_N, predicted_N).statistic)
    return scores


def confusion(labels_N: np.ndarray, predicted_N: np.ndarray, count: int) -> np.ndarray:
    """Returns int64 [count, count]: the number of rows of each class (first axis) by predicted class (second)."""
    cells = np.bincount(labels_N.astype(np.int64) * count + predicted_N.astype(np.int64), minlength=count * count)
    return cells.reshape(count, count)
