"""WORKDIR@STEP and --step: the same model in every command, and a sentence with the steps that are there."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from mlm import __main__
from mlm.errors import DamageError, InputError
from mlm.pretrained import load, locate
from mlm.workdir import Workdir
from tests.support.labelled_texts import SETTINGS, rows, write_csv

pytestmark = pytest.mark.usefixtures("one_device")


def refused(capsys, *arguments: str, code: int = 2) -> str:
    capsys.readouterr()
    assert __main__.main(list(arguments)) == code
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.standard
def test_a_step_by_its_name(family):
    newest = load.load(str(family.root), head=load.LM_HEAD)
    models = {step: load.load(f"{family.root}@{step}", head=load.LM_HEAD) for step in (4, 8, 12)}
    for step, found in models.items():
        assert (found.step, found.tokenizer) == (step, str(family.tokenizer)) and found.source.endswith(f"@{step}")
        assert found.leaves.keys() == newest.leaves.keys()
        same = all(np.array_equal(value, newest.leaves[name]) for name, value in found.leaves.items())
        assert same == (step == 12), f"step {step}"
    assert locate.is_workdir(f"{family.root}@4") and not locate.is_classifier(f"{family.root}@4")


def test_a_step_that_is_not_there(family):
    name = f"{family.root}@7"
    sentence = f"--model={name}: there is no complete checkpoint of step 7; those that are there: 4, 8, 12."
    with pytest.raises(InputError) as error:
        load.load(name, head=load.LM_HEAD)
    assert str(error.value) == sentence
    with pytest.raises(InputError, match="is not a folder here"):
        load.load(f"{family.root}@last", head=load.LM_HEAD)


def test_a_named_step_is_verified(family, tmp_path):
    workdir = Workdir(shutil.copytree(str(family.root), tmp_path / "run"))
    file = next((workdir.checkpoints / "4").rglob("state/d/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamageError, match=r"checkpoints/4: the file .* is not what was written.*name another step"):
        load.load(f"{workdir.root}@4", head=load.LM_HEAD)
    assert load.load(f"{workdir.root}@8", head=load.LM_HEAD).step == 8


def test_a_folder_with_an_at_in_its_name_is_itself(family, tmp_path):
    shutil.copytree(str(family.root), tmp_path / "run")
    shutil.copytree(str(family.root), tmp_path / "run@4")
    assert load.load(str(tmp_path / "run@4"), head=load.LM_HEAD).step == 12
    assert load.load(str(tmp_path / "run@4@4"), head=load.LM_HEAD).step == 4


@pytest.mark.standard
def test_predict_and_export_take_a_step(family, tmp_path, capsys):
    workdir = Workdir(shutil.copytree(str(family.root), tmp_path / "run"))
    shown = []
    for flags in (
        [f"--workdir={workdir.root}", "--step=4"],
        [f"--model={workdir.root}@4"],
        [f"--workdir={workdir.root}"],
    ):
        capsys.readouterr()
        assert __main__.main(["predict", *flags, "Returns the <mask> of the array."]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    assert __main__.main(["export", f"--workdir={workdir.root}", "--step=4"]) == 0
    assert not pathlib.Path(str(workdir.export)).exists()
    exported = load.load(str(workdir.root / "export-4"), head=load.LM_HEAD)
    wanted = load.load(f"{workdir.root}@4", head=load.LM_HEAD)
    assert all(np.array_equal(value, wanted.leaves[name]) for name, value in exported.leaves.items())
    for command in ("predict", "export"):
        line = refused(capsys, command, f"--workdir={workdir.root}", "--step=5")
        assert line.endswith("there is no complete checkpoint of step 5; those that are there: 4, 8, 12.")
    line = refused(capsys, "predict", f"--workdir={workdir.root}", f"--model={workdir.root}/export-4", "--step=4")
    assert line == f"mlm predict: --step=4: needs a workdir with checkpoints; {workdir.root}/export-4 is none."


def test_evaluate_takes_a_step(family, tmp_path, capsys):
    workdir = Workdir(shutil.copytree(str(family.root), tmp_path / "run"))
    logged = {line["step"]: line["loss"] for line in map(json.loads, workdir.metrics.read_text().splitlines())}
    assert __main__.main(["evaluate", f"--workdir={workdir.root}", "--step=8"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(logged[8], rel=1e-5)
    (entry,) = json.loads((workdir.root / "evaluation.json").read_text())
    assert "step 8" in entry


@pytest.mark.standard
def test_classify_starts_from_a_step(family, tmp_path, capsys):
    source = write_csv(tmp_path / "rows.csv", rows(40))
    overrides = (*SETTINGS, f"classify.train={source}", f"classify.validation={source}", "train.epochs=1")
    overrides = (*overrides, "optimizer.learning_rate=1e-12", f"train.init_from={family.root}")
    flags = ["--config=configs/base.py", *(f"--config.{key}" for key in overrides)]
    assert __main__.main(["classify", *flags, f"--workdir={tmp_path / 'run'}", "--step=4"]) == 0
    found, start = (load.load(name, head=None) for name in (str(tmp_path / "run"), f"{family.root}@4"))
    assert found.run_config.train.init_from == f"{family.root}@4"
    for name, value in start.leaves.items():
        if name.startswith("roberta/encoder"):
            np.testing.assert_allclose(found.leaves[name], value, atol=1e-8, err_msg=name)
    line = refused(capsys, "classify", *flags, f"--workdir={tmp_path / 'other'}", "--step=5")
    assert line.endswith("there is no complete checkpoint of step 5; those that are there: 4, 8, 12.")
