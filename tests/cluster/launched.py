"""One short run, however its processes were started."""

import pathlib

import numpy as np

from tests.support.states import state_of

SETTINGS = (
    "train.steps=6",
    "log.every=1",
    "log.norms_every=4",
    "checkpoint.every=0",
    "mesh.fsdp=2",
)
SETTINGS += ("model.hidden_dropout=0.1",)


def assert_same(one: pathlib.Path, other: pathlib.Path, step: int = 6) -> None:
    """To the bit: what was logged, and the state after the last step."""
    for file in ("metrics.jsonl", "norms.jsonl"):
        assert (one / file).read_text() == (other / file).read_text()
    left = state_of(one, step)
    right = state_of(other, step)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)
