"""One short run, however its processes were started."""

import pathlib

import numpy as np

from tests.support.states import state_of

SETTINGS = ("train.steps=6", "log.every=1", "checkpoint.every=0", "mesh.fsdp=2", "model.hidden_dropout=0.1")


def metrics(workdir: pathlib.Path) -> str:
    return (workdir / "metrics.jsonl").read_text()


def assert_same(one: pathlib.Path, other: pathlib.Path) -> None:
    assert metrics(one) == metrics(other)
    left, right = state_of(one, 6), state_of(other, 6)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)
