"""Bad input: one sentence that names the culprit, the right exit code, soon, and nothing that was there is lost."""

import fcntl
import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from mlm import __main__
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from tests.support.processes import seconds_of_children, start, train_arguments
from tests.support.refusals import foreign, refuse
from tests.support.tiny import command, flags


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --config=configs/none.py", "configs/none.py: no such file"),
        ("train --workdir=requirements.txt/below", "requirements.txt/below: can't be written"),
        ("doctor --rows=0", "--rows"),
        ("evaluate --draws=0", "--draws"),
        ("evaluate --draws=-1", "--draws"),
        ("evaluate --split=test --pairs=jsonl:pairs.jsonl", "--split"),
    ],
)
def test_a_flag_that_is_refused(tmp_path, capsys, line, words):
    name, *more = line.split()
    refuse([*command(name, tmp_path), *more], 2, *words.split(": "), capsys=capsys)


@pytest.mark.standard
def test_a_config_is_refused_in_three_seconds(tmp_path):
    line = command("train", tmp_path / "run", "shards.dir=/nowhere/shards")
    before = seconds_of_children()
    process = start(line, devices=1, program="-X importtime -m mlm")
    _, error = process.communicate()
    seconds = seconds_of_children() - before
    (sentence,) = (line for line in error.splitlines() if not line.startswith("import time:"))
    assert process.returncode == 2 and sentence.startswith("mlm train: ")
    assert "/nowhere/shards: holds no shards" in sentence
    assert not re.search(r"\| +(jax|tensorflow)$", error, re.MULTILINE), "it was imported"
    assert seconds < 3, f"{seconds:.1f} s"


@pytest.fixture
def shards(manifest, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(manifest.folder, tmp_path / "shards"))


def test_a_hostile_manifest_ends_every_command_in_a_sentence(shards, tmp_path, capsys):
    content = json.loads((shards / "manifest.json").read_text())
    words = "'/etc/hostname' is not train/dataset-"
    content["splits"]["train"]["shards"][0]["file"] = "/etc/hostname"
    (shards / "manifest.json").write_text(json.dumps(content))
    _, *arguments = train_arguments(tmp_path, str(shards))
    for name in ("train", "evaluate"):
        refuse([name, *arguments], 4, "manifest.json: ", words, capsys=capsys)
    assert __main__.main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().out


def test_shards_that_do_not_fit(shards, tmp_path, capsys):
    arguments = train_arguments(tmp_path / "run", str(shards))
    wide = flags("data.lanes=8", "shards.count=16")
    refuse([*arguments, *wide], 2, "6 shards", "data.lanes = 8 asks for 8", capsys=capsys)
    shutil.rmtree(shards / "validation")
    content = json.loads((shards / "manifest.json").read_text())
    content["splits"]["validation"]["shards"] = []
    (shards / "manifest.json").write_text(json.dumps(content))
    refuse(arguments, 2, "validation split has 0 shards", capsys=capsys)


def test_a_kernel_that_can_not_compute_the_model(tokenizer_folder, tmp_path, capsys, monkeypatch):
    """Before anything compiles; of shards without a manifest."""
    monkeypatch.delattr(Pretraining, "initial_state")
    ids = np.random.default_rng(0).integers(5, 600, (64, 32))
    foreign(tmp_path / "shards", train=ids, validation=ids)
    shutil.copytree(tokenizer_folder, tmp_path / "run" / "tokenizer")
    arguments = train_arguments(tmp_path / "run", str(tmp_path / "shards"), "model.attention=fused")
    refuse(arguments, 2, "model.attention = fused", "rows of 32 tokens", capsys=capsys)


def test_two_runs_in_one_workdir(manifest, tmp_path, capsys):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = train_arguments(tmp_path, manifest.folder)
        refuse(line, 2, str(tmp_path), "another process", capsys=capsys)


def test_guard_stops_with_code_3(manifest, tmp_path, capsys):
    settings = ("optimizer.learning_rate=1e30", "train.steps=40", "checkpoint.every=0")
    line = train_arguments(tmp_path, manifest.folder, *settings)
    refuse(line, 3, "steps in a row were not finite", capsys=capsys)
    assert checkpoint_files.complete_steps(tmp_path / "checkpoints") == []


@pytest.mark.standard
def test_terminated_before_the_first_step(manifest, tmp_path):
    process = start(train_arguments(tmp_path, manifest.folder))
    while not (tmp_path / ".lock").exists():  # the data has been checked, jax is being imported
        assert process.poll() is None
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "before it trained a step" in err
