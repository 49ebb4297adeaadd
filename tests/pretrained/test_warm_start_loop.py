"""Training from another model's parameters: the loop starts there, and a restart does not."""

import shutil

import numpy as np
import pytest

from mlm.pretrained import load
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.pretrained.starts import SAME_MODEL, source_leaves
from tests.support.corpora import stdlib_docstrings, write_shards
from tests.support.tiny import pretrain, tiny_config
from tests.support.trained_model import LENGTH


@pytest.mark.slow
def test_the_loop_starts_there_once(trained_workdir, model, tmp_path, capfd):
    """At a learning rate of nearly 0 the first evaluation is that of the source; a restart takes the checkpoint."""
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(str(trained_workdir.tokenizer), str(workdir.tokenizer))
    shards = write_shards(stdlib_docstrings()[:300], tmp_path / "shards", str(trained_workdir.tokenizer), length=LENGTH)
    settings = (
        *SAME_MODEL,
        "data.lanes=4",
        "train.steps=2",
        "optimizer.learning_rate=1e-12",
        "optimizer.ema_decay=0.5",
    )
    config = tiny_config(*settings, f"train.init_from={trained_workdir.root}")
    scores = pretrain(config, workdir, shards)
    assert "start from" in capfd.readouterr().err
    same = load.from_workdir(workdir, head=load.LM_HEAD)
    for name, value in source_leaves(model).items():
        np.testing.assert_allclose(dict(sharding.named_leaves(same.params))[name], value, atol=1e-8, err_msg=name)
    without = pretrain(tiny_config(*settings), Workdir(str(tmp_path / "other")), shards)
    assert scores["loss"] < without["loss"] - 0.1 or scores["loss"] > without["loss"] + 0.1
    pretrain(config, workdir, shards)
    assert "start from" not in capfd.readouterr().err
