"""Averages of checkpoints: numpy's mean to the bit, in a workdir that every command takes, and what has no mean."""

import copy
import html
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
from transformers import ModernBertConfig

from mlm import __main__
from mlm.pretrained import checkpoint_files, load
from mlm.training import average as mean_of
from mlm.workdir import Workdir
from tests.support.labelled_texts import SETTINGS, rows, write_csv

pytestmark = pytest.mark.usefixtures("one_device")


def average(*arguments: object) -> int:
    return __main__.main(["average", *map(str, arguments)])


def refused(capsys, *arguments: object, code: int = 2) -> str:
    capsys.readouterr()
    assert __main__.main([*map(str, arguments)]) == code
    return capsys.readouterr().err.strip().splitlines()[-1]


def leaves(name: object) -> dict[str, np.ndarray]:
    return load.load(str(name), head=None).leaves


@pytest.fixture(scope="module")
def mean(family, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("average") / "mean"
    assert average(f"{family.root}@4..12", f"--workdir={folder}") == 0
    return folder


@pytest.mark.standard
def test_it_is_the_mean_of_numpy(family, mean):
    parts = [leaves(f"{family.root}@{step}") for step in (4, 8, 12)]
    found = leaves(mean)
    assert found.keys() == parts[0].keys()
    for name, value in found.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, np.mean([part[name] for part in parts], axis=0), err_msg=name)
    name = "roberta/embeddings/word_embeddings/embedding"
    assert not np.array_equal(found[name], parts[1][name])
    meta = checkpoint_files.read_meta(Workdir(str(mean)).checkpoints, 12)
    assert meta["averaged"] == [{"checkpoint": f"{family.root}@{step}", "weight": 1.0} for step in (4, 8, 12)]
    assert checkpoint_files.find_damage(Workdir(str(mean)).checkpoints, 12) is None


def test_any_letters_and_links_in_the_paths(family, mean, tmp_path, capsys):
    """Of a run whose files are links, and of the mean; as the model of `predict`, too."""
    run, new = tmp_path / "a [1] *?{x}@5 #é", tmp_path / "mean[2]@1"
    shutil.copytree(str(family.root), run, copy_function=os.symlink)
    assert average(f"{run}@4..12", f"--workdir={new}") == 0
    expected = leaves(mean)
    for name, value in leaves(f"{new}@12").items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    for model in (f"{run}@8", str(run), str(new)):
        assert __main__.main(["predict", f"--model={model}", "a <mask>"]) == 0
    assert capsys.readouterr().out.count("%") >= 3


