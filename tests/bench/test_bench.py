"""bench: its figures are of the run's own step and data, beside the baselines, and table and JSON show them all."""

import argparse
import contextlib
import json
import pathlib
import re
import subprocess
import sys
import time

import pytest

from mlm.bench import inputs, interleaved, steps
from mlm.commands import bench as command
from mlm.data.corpus import Corpus, text_hash
from mlm.entry import Entry
from mlm.errors import InputError
from mlm.tasks.pretraining import Pretraining
from mlm.text import show
from mlm.training import sharding
from tests import ROOT
from tests.support.corpora import write_jsonl
from tests.support.processes import environment
from tests.support.pytorch import torch_python
from tests.support.refusals import refuse
from tests.support.tiny import TINY, tiny_config

SMALL = "tokenizer.vocab_size=500"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(interleaved, "INTERVAL", 0.05)


def measured(
    config, parts, manifest=None, *, tokenizer_folder="", as_json=False, seconds=0.1, megabytes=20.0, torch=""
):
    """Prints the measurements as the command does, and returns them."""
    args = argparse.Namespace(parts=parts, seconds=seconds, megabytes=megabytes, torch=torch, entry=Entry())
    found = command.measure(args, config, manifest, tokenizer_folder)
    show(*([json.dumps(found)] if as_json else interleaved.render(found)))
    return found


