"""Runs on a mixture: the scores of each folder and set in logs and report, resume, and what is refused."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from mlm import __main__, logs
from mlm.commands import common
from mlm.data.manifest import Manifest
from mlm.errors import InputError
from mlm.workdir import Workdir
from tests.support.refusals import refuse
from tests.support.tiny import TINY, command, tiny_config

SETTINGS = (
    "data.lanes=8",
    "train.steps=6",
    "checkpoint.every=4",
    "checkpoint.keep=9",
    "evaluate.every=3",
)


SHARES = (0.75, 0.25)


def name_of(manifest: Manifest) -> str:
    return pathlib.Path(manifest.folder).parent.name


def shares_of(*folders: tuple[str, float]) -> str:
    return f"data.mixture={folders}"


@pytest.fixture(scope="module")
def mixture(manifest, web) -> str:
    return shares_of((manifest.folder, 0.75), (web.folder, 0.25))


@pytest.fixture(scope="module")
def ran(one_device, mixture, tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("ran") / "run"
    settings = (*TINY, *SETTINGS, f"tokenizer.path={tokenizer_folder}", mixture)
    assert __main__.main(command("train", workdir, *settings)) == 0
    return workdir


@pytest.mark.standard
def test_each_folder_is_scored_and_shown_by_name_and_the_loss_is_their_mean(ran, manifest, web):
    names = [name_of(manifest), name_of(web)]
    lines = logs.read(Workdir(str(ran)).metrics, "eval")
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        for key in ("loss", "accuracy"):
            parts = [line[f"{name}/{key}"] for name in names]
            assert line[key] == pytest.approx(np.dot(SHARES, parts))
        assert line["perplexity"] == pytest.approx(np.exp(line["loss"]))
        assert line["predictions"] == sum(line[f"{name}/predictions"] for name in names)
        bytes_per_token = [line[f"{n}/loss"] / line[f"{n}/bits_per_byte"] for n in names]
        assert line["loss"] / line["bits_per_byte"] == pytest.approx(
            np.dot(SHARES, bytes_per_token)
        )
    assert not (ran / "shards").exists()
    assert __main__.main(["report", f"--workdir={ran}"]) == 0
    report = (ran / "report.html").read_text()
    for name in names:
        assert f"{lines[-1][f'{name}/loss']:.4f}" in report


@pytest.mark.standard
def test_evaluate_names_a_folder_or_scores_all(ran, web, capsys):
    line = logs.read(Workdir(str(ran)).metrics, "eval")[-1]
    name = name_of(web)
    for split, prefix in (("validation", ""), (name, f"{name}/")):
        assert __main__.main(["evaluate", f"--workdir={ran}", f"--split={split}"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        for key in ("loss", "accuracy", "bits_per_byte"):
            assert found[key] == line[f"{prefix}{key}"]
    for flag, *words in (("--split=dev", "train, validation", "web"), ("--pseudo=2", "one set")):
        refuse(["evaluate", f"--workdir={ran}", flag], 2, flag, *words, capsys=capsys)


def opened(*overrides: str) -> Manifest:
    return common.open_data(tiny_config("data.lanes=8", *overrides), Workdir("/nowhere"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokenizer_fingerprint", "ab" * 32), ("length", 64), ("special_ids", {"mask": 3})],
)
def test_folders_that_do_not_fit_together(manifest, web, tmp_path, field, value):
    folder = shutil.copytree(web.folder, f"{tmp_path}/other")
    file = pathlib.Path(folder, "manifest.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    words = f": {folder} has the {field} .*{manifest.folder}"
    with pytest.raises(InputError, match=rf"config\.data\.mixture{words}"):
        opened(shares_of((manifest.folder, 0.75), (folder, 0.25)))
    with pytest.raises(InputError, match=rf"config\.evaluate\.sets{words}"):
        opened(f"shards.dir={manifest.folder}", f"evaluate.sets={(('far', folder),)}")


def test_a_folder_with_too_few_shards(manifest, web):
    words = rf"{web.folder}: the train split has 2 shards .*data.lanes = 8 asks for 4"
    with pytest.raises(InputError, match=words):
        opened(shares_of((manifest.folder, 0.5), (web.folder, 0.5)))


def test_commands_that_write_what_a_mixture_has(mixture, tmp_path, capsys):
    for name, words in (("shards", "folder by folder"), ("tokenizer", "tokenizer.path")):
        line = command(name, tmp_path / "run", *TINY, "data.lanes=8", mixture)
        refuse(line, 2, "data.mixture", words, capsys=capsys)
