"""The command `run`: what it prints at its end."""

import json
import shutil

from mlm.commands import run
from mlm.workdir import Workdir


def test_the_end_of_a_run_that_masked_nothing_in_evaluation(
    manifest, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(run, "_masked_sentences", lambda *_: iter(()))
    monkeypatch.setattr("mlm.inference.fill_mask.FillMask", lambda *_: lambda texts: [])
    workdir = Workdir(str(tmp_path))
    shutil.copytree(model.tokenizer, workdir.tokenizer)
    scores = {"loss": None, "perplexity": None, "accuracy": None, "predictions": 0}
    workdir.metrics.write_text(json.dumps({"step": 5, "kind": "eval", **scores}) + "\n")
    run._summarize(workdir, manifest, model)
    out = capsys.readouterr().out
    assert "only 0 masked tokens" in out and "perplexity" not in out
