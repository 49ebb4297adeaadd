"""The command `run`: what it prints at its end."""

import json
import shutil

import pytest

from mlm.commands import run
from mlm.workdir import Workdir


@pytest.mark.parametrize(("count", "loss"), [(12, 2.5), (0, None)])
def test_the_end_of_a_run_whose_validation_split_is_small(
    manifest, model, tmp_path, capsys, monkeypatch, count, loss
):
    """Fewer than 2,000 masked tokens are said, and no loss of none is printed."""
    monkeypatch.setattr(run, "_masked_sentences", lambda *_: iter(()))
    monkeypatch.setattr("mlm.inference.fill_mask.FillMask", lambda *_: lambda texts: [])
    workdir = Workdir(str(tmp_path))
    shutil.copytree(model.tokenizer, workdir.tokenizer)
    scores = {"loss": loss, "perplexity": 12.2, "accuracy": 0.5, "predictions": count}
    workdir.metrics.write_text(json.dumps({"step": 5, "kind": "eval", **scores}) + "\n")
    run._summarize(workdir, manifest, model)
    out = capsys.readouterr().out
    assert f"only {count} masked tokens" in out and ("perplexity" in out) == (loss is not None)
