"""Averages of checkpoints: numpy's mean to the bit, in a workdir that every command takes, and what has no mean."""

import html
import pathlib
import shutil

import numpy as np
import pytest
from transformers import ModernBertConfig

from mlm import __main__
from mlm.pretrained import checkpoint_files
from mlm.workdir import Workdir
from tests.support.refusals import refuse, snapshot
from tests.support.states import edit_meta, state_of
from tests.training.toy import run


def average(*arguments: object) -> int:
    return __main__.main(["average", *map(str, arguments)])


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


@pytest.fixture
def other(toys, tmp_path) -> Workdir:
    return Workdir(str(shutil.copytree(toys.root, tmp_path / "other")))


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
    arguments = [text.replace("ROOT", str(toys.root)) for text in arguments]
    assert average(*arguments, f"--workdir={new}") == 0
    parts = [averages_of(toys.root, step) for step in steps]
    found = averages_of(new, steps[-1])
    assert found.keys() == parts[0].keys() == state_of(new, steps[-1]).keys() and len(found) == 4
    for name, value in found.items():
        values = [part[name] for part in parts]
        mean = np.average(np.float64(values), axis=0, weights=weights)
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-8, err_msg=name)
        if set(weights) == {1}:
            np.testing.assert_array_equal(value, np.mean(values, axis=0))
    meta = checkpoint_files.read_meta(Workdir(str(new)).checkpoints, steps[-1])
    assert meta["averaged"] == [
        {"checkpoint": f"{toys.root}@{step}", "weight": weight}
        for step, weight in zip(steps, weights, strict=True)
    ]
    assert meta["config"].shards.dir == str(toys.root / "shards") and meta["milestones"] == []


def test_what_has_no_mean_is_one_sentence(toys, other, tmp_path, capsys):
    """And a damaged checkpoint is named; nothing goes on from a mean."""
    root = toys.root
    new = f"--workdir={tmp_path / 'new'}"
    mean = tmp_path / "mean"
    assert average(f"{root}@4..12", f"--workdir={mean}") == 0
    for arguments, *words in (
        ([f"{root}@13..20", new], f"{root}@13..20 names none."),
        ([root, f"{root}/../{root.name}@12", new], f"names {root}@12, {root}@12."),
        ([f"{root}@5", new], "step 5; those that are there: 4, 8, 12."),
        ([f"{root}@4-12", new], f"{root}@4-12: is not a workdir"),
        ([root, "--last=4", new], f"--last=4: {root} ", "it has 3."),
        ([f"{root}@4..12", "--decay=1.5", new], "--decay=1.5: "),
        ([root, other.root, "--decay=0.5", new], "--decay=0.5: "),
        ([f"{root}@4..12", "--config.train.steps=3", new], "--config.KEY"),
        ([f"{root}@4..12", f"--workdir={mean}"], f"--workdir={mean}: holds something already"),
    ):
        refuse(["average", *map(str, arguments)], 2, *words, capsys=capsys)
    assert not (tmp_path / "new" / "checkpoints").exists()
    file = next((other.checkpoints / "8").rglob("state/d/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    damaged = ["average", f"{other.root}@4..12", new]
    refuse(damaged, 4, "checkpoints/8: the file", capsys=capsys)
    before = snapshot(mean)
    command = ["train", "--config=configs/base.py", f"--workdir={mean}"]
    command.append(f"--config.shards.dir={tmp_path}")
    refuse(command, 2, f"--workdir={mean}: holds an average", capsys=capsys)
    assert snapshot(mean) == before


@pytest.mark.parametrize(
    ("dataset", "key"),
    [
        ({"vocab_size": 17}, "vocabulary"),
        ({"labels": ["a"]}, "labels"),
        ({"model": {"max_position_embeddings": 7}}, "max_position_embeddings"),
        ({"model": {"hidden_act": "relu"}}, "hidden_act"),
        ({"model": ModernBertConfig().to_dict()}, "model_type"),
    ],
)
def test_another_model_has_no_mean_with_it(toys, other, tmp_path, capsys, dataset, key):
    """Another vocabulary, set of labels, tokenizer or size; which one is said, and of which checkpoint."""
    old = checkpoint_files.read_meta(other.checkpoints, 12)["dataset"]
    dataset |= {"model": old["model"] | dataset.get("model", {})}
    edit_meta(other.checkpoints, 12, dataset=old | dataset)
    names = (f"{toys.root}@8..12", f"{other.root}@12")
    command = ["average", *names, f"--workdir={tmp_path / 'new'}"]
    refuse(command, 2, f"mlm average: {toys.root}@8: its {key} (", names[1], capsys=capsys)


def test_two_classes_of_one_file_have_no_mean(toys, other, tmp_path, capsys):
    """Their code, the hash of the file, is the same."""
    record = {"overrides": ["make_model"], "file": "changes.py", "code": "1" * 64, "commit": ""}
    edit_meta(other.checkpoints, 8, **{"class": record | {"name": "changes.Deep"}})
    edit_meta(other.checkpoints, 12, **{"class": record | {"name": "changes.Wide"}})
    command = ["average", f"{other.root}@8..12", f"--workdir={tmp_path / 'new'}"]
    refuse(command, 2, "its class (", "changes.Deep", "changes.Wide", capsys=capsys)


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_it_is_scored_and_exported_as_a_run_is(family, tmp_path):
    mean = tmp_path / "mean"
    assert average(f"{family.root}@4..12", f"--workdir={mean}") == 0
    assert __main__.main(["evaluate", f"--workdir={mean}"]) == 0
    assert __main__.main(["export", f"--workdir={mean}"]) == 0
    card = html.unescape((mean / "export" / "README.md").read_text())
    assert "the mean of run@4 (weight 1), run@8 (weight 1), run@12 (weight 1)" in card
