"""`doctor --against`: a benchmark's texts that training holds."""

import pytest

from mlm import __main__
from mlm.data import tokenizer
from mlm.doctor import scan
from tests.support.corpora import write_jsonl
from tests.support.doctored import run_doctor
from tests.support.processes import train_arguments


@pytest.mark.standard
def test_a_benchmark_that_training_holds(healthy, workdir, texts, tmp_path, capsys):
    own = tokenizer.load_fast(str(workdir / "tokenizer")).decode(scan.row(healthy, "train", 7).tolist())
    files = {"held": [own, "a text that nobody has written"], "other": [text[::-1] for text in texts[:5]]}
    sources = [write_jsonl(tmp_path / f"{name}.jsonl", lines) for name, lines in files.items()]
    found = run_doctor(workdir, healthy.folder, capsys, flags=("--against", *sources))["against"]
    assert found["level"] == "warning" and found["what"].startswith("1 of 6 texts (16.7%) share a stretch of 13")
    assert "1 at least half of their stretches; 100% of the training rows were read" in found["what"]
    assert "corpus.keep_out" in found["fix"] and found["where"] == ", ".join(sources)
    assert run_doctor(workdir, healthy.folder, capsys, flags=("--against", sources[1]))["against"]["level"] == "ok"
    assert "against" not in run_doctor(workdir, healthy.folder, capsys)


def test_what_is_no_source(healthy, workdir, capsys):
    assert __main__.main(["doctor", *train_arguments(workdir, healthy.folder)[1:], "--against", "a.jsonl"]) == 2
    assert "--against a.jsonl: must be docstrings, text:GLOB" in capsys.readouterr().err
