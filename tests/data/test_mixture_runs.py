"""Runs on a mixture: resume, the scores of each folder and set in logs, report and card, and what is refused."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from mlm import __main__
from mlm.data.manifest import Manifest
from mlm.pretrained import checkpoint_files
from tests.support.corpora import train_tokenizer, write_shards
from tests.support.processes import copy, run_together
from tests.support.refusals import refuse
from tests.support.states import state_of
from tests.support.tiny import TINY, slow

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = ("data.lanes=8", "checkpoint.every=4", "checkpoint.keep=9", "evaluate.every=6", "log.every=3")


def command(name: str, workdir: pathlib.Path, *overrides: str) -> list[str]:
    config = [f"--config.{text}" for text in (*TINY, *SETTINGS, *overrides)]
    return [name, "--config=configs/base.py", f"--workdir={workdir}", *config]


def shares_of(*folders: tuple[Manifest | str | pathlib.Path, float]) -> str:
    return f"data.mixture={tuple((getattr(folder, 'folder', str(folder)), share) for folder, share in folders)}"


@pytest.fixture(scope="module")
def ran(one_device, manifest, web, tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    """The command `run`, on a mixture."""
    workdir = tmp_path_factory.mktemp("ran") / "run"
    path = f"tokenizer.path={tokenizer_folder}"
    assert __main__.main(command("run", workdir, path, shares_of((manifest, 0.75), (web, 0.25)))) == 0
    return workdir


def evaluations(workdir: pathlib.Path) -> list[dict]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"]


def name_of(manifest: Manifest) -> str:
    return pathlib.Path(manifest.folder).parent.name


@pytest.mark.standard
def test_each_folder_is_scored_by_name_and_the_loss_is_their_mean(ran, manifest, web):
    one, other = name_of(manifest), name_of(web)
    lines = evaluations(ran)
    assert [line["step"] for line in lines] == [6, 12]
    for line in lines:
        for key in ("loss", "accuracy"):
            assert line[key] == pytest.approx(0.75 * line[f"{one}/{key}"] + 0.25 * line[f"{other}/{key}"])
        assert line["perplexity"] == pytest.approx(np.exp(line["loss"]))
        assert line["predictions"] == line[f"{one}/predictions"] + line[f"{other}/predictions"]
        bits = [line[f"{name}/bits_per_byte"] / line[f"{name}/loss"] for name in (one, other)]  # tokens per byte
        mixed = 1 / (0.75 / bits[0] + 0.25 / bits[1])
        assert line["bits_per_byte"] == pytest.approx(line["loss"] * mixed)
    assert not (ran / "shards").exists()


def test_report_and_card_show_folders_and_epochs(ran, manifest, web):
    line, report = evaluations(ran)[-1], (ran / "report.html").read_text()
    card = (ran / "export" / "README.md").read_text()
    for folder, share in ((manifest, 0.75), (web, 0.25)):
        name, rows = name_of(folder), folder.splits["train"].records
        epochs = 12 * 16 * share / rows
        assert f"<td>{name}: loss, nats</td>" in report and f"{line[f'{name}/loss']:.4f}" in report
        assert f"<td>Epochs of {name}</td><td>{epochs:.2f} of {rows:,} rows, {100 * share:g}% of the" in report
        assert re.search(rf"\| {name} \| {share:g} \| {rows:,} \| {epochs:.2f} \|", card)
        assert f"{line[f'{name}/loss']:.4f}" in card
    assert "a mixture, see Data" in card and "docstrings" not in card.partition("<details>")[0]
    assert "weighted by their shares" in card


def test_evaluate_names_a_folder_or_scores_all(ran, web, capsys):
    line = evaluations(ran)[-1]
    for split in ("validation", name_of(web)):
        assert __main__.main(["evaluate", f"--workdir={ran}", f"--split={split}"]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out.splitlines()[-1])
        prefix = "" if split == "validation" else f"{split}/"
        expected = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
        assert {key: found[key] for key in ("loss", "accuracy", "bits_per_byte")} == {
            key: expected[key] for key in ("loss", "accuracy", "bits_per_byte")
        }
        assert (f"{name_of(web)}: loss" in err) == (split == "validation")
    assert __main__.main(["evaluate", f"--workdir={ran}", "--split=dev"]) == 2
    assert re.search(
        r"--split=dev: .* hold no records of that split; name one of train, validation, \S+, web",
        capsys.readouterr().err,
    )
    assert __main__.main(["evaluate", f"--workdir={ran}", "--pseudo=2"]) == 2
    assert "--pseudo=2: takes rows of one set" in capsys.readouterr().err
    assert __main__.main(["evaluate", f"--workdir={ran}", "--breakdown"]) == 2
    assert "--breakdown: takes rows of one set" in capsys.readouterr().err


@pytest.mark.standard
def test_doctor_checks_every_folder(ran, manifest, web, capsys):
    arguments = command("doctor", ran, shares_of((manifest, 0.75), (web, 0.25)))
    __main__.main([*arguments, "--json", "--hosts=2", "--devices=8"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    lanes = {finding["where"]: finding["what"] for finding in findings if finding["check"] == "lanes"}
    assert lanes.keys() == {manifest.folder, web.folder}
    assert all(re.match(r"the lanes hold from [\d,]+ to|[26] lanes of [\d,]+ to", what) for what in lanes.values())
    assert {finding["level"] for finding in findings if finding["check"] in ("files", "length", "masks", "mesh")} == {
        "ok"
    }


@pytest.mark.parametrize("step", [slow(4), slow(8)])
def test_resumed_to_the_same_bits(ran, manifest, web, tokenizer_folder, tmp_path, step):
    workdir = copy(ran, tmp_path / "resumed")
    for later in checkpoint_files.complete_steps(workdir / "checkpoints"):
        if later > step:
            checkpoint_files.set_aside(workdir / "checkpoints", later, "later")
    moved = shutil.copytree(web.folder, tmp_path / "moved" / pathlib.Path(web.folder).parent.name / "shards")
    mixture = shares_of((manifest, 0.75), (moved, 0.25))  # the same shards, elsewhere
    path = f"tokenizer.path={tokenizer_folder}"
    assert __main__.main(command("train", workdir, path, mixture)) == 0
    assert (workdir / "metrics.jsonl").read_text() == (ran / "metrics.jsonl").read_text()
    a, b = state_of(ran, 12), state_of(workdir, 12)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_two_processes_give_the_same_losses(ran, manifest, web, tokenizer_folder, tmp_path):
    mixture = shares_of((manifest, 0.75), (web, 0.25))
    arguments = command("train", tmp_path / "run", f"tokenizer.path={tokenizer_folder}", mixture)
    run_together(arguments, processes=2, devices=2)
    old, new = (evaluations(workdir) for workdir in (ran, tmp_path / "run"))
    assert [line.keys() for line in old] == [line.keys() for line in new]
    for a, b in zip(old, new, strict=True):
        assert {key: b[key] for key in a if key != "kind"} == pytest.approx({k: v for k, v in a.items() if k != "kind"})


def test_resume_on_the_folders_in_another_order_is_refused(ran, manifest, web, tmp_path, capsys):
    workdir = copy(ran, tmp_path / "resumed")
    mixture = shares_of((web, 0.25), (manifest, 0.75))
    refuse(
        command("train", workdir, mixture), 2, "other proportions of them (their fingerprint differs)", capsys=capsys
    )


@pytest.mark.slow
def test_named_sets_are_scored_beside_the_runs_own(manifest, web, tmp_path, capsys):
    """The own loss is what it is without them, and the scores of a set are those of its folder alone."""
    sets = f"evaluate.sets={(('own', manifest.folder), ('web', web.folder))}"
    shards = (f"shards.dir={manifest.folder}", "data.lanes=4")
    for name, overrides in (("plain", shards), ("sets", (*shards, sets))):
        assert __main__.main(command("train", tmp_path / name, *overrides)) == 0
    plain, named = (evaluations(tmp_path / name) for name in ("plain", "sets"))
    keys = ("loss", "perplexity", "accuracy", "predictions", "bits_per_byte", "loss_se_records")
    for one, other in zip(plain, named, strict=True):
        assert other == one | {key: value for key, value in other.items() if "/" in key}
        assert {key: other[f"own/{key}"] for key in keys} == {key: one[key] for key in keys}
        assert set(other) - set(one) == {f"{name}/{key}" for name in ("own", "web") for key in keys}
    a, b = state_of(tmp_path / "plain", 12), state_of(tmp_path / "sets", 12)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert "evaluation of web: loss" in capsys.readouterr().err
    assert __main__.main(["report", f"--workdir={tmp_path / 'sets'}"]) == 0
    assert "<td>web: perplexity</td>" in (tmp_path / "sets" / "report.html").read_text()


# Bad input ------------------------------------------------------------------------------------------------------------


def test_folders_that_do_not_fit_together(manifest, web, texts, tokenizer_folder, tmp_path, capsys):
    other = train_tokenizer(texts, tmp_path / "bpe", "bpe")
    counts = {"train": 2, "validation": 1}
    of_bpe = write_shards(texts[:400], tmp_path / "of_bpe", other, counts=counts)
    long = write_shards(texts[:400], tmp_path / "long", tokenizer_folder, counts=counts, length=64)
    special = pathlib.Path(shutil.copytree(web.folder, tmp_path / "special"))
    content = json.loads((special / "manifest.json").read_text())
    content["special_ids"]["mask"] = content["special_ids"]["unk"]
    (special / "manifest.json").write_text(json.dumps(content))
    fix = "write one of them again with the tokenizer and the shards.length of the other"
    for folder, words in (
        (of_bpe, (manifest.folder, "tokenizer_fingerprint", fix)),
        (long, ("64 tokens", "config.shards.length = 32")),
        (special, (manifest.folder, "special_ids", fix)),
    ):
        where = getattr(folder, "folder", str(folder))
        words = (where, *words)
        mixture = shares_of((manifest, 0.75), (folder, 0.25))
        refuse(command("train", tmp_path / "run", mixture), 2, "config.data.mixture", *words, capsys=capsys)
        sets = (f"shards.dir={manifest.folder}", "data.lanes=4", f"evaluate.sets={(('far', where),)}")
        refuse(command("train", tmp_path / "run", *sets), 2, "config.evaluate.sets", *words, capsys=capsys)


def test_shares_that_lanes_do_not_hold_and_other_values(manifest, web, tmp_path, capsys):
    half = shares_of((manifest, 0.5), (web, 0.5))
    cases = [
        ([shares_of((manifest, 0.7), (web, 0.3))], ("data.lanes = 8", "0.75, 0.25.")),
        ([shares_of((manifest, 0.7), (web, 0.2))], ("must sum to 1, they sum to 0.9",)),
        ([shares_of((manifest, 1.0), (web, 0))], ("shares above 0",)),
        ([half, "shards.dir=x"], ("can't be set together with shards.dir",)),
        ([half], (web.folder, "has 2 shards with records", "its share of config.data.lanes = 8 asks for 4")),
        ([shares_of((manifest, 0.75), ("/nowhere/web", 0.25))], ("/nowhere/web", "holds no shards")),
        (["evaluate.sets=(('a', 'x'), ('a', 'y'))"], ("evaluate.sets", "each name may be used only once")),
    ]
    for overrides, words in cases:
        refuse(command("train", tmp_path / "run", *overrides), 2, *words, capsys=capsys)


def test_commands_that_write_shards_and_a_missing_tokenizer(manifest, web, texts, tmp_path, capsys):
    mixture = shares_of((manifest, 0.75), (web, 0.25))
    refuse(command("shards", tmp_path / "run", mixture), 2, "data.mixture", "folder by folder", capsys=capsys)
    for name in ("run", "tokenizer"):
        refuse(command(name, tmp_path / "run", mixture), 2, "data.mixture", "set tokenizer.path", capsys=capsys)
    other = train_tokenizer(texts, tmp_path / "bpe", "bpe")
    arguments = command("run", tmp_path / "run", mixture, f"tokenizer.path={other}")
    refuse(arguments, 2, "was not made with the tokenizer in", capsys=capsys)


def test_more_records_than_ids(manifest, web, tmp_path, capsys):
    content = json.loads(pathlib.Path(web.folder, "manifest.json").read_text())
    shard = content["splits"]["train"]["shards"][0]
    folder = pathlib.Path(shutil.copytree(web.folder, tmp_path / "huge"))
    shard["records"] = 2**32 - 500
    shard["file"] = f"train/dataset-0-{shard['records']}.tfrecord"
    (folder / "manifest.json").write_text(json.dumps(content))
    mixture = shares_of((manifest, 0.75), (folder, 0.25))
    refuse(command("train", tmp_path / "run", mixture), 2, str(folder), "record ids end at 2^32", capsys=capsys)


def test_a_damaged_file_of_one_folder(manifest, web, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(web.folder, tmp_path / "damaged"))
    file = sorted((folder / "train").iterdir())[1]
    file.write_bytes(file.read_bytes()[:-3])
    mixture = shares_of((manifest, 0.75), (folder, 0.25))
    refuse(command("train", tmp_path / "run", mixture), 4, str(file), "bytes where", capsys=capsys)
