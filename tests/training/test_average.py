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
from mlm.training import average as average_module
from mlm.workdir import Workdir
from tests.support.states import state_of
from tests.training.toy import run


def average(*arguments: object) -> int:
    return __main__.main(["average", *map(str, arguments)])


def refused(capsys, *arguments: object, code: int = 2) -> str:
    capsys.readouterr()
    assert __main__.main([*map(str, arguments)]) == code
    return capsys.readouterr().err.strip().splitlines()[-1]


def params_of(workdir: pathlib.Path, step: int, part: str = "params") -> dict[str, np.ndarray]:
    """A part of a checkpoint, by the names within it."""
    prefix = f"['{part}']"
    state = state_of(workdir, step)
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


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
        (["ROOT@12", "ROOT@8,4", "--decay=0.5"], (4, 8, 12), (0.25, 0.5, 1)),
    ],
)
def test_it_is_the_mean_of_numpy(toys, tmp_path, arguments, steps, weights):
    """Of what is evaluated, the averages over steps; the rest is that of the newest checkpoint, whose weight is 1."""
    new = tmp_path / "mean"
    assert (
        average(*(text.replace("ROOT", str(toys.root)) for text in arguments), f"--workdir={new}")
        == 0
    )
    parts = [params_of(toys.root, step, "ema") for step in steps]
    found = params_of(new, steps[-1], "ema")
    assert found.keys() == parts[0].keys() and len(found) == 4
    assert state_of(new, steps[-1]).keys() == {f"['ema']{name}" for name in found}
    for name, value in found.items():
        assert value.dtype == np.float32
        wanted = np.average(np.float64([part[name] for part in parts]), axis=0, weights=weights)
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-8, err_msg=name)
        if set(weights) == {1}:
            np.testing.assert_array_equal(
                value, np.mean([part[name] for part in parts], axis=0), err_msg=name
            )
    checkpoints = Workdir(str(new)).checkpoints
    meta, newest = (
        checkpoint_files.read_meta(where, steps[-1]) for where in (checkpoints, toys.checkpoints)
    )
    pairs = zip(steps, weights, strict=True)
    assert meta["averaged"] == [
        {"checkpoint": f"{toys.root}@{step}", "weight": weight} for step, weight in pairs
    ]
    assert meta["config"].shards.dir == str(toys.root / "shards") and meta["milestones"] == []
    assert meta["useful_flops"] == newest["useful_flops"]
    assert (
        json.loads((new / "config.json").read_text())["shards"]["dir"] == meta["config"].shards.dir
    )
    assert checkpoint_files.find_damage(checkpoints, steps[-1]) is None
    assert not (new / "tokenizer").exists(), "which the run lacks, too"


def test_what_has_no_mean_is_one_sentence(toys, tmp_path, capsys):
    """And a damaged checkpoint is named; nothing goes on from a mean."""
    root = toys.root
    new = f"--workdir={tmp_path / 'new'}"
    mean = tmp_path / "mean"
    assert average(f"{root}@4..12", f"--workdir={mean}") == 0
    other = shutil.copytree(root, tmp_path / "other")
    for arguments, words in (
        ([f"{root}@12", new], f"{root}@12 names {root}@12."),
        ([f"{root}@13..20", new], f"{root}@13..20 names none."),
        ([f"{root}@4,4", new], f"names {root}@4, {root}@4."),
        ([root, f"{root}@12", new], f"names {root}@12, {root}@12."),
        ([f"{root}@8", f"{root}/../{root.name}@8", new], f"names {root}@8, {root}@8."),
        ([f"{root}@4,5", new], "step 5; those that are there: 4, 8, 12."),
        ([f"{root}@4-12", new], f"{root}@4-12: is not a workdir"),
        (["/no/such", new], "/no/such: is not a workdir"),
        ([root, "--last=4", new], f"--last=4: {root} .* it has 3."),
        ([f"{root}@4,8", "--last=2", new], "--last=2: "),
        ([f"{root}@4..12", "--decay=0", new], "--decay=0.0: "),
        ([f"{root}@4..12", "--decay=1.5", new], "--decay=1.5: "),
        ([root, other, "--decay=0.5", new], "--decay=0.5: "),
        ([f"{root}@4..12", "--config.train.steps=3", new], "--config.KEY"),
        ([f"{root}@4..12", f"--workdir={mean}"], f"--workdir={mean}: holds something already"),
        ([f"{root}@4..12"], "--workdir: "),
    ):
        line = refused(capsys, "average", *arguments)
        assert all(word in line for word in words.split(" .* ")), (arguments, line)
    assert not (tmp_path / "new" / "checkpoints").exists()
    file = next((other / "checkpoints" / "8").rglob("state/d/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "checkpoints/8: the file" in refused(capsys, "average", f"{other}@4..12", new, code=4)
    flags = ["--config=configs/base.py", f"--workdir={mean}", f"--config.shards.dir={tmp_path}"]
    before = sorted(path.name for path in mean.iterdir())
    for command in ("train", "run", "shards"):
        assert f"--workdir={mean}: holds an average" in refused(capsys, command, *flags)
    assert sorted(path.name for path in mean.iterdir()) == before


def test_another_model_has_no_mean_with_it(toys, tmp_path, capsys):
    """Another vocabulary, set of labels, tokenizer or size; which one is said, and of which checkpoint."""
    other = Workdir(str(shutil.copytree(toys.root, tmp_path / "other")))
    file = other.checkpoints / "12" / "meta" / "metadata"
    text = file.read_text()
    meta = json.loads(text)
    model = meta["dataset"]["model"]
    rope = ModernBertConfig().to_dict()
    for dataset, key in (
        ({"vocab_size": 17}, "vocabulary"),
        ({"labels": ["a"]}, "labels"),
        *(
            ({"model": model | {key: 7}}, key)
            for key in ("hidden_size", "num_hidden_layers", "max_position_embeddings")
        ),
        ({"model": model | {"hidden_act": "relu"}}, "hidden_act"),
        ({"model": rope}, "model_type"),
    ):
        file.write_text(json.dumps(meta | {"dataset": meta["dataset"] | dataset}))
        checkpoint_files.write_hashes(other.checkpoints, 12)
        line = refused(
            capsys,
            "average",
            f"{toys.root}@8,12",
            f"{other.root}@12",
            f"--workdir={tmp_path / 'new'}",
        )
        assert (
            line.startswith(f"mlm average: {toys.root}@8: its {key} (")
            and f"{other.root}@12" in line
        )
    meta["dataset"]["model"] = rope
    one, two = (average_module._architecture(other, meta | {"dataset": meta["dataset"] | {"model": each}})
                for each in (rope, rope | {"global_rope_theta": 9.0}))  # fmt: skip
    assert [key for key in one if one[key] != two[key]] == ["global_rope_theta"]


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_it_is_scored_and_exported_as_a_run_is(family, tmp_path, capsys):
    mean = tmp_path / "mean"
    assert average(f"{family.root}@4..12", f"--workdir={mean}") == 0
    capsys.readouterr()
    assert __main__.main(["evaluate", f"--workdir={mean}"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert __main__.main(["export", f"--workdir={mean}"]) == 0
    card = html.unescape((mean / "export" / "README.md").read_text())
    assert "the mean of run@4 (weight 1), run@8 (weight 1), run@12 (weight 1)" in card
    capsys.readouterr()
    assert __main__.main(["evaluate", f"--workdir={mean}", f"--model={mean}/export"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] == pytest.approx(
        scores["loss"], rel=1e-5
    )
