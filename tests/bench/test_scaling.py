"""The scaling law of mlm/bench/scaling.py against one that is known."""

import json

import numpy as np
import pytest

from mlm.bench import scaling
from mlm.workdir import Workdir
from tests.support.corpora import manifest_of
from tests.support.tiny import tiny_config

LAW = np.array([np.log(400.0), np.log(500.0), np.log(1.7), 0.34, 0.4])
N, D = (each.ravel() for each in np.meshgrid([3e5, 1e6, 3e6], [1e6, 2e6, 4e6, 8e6]))
START = [5.0, 5.0, 0.0, 0.5, 0.5]


def test_a_law_is_found_again_though_one_run_does_not_follow_it():
    losses, outlier = 400 / N**0.34 + 500 / D**0.4 + 1.7, np.arange(len(N)) == 5
    assert scaling.log_loss(LAW, N, D) == pytest.approx(np.log(losses))
    found = scaling.fit(N, D, np.log(losses * np.where(outlier, 1.1, 1)), [START])
    assert np.exp(scaling.log_loss(found, N, D))[~outlier] == pytest.approx(losses[~outlier], rel=5e-3), "Huber's loss"


def test_the_best_size_is_that_of_a_search():
    flops, sizes = 1e19, np.geomspace(1e6, 1e10, 4001)
    losses = scaling.log_loss(LAW, sizes, flops / 6 / sizes)
    assert scaling.best_parameters(LAW, flops) == pytest.approx(sizes[losses.argmin()], rel=0.01)


def test_a_run_counts_when_it_is_finished(tmp_path):
    """A quarter of its rows is padding, and its table of positions is none of the parameters outside embeddings."""
    config, workdir = tiny_config(), Workdir(str(tmp_path))
    workdir.config.write_text(config.to_json())
    workdir.shards.mkdir()
    manifest = manifest_of(32, train={"records": (10,), "padding_tokens": 80}, validation={})
    (workdir.shards / "manifest.json").write_text(manifest.to_json())
    assert scaling.read(str(tmp_path)) is None, "no evaluation yet"
    for step, found in ((6, None), (12, 3.0)):
        workdir.metrics.write_text(json.dumps({"step": step, "kind": "eval", "loss": 3.0}) + "\n")
        point = scaling.read(str(tmp_path))
        assert (point and point.loss) == found
    layer = 4 * (32 * 32 + 32) + 32 * 64 + 64 + 64 * 32 + 32 + 4 * 32  # attention, feed-forward, two norms
    head = 32 * 32 + 32 + 2 * 32 + 32_768
    assert (point.tokens, point.parameters) == (12 * 16 * 24, 2 * 32 + layer + head)
