"""The loss by position and by distance of the nearest copy: the lines of a double loop."""

import dataclasses

import jax
import numpy as np
import pytest

from mlm.model.loss import RowSums
from mlm.model.masking import Masked
from mlm.model.module import segment_and_position_ids
from mlm.training import breakdown
from tests.support.tiny import INFO, random_batch

LENGTH = 33
CLS = INFO.special_ids["cls"]


@pytest.mark.parametrize("isolated", [False, True])
def test_lines_are_those_of_a_double_loop(isolated):
    """Masked, replaced and kept tokens are no copies, nor are tokens of other documents if those are isolated."""
    rng = np.random.default_rng(0)
    batch = random_batch(info=dataclasses.replace(INFO, length=LENGTH))
    attention = batch["attention_mask"]
    ids = np.where(batch["input_ids"] < 5, batch["input_ids"], 5 + batch["input_ids"] % 20)
    ids[:, LENGTH // 3 + 1] = CLS
    positions = rng.permuted(np.tile(np.arange(LENGTH), (16, 1)), axis=1)[:, :8]
    positions[0, 0] = LENGTH - 1  # of an octave of its own
    weights = np.float32(rng.random((16, 8)) < 0.8) * np.take_along_axis(attention, positions, 1)
    masked = Masked(ids, attention, positions, None, weights)
    loss, correct = np.float32(rng.random((2, 16, 8)))
    scores = RowSums(loss * weights, weights, weights * (correct < 0.5))
    segments, _ = segment_and_position_ids(ids, attention, 0, CLS if isolated else None)
    found = np.asarray(jax.jit(breakdown.sums)(scores, ids, segments, masked), np.float64)

    expected = np.zeros((16, 2, 7, 3))
    for b, k in np.argwhere(weights):
        predicted = positions[b, weights[b] > 0]
        place = positions[b, k]
        documents = np.cumsum(isolated & (ids[b] == CLS))
        away = [
            abs(j - place)
            for j in np.flatnonzero(attention[b])
            if j not in predicted
            and ids[b, j] == ids[b, place]
            and documents[j] == documents[place]
        ]
        values = (scores.loss_B[b, k], 1, scores.correct_B[b, k])
        for table, number in enumerate((max(place, 1), min(away, default=64))):
            expected[b, table, int(np.log2(number))] += values
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (expected[:, 1, :, 1].sum(0) > 0)[[0, 1, 2, 6]].all(), "near, farther, and no copy"