@pytest.mark.parametrize(
    ("arguments", "steps", "weights"),
    [
        (["@4,12"], (4, 12), (1, 1)),
        (["@5..12"], (8, 12), (1, 1)),
        (["", "--last=2"], (8, 12), (1, 1)),
        (["@12,4,8", "--decay=0.5"], (4, 8, 12), (0.25, 0.5, 1)),
    ],
)
def test_checkpoints_and_weights_by_name(family, tmp_path, arguments, steps, weights):
    assert average(f"{family.root}{arguments[0]}", *arguments[1:], f"--workdir={tmp_path / 'mean'}") == 0
    parts, found = [leaves(f"{family.root}@{step}") for step in steps], leaves(tmp_path / "mean")
    for name, value in found.items():
        wanted = np.average([part[name] for part in parts], axis=0, weights=weights)
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.standard
def test_every_command_takes_it(mean, tmp_path, capsys):
    copy = shutil.copytree(mean, tmp_path / "mean")
    capsys.readouterr()
    assert __main__.main(["evaluate", f"--workdir={copy}"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert __main__.main(["export", f"--workdir={copy}"]) == 0
    card = html.unescape((copy / "export" / "README.md").read_text())
    assert "the mean of run@4 (weight 1), run@8 (weight 1), run@12 (weight 1)" in card
    for name in (f"--model={copy}", f"--model={copy}@12", f"--model={copy}/export"):
        capsys.readouterr()
        assert __main__.main(["predict", name, "Returns the <mask> of the array."]) == 0
        assert "<mask>" not in capsys.readouterr().out.splitlines()[-1]
    assert __main__.main(["evaluate", f"--workdir={copy}", f"--model={copy}/export"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] == pytest.approx(scores["loss"], rel=1e-5)


def test_nothing_goes_on_from_it(mean, family, capsys):
    flags = ["--config=configs/base.py", f"--workdir={mean}", f"--config.shards.dir={family.shards}"]
    before = sorted(path.name for path in mean.iterdir())
    for command in ("train", "run", "shards"):
        line = refused(capsys, command, *flags)
        assert f"--workdir={mean}: holds an average of checkpoints, which can't be trained further; start" in line
    assert sorted(path.name for path in mean.iterdir()) == before


@pytest.mark.slow
def test_averages_of_classifiers(family, tmp_path, capsys):
    """Of two fine-tunings, a soup; and what differs between two of them has no mean."""
    source = write_csv(tmp_path / "rows.csv", rows(40))
    others = write_csv(tmp_path / "others.csv", [row | {"label": row["label"] + "s"} for row in rows(40)])
    for name, table, seed in (("one", source, 0), ("two", source, 1), ("other", others, 0)):
        keys = (*SETTINGS, f"classify.train={table}", f"classify.validation={table}", "train.epochs=1")
        keys = (*keys, f"train.init_from={family.root}@4", f"train.seed={seed}")
        flags = ["--config=configs/base.py", *(f"--config.{key}" for key in keys)]
        assert __main__.main(["classify", *flags, f"--workdir={tmp_path / name}"]) == 0
    assert average(tmp_path / "one", tmp_path / "two", f"--workdir={tmp_path / 'soup'}") == 0
    parts, found = [leaves(tmp_path / name) for name in ("one", "two")], leaves(tmp_path / "soup")
    for name, value in found.items():
        np.testing.assert_array_equal(value, np.mean([part[name] for part in parts], axis=0), err_msg=name)
    capsys.readouterr()
    assert __main__.main(["evaluate", f"--workdir={tmp_path / 'soup'}"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 40
    line = refused(capsys, "average", tmp_path / "other", tmp_path / "one", f"--workdir={tmp_path / 'new'}")
    assert "other@" in line and "its labels (['animals', 'moneys', 'weathers']) differs from that of" in line
    line = refused(capsys, "average", family.root, tmp_path / "one", f"--workdir={tmp_path / 'new'}")
    assert "its labels (None) differs from that of" in line
    line = refused(
        capsys, "average", tmp_path / "one", tmp_path / "two", "--decay=0.5", f"--workdir={tmp_path / 'new'}"
    )
    assert line == "mlm average: --decay=0.5: is for checkpoints of one workdir."
    assert not (tmp_path / "new" / "checkpoints").exists()


def test_another_model_has_no_mean_with_it(family, trained_workdir, tmp_path, capsys):
    line = refused(capsys, "average", family.root, trained_workdir.root, f"--workdir={tmp_path / 'new'}")
    assert f"{family.root}@12: its vocabulary (600) differs from that of {trained_workdir.root}@5 (1000); only" in line


def test_models_of_other_sizes_are_told_apart(family):
    meta = checkpoint_files.read_meta(family.checkpoints, 12)
    modern = copy.deepcopy(meta)
    modern["dataset"]["model"] = ModernBertConfig().to_dict()
    roberta = (("hidden_size", 48), ("num_hidden_layers", 7), ("hidden_act", "relu"), ("max_position_embeddings", 82))
    cases = [(meta, *each) for each in roberta] + [(modern, "global_rope_theta", 10_000.0)]
    for meta, key, value in cases:
        same, other = (mean_of._architecture(family, copy.deepcopy(meta)) for _ in range(2))
        assert same == other and "model_type" in same and "" not in same
        changed = copy.deepcopy(meta)
        changed["dataset"]["model"][key] = value
        other = mean_of._architecture(family, changed)
        assert {name for name in same if same[name] != other[name]} == {key}


def test_bad_names_are_one_sentence(family, mean, tmp_path, capsys):
    root, new = family.root, f"--workdir={tmp_path / 'new'}"
    for arguments, words in (
        ([f"{root}@12", new], f"takes two checkpoints or more, each once; {root}@12 names {root}@12."),
        ([f"{root}@13..20", new], f"{root}@13..20 names none."),
        ([f"{root}@4,4", new], f"names {root}@4, {root}@4."),
        ([root, f"{root}@12", new], "takes two checkpoints or more, each once"),
        ([f"{root}@4,5", new], "there is no complete checkpoint of step 5; those that are there: 4, 8, 12."),
        ([f"{root}@4-12", new], f"{root}@4-12: is not a workdir with checkpoints; name WORKDIR@A..B"),
        (["/no/such", new], "/no/such: is not a workdir with checkpoints"),
        ([root, "--last=4", new], f"--last=4: {root} must be a workdir with so many checkpoints; it has 3."),
        ([f"{root}@4..12", "--decay=0", new], "--decay=0.0: must be a number above 0, and 1 at most."),
        ([f"{root}@4..12", "--last=-1", new], "--last=-1: must not be negative"),
        ([f"{root}@4..12", "--config.train.steps=3", new], "takes no --config.KEY"),
        ([f"{root}@4..12", f"--workdir={mean}"], f"--workdir={mean}: holds something already; name a new folder."),
        ([f"{root}@4..12"], "--workdir: name the folder"),
    ):
        assert words in refused(capsys, "average", *arguments), arguments
    assert not (tmp_path / "new" / "checkpoints").exists()


def test_a_damaged_checkpoint_is_named(family, tmp_path, capsys):
    workdir = Workdir(shutil.copytree(str(family.root), tmp_path / "run"))
    file = next((workdir.checkpoints / "8").rglob("state/d/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    line = refused(capsys, "average", f"{workdir.root}@4..12", f"--workdir={tmp_path / 'new'}", code=4)
    assert "checkpoints/8: the file" in line
