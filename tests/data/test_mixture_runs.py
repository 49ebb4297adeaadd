"""Runs on a mixture: the scores of each folder and set in logs and report, resume, and what is refused."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from mlm import __main__, logs
from mlm.commands import common
from mlm.data.manifest import Manifest
from mlm.errors import DamageError, InputError
from mlm.workdir import Workdir
from tests.support.refusals import refuse
from tests.support.tiny import TINY, tiny_config

SETTINGS = (
    "data.lanes=8",
    "train.steps=6",
    "checkpoint.every=4",
    "checkpoint.keep=9",
    "evaluate.every=3",
)


def command(name: str, workdir: pathlib.Path, *overrides: str) -> list[str]:
    config = [f"--config.{text}" for text in (*TINY, *SETTINGS, *overrides)]
    return [name, "--config=configs/base.py", f"--workdir={workdir}", *config]


def shares_of(*folders: tuple[str, float]) -> str:
    return f"data.mixture={folders}"


@pytest.fixture(scope="module")
def mixture(manifest, web) -> str:
    return shares_of((manifest.folder, 0.75), (web.folder, 0.25))


@pytest.fixture(scope="module")
def ran(one_device, mixture, tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("ran") / "run"
    assert (
        __main__.main(command("train", workdir, f"tokenizer.path={tokenizer_folder}", mixture)) == 0
    )
    return workdir


def evaluations(workdir: pathlib.Path) -> list[dict]:
    return logs.read(Workdir(str(workdir)).metrics, "eval")


def name_of(manifest: Manifest) -> str:
    return pathlib.Path(manifest.folder).parent.name


@pytest.mark.standard
def test_each_folder_is_scored_and_shown_by_name_and_the_loss_is_their_mean(ran, manifest, web):
    one = name_of(manifest)
    other = name_of(web)
    lines = evaluations(ran)
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        for key in ("loss", "accuracy"):
            assert line[key] == pytest.approx(
                0.75 * line[f"{one}/{key}"] + 0.25 * line[f"{other}/{key}"]
            )
        assert line["perplexity"] == pytest.approx(np.exp(line["loss"]))
        assert line["predictions"] == line[f"{one}/predictions"] + line[f"{other}/predictions"]
        tokens_per_byte = [
            line[f"{name}/bits_per_byte"] / line[f"{name}/loss"] for name in (one, other)
        ]
        mixed = 1 / (0.75 / tokens_per_byte[0] + 0.25 / tokens_per_byte[1])
        assert line["bits_per_byte"] == pytest.approx(line["loss"] * mixed)
    assert not (ran / "shards").exists()
    assert __main__.main(["report", f"--workdir={ran}"]) == 0
    report = (ran / "report.html").read_text()
    for folder, share in ((manifest, 0.75), (web, 0.25)):
        name = name_of(folder)
        rows = folder.splits["train"].records
        assert f"{lines[-1][f'{name}/loss']:.4f}" in report
        assert (
            f"<td>Epochs of {name}</td><td>{6 * 16 * share / rows:.2f} of {rows:,} rows" in report
        )


@pytest.mark.standard
def test_evaluate_names_a_folder_or_scores_all(ran, web, capsys):
    line = evaluations(ran)[-1]
    for split, prefix in (("validation", ""), (name_of(web), f"{name_of(web)}/")):
        assert __main__.main(["evaluate", f"--workdir={ran}", f"--split={split}"]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out.splitlines()[-1])
        for key in ("loss", "accuracy", "bits_per_byte"):
            assert found[key] == line[f"{prefix}{key}"]
        assert (f"{name_of(web)}: loss" in err) == (split == "validation")
    refuse(
        ["evaluate", f"--workdir={ran}", "--split=dev"],
        2,
        "--split=dev",
        "train, validation",
        "web",
        capsys=capsys,
    )
    for flag in ("--pseudo=2", "--breakdown"):
        refuse(
            ["evaluate", f"--workdir={ran}", flag],
            2,
            f"{flag}: takes rows of one set",
            capsys=capsys,
        )


def edited(folder: str, target: pathlib.Path, **fields) -> str:
    """A copy of shards whose manifest says something else."""
    copied = pathlib.Path(shutil.copytree(folder, target))
    content = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(content | fields))
    return str(copied)


def opened(*overrides: str) -> Manifest:
    return common.open_data(tiny_config("data.lanes=8", *overrides), Workdir("/nowhere"))


@pytest.mark.parametrize("field", ["tokenizer_fingerprint", "length", "special_ids"])
def test_folders_that_do_not_fit_together(manifest, web, tmp_path, field):
    values = {
        "tokenizer_fingerprint": "ab" * 32,
        "length": 64,
        "special_ids": web.special_ids | {"mask": 3},
    }
    folder = edited(web.folder, tmp_path / "other", **{field: values[field]})
    mixture = shares_of((manifest.folder, 0.75), (folder, 0.25))
    sets = (f"shards.dir={manifest.folder}", f"evaluate.sets={(('far', folder),)}")
    for key, overrides in (("data.mixture", (mixture,)), ("evaluate.sets", sets)):
        with pytest.raises(
            InputError, match=rf"config\.{key}: {folder} has the {field} .*{manifest.folder}"
        ):
            opened(*overrides)


def test_folders_that_can_not_be_read(manifest, web, tmp_path):
    """Too few shards, too many records, no shards at all, a damaged file."""
    few = shares_of((manifest.folder, 0.5), (web.folder, 0.5))
    with pytest.raises(
        InputError, match=rf"{web.folder}: the train split has 2 shards .*data.lanes = 8 asks for 4"
    ):
        opened(few)
    with pytest.raises(InputError, match="/nowhere/web"):
        opened(shares_of((manifest.folder, 0.75), ("/nowhere/web", 0.25)))
    shards = web.splits["train"].shards
    count = 2**32 - 500
    first = dataclasses.asdict(shards[0]) | {
        "records": count,
        "file": f"train/dataset-0-{count}.tfrecord",
    }
    splits = json.loads(web.to_json())["splits"]
    splits["train"]["shards"][0] = first
    huge = edited(web.folder, tmp_path / "huge", splits=splits)
    with pytest.raises(InputError, match=rf"{huge}: holds .* record ids end at 2\^32"):
        opened(shares_of((manifest.folder, 0.75), (huge, 0.25)))
    damaged = pathlib.Path(shutil.copytree(web.folder, tmp_path / "damaged"))
    file = damaged / shards[1].file
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DamageError, match=str(file)):
        opened(shares_of((manifest.folder, 0.75), (str(damaged), 0.25)))


def test_commands_that_write_what_a_mixture_has(mixture, tmp_path, capsys):
    refuse(
        command("shards", tmp_path / "run", mixture),
        2,
        "data.mixture",
        "folder by folder",
        capsys=capsys,
    )
    refuse(
        command("tokenizer", tmp_path / "run", mixture),
        2,
        "data.mixture",
        "tokenizer.path",
        capsys=capsys,
    )
