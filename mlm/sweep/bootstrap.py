"""The paired bootstrap: do two models differ (Koehn, 2004; Berg-Kirkpatrick et al., 2012)?"""

import csv
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mlm.paths import UPath

BLOCK = 10_000_000  # counts drawn at a time: 80 MB


class Difference(NamedTuple):
    """The mean score of the first model minus that of the second."""

    difference: float
    low: float  # of the 95% interval
    high: float
    same_sign: float  # share of the resamples whose difference has the sign of `difference`

    def __str__(self) -> str:
        return f"{self.difference:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


def paired(first_SxN: ArrayLike, second_SxN: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> Difference:
    """Compares two models by the score of each example, such as 1 for a correct answer, in the runs of some seeds.

    A resample draws examples with replacement, the same for both models, and seeds, for each model its own: their
    numbers may differ.
    """
    models = [np.asarray(scores, np.float64) for scores in (first_SxN, second_SxN)]
    shapes = [scores.shape for scores in models]
    if any(len(shape) != 2 or 0 in shape for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise ValueError(f"scores of the shapes {shapes[0]} and {shapes[1]}: must be [seeds, examples], of the same")
    rng, count, differences = np.random.default_rng(seed), shapes[0][1], []
    for begin in range(0, resamples, block := max(1, BLOCK // count)):
        drawn = min(block, resamples - begin)
        examples_RxN = _weights(rng, drawn, count)
        first_R, second_R = (
            np.sum((examples_RxN @ scores_SxN.T) * _weights(rng, drawn, len(scores_SxN)), axis=1)
            for scores_SxN in models
        )
        differences.append(first_R - second_R)
    difference_R, observed = np.concatenate(differences), float(models[0].mean() - models[1].mean())
    difference_R[np.abs(difference_R) < 1e-12] = 0  # equal up to rounding
    low, high = np.quantile(difference_R, [0.025, 0.975])
    same = float(np.mean(np.sign(difference_R) == np.sign(observed))) if abs(observed) > 1e-12 else 0.0
    return Difference(observed, float(low), float(high), same)


def compare(first: Sequence[str], second: Sequence[str], *, numbers: bool) -> Difference | None:
    """Compares two classifiers by the validation rows, given the folders of the runs of each; None if they differ.

    A row scores 1 if it is right; of a classifier that predicts `numbers`, minus the squared error.
    """

    def score(predicted: str, label: str) -> float:
        return -((float(predicted) - float(label)) ** 2) if numbers else float(predicted == label)

    models = [
        [[score(*pair) for pair in read_predictions(UPath(folder), "validation")] for folder in folders]
        for folders in (first, second)
    ]
    sizes = {len(scores) for model in models for scores in model}
    return paired(*models) if len(sizes) == 1 and 0 not in sizes else None


def read_predictions(folder: UPath, split: str) -> list[tuple[str, str]]:
    """Returns (prediction, label) of the rows of a split; none if it was not predicted."""
    file = folder / "predictions" / f"{split}.tsv"
    if not file.is_file():
        return []
    with file.open("r", encoding="utf-8", newline="") as lines:
        return [(row["prediction"], row["label"]) for row in csv.DictReader(lines, delimiter="\t")]


def _weights(rng: np.random.Generator, resamples: int, count: int) -> np.ndarray:
    """Returns the weight of each of `count` items in resamples of as many items, [resamples, count]."""
    drawn_RxN = rng.integers(count, size=(resamples, count)) + count * np.arange(resamples)[:, None]
    return np.bincount(drawn_RxN.ravel(), minlength=drawn_RxN.size).reshape(drawn_RxN.shape) / count