def cpu_seconds(pid: int) -> float:
    """Of a process, from /proc: user and system, in ticks of 10 ms."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def cells_of(printed: str, *columns: int) -> list[list[str]]:
    """Some columns of the lines that have them; two spaces at least stand between cells."""
    lines = (re.split(" {2,}", line) for line in printed.splitlines())
    return [[line[column] for column in columns] for line in lines if max(columns) < len(line)]


@pytest.mark.slow
def test_step_and_input(manifest, capsys):
    config = tiny_config("data.lanes=4", "tokenizer.vocab_size=5000", "data.global_batch=64")
    found = measured(config, ["step", "batches", "loop"], manifest, seconds=0.2)
    assert list(found) == ["step", "batches", "loop"]
    for rows in found.values():
        names = [name for name in rows if name != "ratios"]
        assert list(rows["ratios"]) == names[1:] and all(ratio > 0 for ratio in rows["ratios"].values())
        for name in names:
            assert rows[name]["tokens_per_second"] * rows[name]["milliseconds"] == pytest.approx(64 * 32 * 1e3)
    step = found["step"]
    assert step["mlm"]["mfu"] is None  # no peak is known of a CPU
    assert step["baseline"]["temporary_bytes"] > 1.5 * step["mlm"]["temporary_bytes"], (
        "every position's logits and one-hots"
    )
    printed = capsys.readouterr()
    for rows in found.values():
        for name, ratio in rows["ratios"].items():
            line = [interleaved.NAMES[name], f"{rows[name]['tokens_per_second']:,.0f}"]
            assert [*line, f"the first is {ratio:.3g} times as fast"] in cells_of(printed.out, 0, 1, -1)
    assert [["mlm", f"{step['mlm']['memory_bytes'] / 1e6:,.0f} MB"]] == cells_of(printed.out, 0, 4)[1:2]
    for words in ("step: compiling mlm", "step: measuring", "batches: measuring", "loop: measuring"):
        assert f"bench: {words}" in printed.err


def test_memory_is_the_state_and_what_the_step_makes():
    """Parameters and the two moments of AdamW, on each device, beside the temporaries."""
    config = tiny_config(SMALL)
    run = Pretraining.without_data(config)
    program, _ = steps.our_step(run, steps.random_rows(run))
    found = steps._memory(program)
    state = 3 * sum(leaf.nbytes for _, leaf in sharding.named_leaves(run.init().params))
    assert state < found["memory_bytes"] - found["temporary_bytes"] < 1.2 * state + 1e5


@pytest.mark.standard
def test_known_peak(monkeypatch, capsys):
    monkeypatch.setattr(steps.peaks, "peak_flops", lambda kind: 1e12)
    config = tiny_config(SMALL)
    found = steps.compare_steps(config, 0.1, "")
    per_token = Pretraining.without_data(config).flops_per_token(config.shards.length)
    for name in ("mlm", "baseline"):
        expected = found[name]["tokens_per_second"] * per_token / 8e12
        assert found[name]["mfu"] == pytest.approx(expected)
    show(*interleaved.render({"step": found}))
    heads, ours, theirs = (line.split() for line in capsys.readouterr().out.splitlines())
    row = found["mlm"]
    assert heads == ["step", "tokens/s", "ms", "MFU", "memory"]
    assert ours[:4] == ["mlm", f"{row['tokens_per_second']:,.0f}", f"{row['milliseconds']:,.1f}", f"{row['mfu']:.1%}"]
    assert theirs[-6:] == f"the first is {found['ratios']['baseline']:.3g} times as fast".split()[-6:]


def test_json_is_what_is_returned(capsys):
    found = measured(tiny_config(SMALL), ["step"], as_json=True)
    assert json.loads(capsys.readouterr().out) == found and set(found) == {"step"}


@pytest.mark.slow
def test_what_it_imports_for_a_step_needs_no_tensorflow():
    program = "import sys; sys.modules['tensorflow'] = None\nimport mlm.bench.steps, mlm.plan.plan, mlm.training.train"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(1), check=True)


@pytest.mark.slow
def test_step_needs_no_tensorflow(tmp_path):
    settings = [f"--config.{text}" for text in (*TINY, SMALL)]
    arguments = ["bench", "--config=configs/base.py", "--seconds=0.1", "--json", *settings]
    program = (
        f"import sys; sys.modules['tensorflow'] = None\nfrom mlm.__main__ import main; sys.exit(main({arguments}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["step"]) == {"mlm", "baseline", "ratios"}


@pytest.mark.slow
def test_shards(texts, tokenizer_folder, tmp_path, monkeypatch, capsys):
    """Of the first text of the corpus, by both; nothing is left behind."""
    write_jsonl(tmp_path / "texts.jsonl", texts)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(inputs.tempfile, "tempdir", str(tmp_path / "temporary"))
    write = inputs.shards.write

    def write_anew(*args, folder, **settings):
        assert not pathlib.Path(folder).exists(), "what is there would not be written"
        return write(*args, folder=folder, **settings)

    monkeypatch.setattr(inputs.shards, "write", write_anew)
    config = tiny_config(f"corpus.sources=jsonl:{tmp_path}/texts.jsonl", "shards.count=4", "data.lanes=4")
    settings = {"seconds": 0.0, "tokenizer_folder": tokenizer_folder, "megabytes": 0.2}
    found = measured(config, ["shards"], **settings)["shards"]
    ours, example = found["mlm"], found["tf_tpu_example"]
    fast = inputs.shards.tokenizer.load_fast(tokenizer_folder)
    assert found["tokens"] == sum(len(fast.encode(text).ids) for text in inputs.sample_texts(config, 0.2))
    assert 0 <= found["tokens"] - ours["rows"] * 32 < 6 * 32, "of each shard less than a row is lost"
    assert 0.9 * ours["rows"] < example["rows"] <= ours["rows"]
    for row in (ours, example):
        assert row["tokens_per_second"] * row["milliseconds"] == pytest.approx(found["tokens"] * 1e3)
    assert not list((tmp_path / "temporary").iterdir())
    printed = capsys.readouterr().out
    assert printed.startswith("shards ") and f"{example['tokens_per_second']:,.0f}" in printed
    assert f"{found['ratios']['tf_tpu_example']:.3g} times" in printed


@pytest.mark.standard
def test_sample_is_of_training_documents(texts, tmp_path):
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    config = tiny_config(f"corpus.sources={source}", "corpus.validation_fraction=0.1")
    found = inputs.sample_texts(config, 0.05)
    assert sum(map(len, found[:-1])) < 50_000 <= sum(map(len, found))
    own = Corpus(**config.corpus.to_dict())
    assert {own.split_of(part, "", text_hash(text)) for part in own.parts() for text in found} == {"train"}
    assert set(found) <= set(texts) and len(set(found)) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("generation", [4, 5])
def test_torch(generation, capsys, monkeypatch):
    monkeypatch.setattr(steps.peaks, "peak_flops", lambda kind: 1e12)  # of jax's devices, not of PyTorch's
    config = tiny_config(SMALL, "model.hidden_dropout=0.1", "model.dtype=bfloat16")
    python = torch_python(generation)
    found = measured(config, ["step"], torch=python)["step"]
    row = found["torch"]
    assert row["transformers"].startswith(f"{generation}.") and row["device"] == "cpu"
    assert row["dtype"] == "float32", "bfloat16 is for CUDA"
    assert row["tokens_per_second"] * row["milliseconds"] == pytest.approx(16 * 32 * 1e3)
    assert row["mfu"] is None and found["mlm"]["mfu"]
    assert set(found["ratios"]) == {"baseline", "torch"}
    printed = capsys.readouterr()
    assert ["run_mlm.py (PyTorch)", f"{row['tokens_per_second']:,.0f}"] in cells_of(printed.out, 0, 1)
    assert f"{found['ratios']['torch']:.3g} times" in printed.out and f"PyTorch {row['torch']}" in printed.out
    assert "starting PyTorch" in printed.err


@pytest.mark.slow
def test_torch_waits_without_work():
    """It makes the steps that it is asked for, and uses no CPU while others are timed."""
    run = Pretraining.without_data(tiny_config(SMALL))
    with contextlib.closing(steps.start_torch(torch_python(4), run)) as worker:
        for calls, steps_so_far in ((1, 1), (3, 4), (2, 6)):
            worker.repeat(calls)
            assert worker.answer["steps"] == steps_so_far
        time.sleep(0.2)
        before = cpu_seconds(worker._process.pid)
        time.sleep(1.0)
        assert cpu_seconds(worker._process.pid) - before < 0.05
        worker.repeat(1)
        assert cpu_seconds(worker._process.pid) > before, "the clock stands still: the test is empty"
    assert worker._process.returncode == 0


@pytest.mark.standard
def test_interpreter_without_torch():
    with pytest.raises(InputError, match=r"--torch=.*: install torch, transformers and accelerate in this Python \("):
        measured(tiny_config(SMALL), ["step"], torch=sys.executable)


def test_torch_is_for_the_step(capsys):
    arguments = ["bench", "--config=configs/base.py", "--parts", "loop", f"--torch={sys.executable}"]
    refuse(arguments, 2, "--torch needs --parts step or --parts quality.", capsys=capsys)


def test_shards_need_text(capsys):
    arguments = ["bench", "--config=configs/base.py", "--parts", "shards", "--megabytes=0"]
    refuse(arguments, 2, "--megabytes=0: must be a number above 0.", capsys=capsys)
