"""Averages of checkpoints: numpy's mean to the bit, in a workdir that every command takes, and what has no mean."""

import html
import json
import pathlib
import shutil

import numpy as np
import pytest
from transformers import ModernBertConfig

from mlm import __main__
from mlm.pretrained import checkpoint_files
from mlm.workdir import Workdir
from tests.support.states import state_of
from tests.training.toy import run


def average(*arguments: object) -> int:
    return __main__.main(["average", *map(str, arguments)])


def refused(capsys, *arguments: object, code: int = 2) -> str:
    capsys.readouterr()
    assert __main__.main([*map(str, arguments)]) == code
    return capsys.readouterr().err.strip().splitlines()[-1]


def averages_of(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    state = state_of(workdir, step)
    return {name: value for name, value in state.items() if name.startswith("['ema']")}


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Workdir:
    """A run of twelve steps, with checkpoints 4, 8 and 12."""
    return run(
        tmp_path_factory.mktemp("toys"),
        "checkpoint.every=4",
        "checkpoint.keep=9",
        "optimizer.ema_decay=0.5",
    )


@pytest.mark.parametrize(
    ("arguments", "steps", "weights"),
    [
        (["ROOT@4..12"], (4, 8, 12), (1, 1, 1)),
        (["ROOT@5..12"], (8, 12), (1, 1)),
        (["ROOT", "--last=2"], (8, 12), (1, 1)),
        (["ROOT@12", "ROOT@4..8", "--decay=0.5"], (4, 8, 12), (0.25, 0.5, 1)),
    ],
)
def test_it_is_the_mean_of_numpy(toys, tmp_path, arguments, steps, weights):
    """Of what is evaluated, the averages over steps; the rest is that of the newest checkpoint, whose weight is 1."""
    new = tmp_path / "mean"
    assert (
        average(*(text.replace("ROOT", str(toys.root)) for text in arguments), f"--workdir={new}")
        == 0
    )
    parts = [averages_of(toys.root, step) for step in steps]
    found = averages_of(new, steps[-1])
    assert found.keys() == parts[0].keys() and len(found) == 4
    assert state_of(new, steps[-1]).keys() == found.keys()
    for name, value in found.items():
        assert value.dtype == np.float32
        wanted = np.average(np.float64([part[name] for part in parts]), axis=0, weights=weights)
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-8, err_msg=name)
        if set(weights) == {1}:
            np.testing.assert_array_equal(value, np.mean([part[name] for part in parts], axis=0))
    meta = checkpoint_files.read_meta(Workdir(str(new)).checkpoints, steps[-1])
    pairs = zip(steps, weights, strict=True)
    assert meta["averaged"] == [
        {"checkpoint": f"{toys.root}@{step}", "weight": weight} for step, weight in pairs
    ]
    assert meta["config"].shards.dir == str(toys.root / "shards") and meta["milestones"] == []


def test_what_has_no_mean_is_one_sentence(toys, tmp_path, capsys):
    """And a damaged checkpoint is named; nothing goes on from a mean."""
    root = toys.root
    new = f"--workdir={tmp_path / 'new'}"
    mean = tmp_path / "mean"
    assert average(f"{root}@4..12", f"--workdir={mean}") == 0
    other = shutil.copytree(root, tmp_path / "other")
    for arguments, words in (
        ([f"{root}@13..20", new], f"{root}@13..20 names none."),
        ([root, f"{root}/../{root.name}@12", new], f"names {root}@12, {root}@12."),
        ([f"{root}@5", new], "step 5; those that are there: 4, 8, 12."),
        ([f"{root}@4-12", new], f"{root}@4-12: is not a workdir"),
        ([root, "--last=4", new], f"--last=4: {root} .* it has 3."),
        ([f"{root}@4..12", "--decay=1.5", new], "--decay=1.5: "),
        ([root, other, "--decay=0.5", new], "--decay=0.5: "),
        ([f"{root}@4..12", "--config.train.steps=3", new], "--config.KEY"),
        ([f"{root}@4..12", f"--workdir={mean}"], f"--workdir={mean}: holds something already"),
    ):
        line = refused(capsys, "average", *arguments)
        assert all(word in line for word in words.split(" .* ")), (arguments, line)
    assert not (tmp_path / "new" / "checkpoints").exists()
    file = next((other / "checkpoints" / "8").rglob("state/d/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "checkpoints/8: the file" in refused(capsys, "average", f"{other}@4..12", new, code=4)
    flags = ["--config=configs/base.py", f"--workdir={mean}", f"--config.shards.dir={tmp_path}"]
    before = sorted(path.name for path in mean.iterdir())
    assert f"--workdir={mean}: holds an average" in refused(capsys, "train", *flags)
    assert sorted(path.name for path in mean.iterdir()) == before


def test_another_model_has_no_mean_with_it(toys, tmp_path, capsys):
    """Another vocabulary, set of labels, tokenizer or size; which one is said, and of which checkpoint."""
    other = Workdir(str(shutil.copytree(toys.root, tmp_path / "other")))
    file = other.checkpoints / "12" / "meta" / "metadata"
    text = file.read_text()
    meta = json.loads(text)
    model = meta["dataset"]["model"]
    for dataset, key in (
        ({"vocab_size": 17}, "vocabulary"),
        ({"labels": ["a"]}, "labels"),
        ({"model": model | {"max_position_embeddings": 7}}, "max_position_embeddings"),
        ({"model": model | {"hidden_act": "relu"}}, "hidden_act"),
        ({"model": ModernBertConfig().to_dict()}, "model_type"),
    ):
        file.write_text(json.dumps(meta | {"dataset": meta["dataset"] | dataset}))
        checkpoint_files.write_hashes(other.checkpoints, 12)
        line = refused(
            capsys,
            "average",
            f"{toys.root}@8..12",
            f"{other.root}@12",
            f"--workdir={tmp_path / 'new'}",
        )
        assert (
            line.startswith(f"mlm average: {toys.root}@8: its {key} (")
            and f"{other.root}@12" in line
        )


def test_two_classes_of_one_file_have_no_mean(toys, tmp_path, capsys):
    """Their code, the hash of the file, is the same."""
    record = {"overrides": ["make_model"], "file": "changes.py", "code": "1" * 64, "commit": ""}
    for name in ("changes.Deep", "changes.Wide"):
        checkpoints = Workdir(str(shutil.copytree(toys.root, tmp_path / name))).checkpoints
        file = checkpoints / "12" / "meta" / "metadata"
        meta = json.loads(file.read_text())
        file.write_text(json.dumps(meta | {"class": record | {"name": name}}))
        checkpoint_files.write_hashes(checkpoints, 12)
    names = [f"{tmp_path / name}@12" for name in ("changes.Deep", "changes.Wide")]
    line = refused(capsys, "average", *names, f"--workdir={tmp_path / 'new'}")
    assert "its class (" in line and "changes.Deep" in line and "changes.Wide" in line


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_it_is_scored_and_exported_as_a_run_is(family, tmp_path):
    mean = tmp_path / "mean"
    assert average(f"{family.root}@4..12", f"--workdir={mean}") == 0
    assert __main__.main(["evaluate", f"--workdir={mean}"]) == 0
    assert __main__.main(["export", f"--workdir={mean}"]) == 0
    card = html.unescape((mean / "export" / "README.md").read_text())
    assert "the mean of run@4 (weight 1), run@8 (weight 1), run@12 (weight 1)" in card
