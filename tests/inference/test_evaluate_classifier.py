"""What a classifier's predictions are written as."""

import csv

import numpy as np

from mlm.data.examples import Examples, LabelledSplit
from mlm.inference.evaluate_classifier import _prediction_rows


def test_predicted_numbers_are_the_float32_so_that_scores_can_be_recomputed():
    predicted_N = np.nextafter(np.full(3, 1.2, np.float32), np.float32([0, 1.2, 9]))
    rows = LabelledSplit(
        np.zeros(3, np.int32), np.arange(4), np.float32([1.6, 0.12345679, np.nan]), 0
    )
    text = _prediction_rows(Examples({"new": rows}, (), 8, 0, 9, ""), "new", predicted_N)
    lines = list(csv.DictReader(text.splitlines(), delimiter="\t"))
    assert [np.float32(line["prediction"]) for line in lines] == predicted_N.tolist()
    assert [line["label"] for line in lines] == ["1.6", "0.12345679", ""]
