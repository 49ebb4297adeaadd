"""WORKDIR@STEP and --step: the same model in every command, and a sentence with the steps that are there."""

import argparse
import shutil

import numpy as np
import pytest

from mlm import __main__, logs
from mlm.commands import common
from mlm.errors import DamageError, InputError
from mlm.export import export
from mlm.pretrained import load
from mlm.workdir import Workdir
from tests.support.refusals import refuse

pytestmark = [pytest.mark.standard, pytest.mark.usefixtures("one_device")]


def test_a_step_by_its_name(family, tmp_path):
    """It is verified; a folder with an at in its name is itself."""
    workdir = Workdir(shutil.copytree(str(family.root), tmp_path / "run@4"))
    root = workdir.root
    shutil.copytree(root, tmp_path / "run")
    newest = load.load(str(root), head=load.LM_HEAD)
    assert newest.step == 12
    for step in (4, 12):
        found = load.load(f"{root}@{step}", head=load.LM_HEAD)
        assert (found.step, found.source) == (step, f"{root}@{step}")
        bias = newest.leaves["lm_head/bias"]
        assert np.array_equal(found.leaves["lm_head/bias"], bias) == (step == 12)
    for name, words in (("7", ".*step 7; .*: 4, 8, 12"), ("last", "")):
        with pytest.raises(InputError, match=f"^--model={root}@{name}: {words}"):
            load.load(f"{root}@{name}", head=load.LM_HEAD)
    file = next((workdir.checkpoints / "4").rglob("state/d/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamageError, match=f"checkpoints/4: the file .*{file.name}"):
        load.load(f"{root}@4", head=load.LM_HEAD)


def test_commands_take_a_step(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export, "check_files", lambda *_: [])  # which the room of exports holds
    workdir = Workdir(shutil.copytree(str(family.root), tmp_path / "run"))
    name = f"--workdir={workdir.root}"
    shown = []
    for flags in ([name, "--step=4"], [f"--model={workdir.root}@4"], [name]):
        capsys.readouterr()
        assert __main__.main(["predict", *flags, "Returns the <mask> of the array."]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    losses = {line["step"]: line["loss"] for line in logs.read(workdir.metrics, "eval")}
    best = min((4, 8, 12), key=losses.get)
    assert __main__.main(["export", name, "--best", f"--to={tmp_path / 'best'}"]) == 0
    assert f"| steps | {best} of" in (tmp_path / "best" / "README.md").read_text()
    model = f"{tmp_path}/best"
    refuse(["predict", name, f"--model={model}", "--step=4"], 2, "--step=4: ", model, capsys=capsys)


def test_a_start_takes_a_step(family, tmp_path):
    args = argparse.Namespace(config="configs/base.py", workdir=str(tmp_path / "run"), step=4)
    config = common.read_config(args, [f"train.init_from={family.root}"], starts=True)
    assert config.train.init_from == f"{family.root}@4"
