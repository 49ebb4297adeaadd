"""The loss by position and by distance of the nearest copy: the lines of a double loop."""

import dataclasses

import jax
import numpy as np
import pytest

from mlm.model.loss import RowSums
from mlm.model.module import segment_and_position_ids
from mlm.model.token_masking import Masked
from mlm.training import breakdown
from tests.support.tiny import INFO, random_batch

LENGTH = 33
CLS = INFO.special_ids["cls"]


def nearest(ids: list[int], documents: list[int], visible: list[bool], place: int) -> int:
    """The distance of the nearest visible token of the same id and document; 0 if there is none."""
    alike = [
        j
        for j in range(len(ids))
        if j != place and ids[j] == ids[place] and documents[j] == documents[place]
    ]
    return min((abs(j - place) for j in alike if visible[j]), default=0)


def line_of(number: int) -> str:
    """The line of a number from 1 up."""
    low = 1
    while low * 2 <= number:
        low *= 2
    return str(low) if low == 1 else f"{low}-{2 * low - 1}"


@pytest.mark.parametrize("isolated", [False, True])
def test_lines_are_those_of_a_double_loop(isolated):
    """Masked, replaced and kept tokens are no copies, nor are tokens of other documents if those are isolated."""
    rng = np.random.default_rng(0)
    batch = random_batch(info=dataclasses.replace(INFO, length=LENGTH))
    ids = batch["input_ids"]
    attention = batch["attention_mask"]
    ids = np.where(ids < 5, ids, 5 + ids % 20)
    ids[:, LENGTH // 3 + 1] = CLS
    positions = np.array(
        [rng.permutation(16)[:8] + (row != 15) * rng.integers(18) for row in range(16)]
    )
    positions[0, 0] = LENGTH - 1  # of an octave of its own
    weights = (rng.random((16, 8)) < 0.8).astype(np.float32)
    masked = Masked(ids, attention, positions, None, weights)
    scores = RowSums(
        rng.random((16, 8)).astype(np.float32) * weights,
        weights,
        weights * (rng.random((16, 8)) < 0.5),
    )
    segments, _ = segment_and_position_ids(ids, attention, 0, CLS if isolated else None)
    found = np.asarray(jax.jit(breakdown.sums)(scores, ids, segments, masked), np.float64)
    assert found.shape == (16, 2, 7, 3)

    expected = {}
    across = 0
    for b in range(16):
        row = ids[b].tolist()
        places = positions[b].tolist()
        predicted = [place for place, weight in zip(places, weights[b], strict=True) if weight]
        visible = [bool(attention[b, j]) and j not in predicted for j in range(LENGTH)]
        documents = np.cumsum([isolated and token == CLS for token in row]).tolist()
        for k, place in enumerate(places):
            if weights[b, k]:
                distance = nearest(row, documents, visible, place)
                across += distance != nearest(row, [0] * len(row), visible, place)
                lines = (
                    "0-1" if place < 2 else line_of(place),
                    line_of(distance) if distance else "no copy",
                )
                values = np.array([scores.loss_B[b, k], 1, scores.correct_B[b, k]])
                for key in zip(breakdown.TABLES, lines, strict=True):
                    expected[b, *key] = expected.get((b, *key), 0) + values
    assert (across > 5) == isolated and weights[0, 0]
    assert {line for _, table, line in expected if table == "by_copy_distance"} >= {
        "1",
        "2-3",
        "4-7",
        "no copy",
    }
    for b in range(16):
        for number, table in enumerate(breakdown.TABLES):
            for line, values in zip(breakdown.names(table, 7), found[b, number], strict=True):
                wanted = expected.get((b, table, line), np.zeros(3))
                np.testing.assert_allclose(values, wanted, rtol=1e-5, err_msg=f"{b} {table} {line}")


def test_the_longest_rows_count_without_overflow():
    """The last groups in the order of (segment, id) have the largest numbers: a pair far apart, a token without any."""
    length = breakdown.LONGEST
    ids = np.arange(length, dtype=np.int32)
    visible = np.arange(length) == length - 1
    ids[0] = ids[-1]
    distances = jax.jit(breakdown.copy_distances)
    found = np.asarray(distances(ids, np.ones_like(ids), visible))
    assert found[0] == length - 1 and (found[1:-1] == length).all()
    ids[0] = 0
    assert distances(ids, np.ones_like(ids), visible & False)[-1] == length
    assert breakdown.names("by_position", 14)[:-1] == [
        "0-1",
        *map(line_of, 2 ** np.arange(1, 13)),
    ], "8,192 tokens"
    assert breakdown.names("by_copy_distance", 3) == ["1", "2-3", "no copy"]
