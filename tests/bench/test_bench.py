"""bench: its figures are of the run's own step and data, beside the baselines, and table and JSON show them all."""

import argparse
import json
import re
import sys

import pytest

from mlm.bench import inputs, interleaved, steps
from mlm.commands import bench as command
from mlm.entry import Entry
from mlm.errors import InputError
from mlm.tasks.pretraining import Pretraining
from mlm.text import show
from mlm.training import sharding
from tests.support.corpora import write_jsonl
from tests.support.pytorch import torch_python
from tests.support.refusals import refuse
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = "tokenizer.vocab_size=500"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(interleaved, "INTERVAL", 0.02)


def measured(config, parts, manifest=None, *, tokenizer_folder="", megabytes=20.0, torch=""):
    """Returns the measurements, which JSON can hold, and prints their tables as the command does."""
    args = argparse.Namespace(
        parts=parts, seconds=0.0, megabytes=megabytes, torch=torch, entry=Entry()
    )
    found = command.measure(args, config, manifest, tokenizer_folder)
    assert json.loads(json.dumps(found)) == found and list(found) == parts
    show(*interleaved.render(found))
    return found


def cells_of(printed: str, *columns: int) -> list[list[str]]:
    """Some columns of the lines that have them; two spaces at least stand between cells."""
    lines = (re.split(" {2,}", line) for line in printed.splitlines())
    return [[line[column] for column in columns] for line in lines if max(columns) < len(line)]


@pytest.mark.standard
def test_step_batches_and_loop(manifest, capsys, monkeypatch):
    """On devices of a known peak: parameters and two moments in memory, beside temporaries; FLOPs by the task's own."""
    monkeypatch.setattr(steps.flops, "peak_flops", lambda kind: 1e12)
    config = tiny_config("data.lanes=4", "tokenizer.vocab_size=600")
    found = measured(config, ["step", "batches", "loop"], manifest)
    tokens = 16 * 32
    out, err = capsys.readouterr()
    for part, rows in found.items():
        names = [name for name in rows if name != "ratios"]
        assert list(rows["ratios"]) == names[1:] and all(
            ratio > 0 for ratio in rows["ratios"].values()
        )
        for name in names:
            assert rows[name]["tokens_per_second"] * rows[name]["milliseconds"] == pytest.approx(
                1e3 * tokens
            )
        for name, ratio in rows["ratios"].items():
            line = [interleaved.NAMES[name], f"{rows[name]['tokens_per_second']:,.0f}"]
            assert [*line, f"the first is {ratio:.3g} times as fast"] in cells_of(out, 0, 1, -1)
        assert f"bench: {part}: measuring" in err
    task = Pretraining.without_data(config)
    step = found["step"]
    for name in ("mlm", "baseline"):
        row = step[name]
        assert row["mfu"] == pytest.approx(
            row["tokens_per_second"] * task.flops_per_token(32) / 8e12
        )
        memory = f"{row['memory_bytes'] / 1e6:,.0f} MB"
        assert [interleaved.NAMES[name], f"{row['mfu']:.1%}", memory] in cells_of(out, 0, 3, 4)
    assert step["baseline"]["temporary_bytes"] > 1.5 * step["mlm"]["temporary_bytes"], (
        "every position's logits"
    )
    state = 3 * sum(leaf.nbytes for _, leaf in sharding.named_leaves(task.init().params))
    assert state < step["mlm"]["memory_bytes"] - step["mlm"]["temporary_bytes"] < 1.2 * state + 1e5


@pytest.mark.slow
def test_shards(texts, tokenizer_folder, tmp_path, monkeypatch):
    """Of the first text of the corpus, all of it, by both; nothing is left behind."""
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(inputs.tempfile, "tempdir", str(tmp_path / "temporary"))
    corpus = (
        f"corpus.sources={source}",
        f"corpus.keep_out=({source!r},)",
        "corpus.test_fraction=0.1",
    )
    config = tiny_config(*corpus, "shards.count=4", "data.lanes=4")
    found = measured(config, ["shards"], tokenizer_folder=tokenizer_folder, megabytes=0.2)["shards"]
    ours = found["mlm"]
    example = found["tf_tpu_example"]
    assert 0 <= found["tokens"] - ours["rows"] * 32 < 6 * 32, (
        "of each shard less than a row is lost"
    )
    assert 0.9 * ours["rows"] < example["rows"] <= ours["rows"]
    for row in (ours, example):
        assert row["tokens_per_second"] * row["milliseconds"] == pytest.approx(
            found["tokens"] * 1e3
        )
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
def test_torch(capsys, monkeypatch):
    # of jax's devices, not of PyTorch's
    monkeypatch.setattr(steps.flops, "peak_flops", lambda kind: 1e12)
    config = tiny_config(SMALL, "model.hidden_dropout=0.1", "model.dtype=bfloat16")
    found = measured(config, ["step"], torch=torch_python(5))["step"]
    row = found["torch"]
    assert row["transformers"].startswith("5.") and row["device"] == "cpu"
    assert row["dtype"] == "float32", "bfloat16 is for CUDA"
    assert row["tokens_per_second"] * row["milliseconds"] == pytest.approx(16 * 32 * 1e3)
    assert row["mfu"] is None and found["mlm"]["mfu"]
    assert set(found["ratios"]) == {"baseline", "torch"}
    shown = cells_of(capsys.readouterr().out, 0, 1)
    assert ["run_mlm.py (PyTorch)", f"{row['tokens_per_second']:,.0f}"] in shown


@pytest.mark.standard
def test_interpreter_without_torch():
    with pytest.raises(InputError, match=r"--torch=.*torch, transformers and accelerate"):
        measured(tiny_config(SMALL), ["step"], torch=sys.executable)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["loop", f"--torch={sys.executable}"], "--torch"),
        (["step", "--config.classify.train=csv:mine.csv"], "classify.train"),
    ],
)
def test_flags_that_can_not_be(flags, word, capsys):
    refuse(["bench", "--config=configs/base.py", "--parts", *flags], 2, word, capsys=capsys)
