"""Scores of a masked language model: a checkpoint and a folder, and the file beside the model that loses nothing."""

import contextlib
import csv
import dataclasses
import io
import json
import pathlib
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mlm.commands import common
from mlm.data.examples import Examples, LabelledSplit
from mlm.errors import InputError
from mlm.inference import evaluate, results
from mlm.inference.evaluate_classifier import _prediction_rows
from mlm.paths import UPath
from mlm.workdir import Workdir
from tests.support.corpora import real_texts, write_shards
from tests.support.tiny import tiny_config
from tests.support.trained_model import train_tokenizer, write_folder

pytestmark = pytest.mark.usefixtures("one_device")

SIZES = (
    "model.positions=32",
    "model.layers=2",
    "model.hidden_size=64",
    "shards.count=8",
    "data.lanes=4",
)
EARLIER = {"by hand": {"loss": 1.0}}


@pytest.fixture(scope="module")
def setting(trained_workdir, tmp_path_factory):
    """Config, workdir with shards of its own tokenizer, and their manifest."""
    workdir = Workdir(
        shutil.copytree(trained_workdir.root, tmp_path_factory.mktemp("evaluate") / "run")
    )
    write_shards(real_texts()[:300], workdir.shards, str(workdir.tokenizer))
    config = tiny_config(*SIZES)
    workdir.config.write_text(config.to_json())
    return config, workdir, common.open_data(config, workdir)


def kept_in(folder) -> dict:
    return json.loads((pathlib.Path(str(folder)) / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def scored(setting, one_device):
    """The scores of the checkpoint with everything that can be asked for, what was printed, and what was kept."""
    config, workdir, manifest = setting
    (workdir.root / "evaluation.json").write_text(json.dumps(EARLIER))
    extras = {"masks": ["span", "word", "token"], "pseudo": 2, "breakdown": True, "dtypes": True}
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = evaluate.run(config, workdir, manifest, model="", split="validation", **extras)
    return found, out.getvalue(), err.getvalue(), kept_in(workdir.root)


@pytest.mark.standard
def test_what_is_printed_is_what_is_kept_and_no_earlier_result_is_lost(setting, scored):
    """Each kind of masks has scores and tables of its own; those of bfloat16 are near those of float32."""
    _, workdir, manifest = setting
    found, out, err, kept = scored
    assert json.loads(out) == found
    assert kept.pop("by hand") == EARLIER["by hand"]
    assert all(f", step 5, data {manifest.fingerprint[:12]}" in name for name in kept)
    scores, tables, *_, pseudo = kept.values()
    assert len(kept) == 3 * 2 + 1
    assert scores["loss"] == found["loss"] and "by_position" not in scores
    assert tables["by_copy_distance"] == found["by_copy_distance"]
    assert pseudo["pseudo_loss"] == found["pseudo_loss"]
    assert found["pseudo_rows"] == 2 and found["pseudo_tokens"] > 40
    by_kind = found["masks"]
    assert list(by_kind) == ["token", "span", "word"], "the run's own first, none twice"
    assert len({scores["loss"] for scores in by_kind.values()}) == 3
    for key in ("loss", "by_position", "by_copy_distance"):
        assert found[key] == by_kind["token"][key] != by_kind["span"][key]
    line = by_kind["span"]["by_copy_distance"]["no copy"]
    assert f"{line['loss']:.4f}" in err and "no copy" in err
    full, half = (found["dtypes"][dtype]["loss"] for dtype in ("float32", "bfloat16"))
    assert full == pytest.approx(found["loss"], rel=1e-5) and 0 < abs(full - half) < 0.05
    for shown in (f"{half:.4f}", f"{found['pseudo_perplexity']:,.2f}", str(workdir.root)):
        assert shown in err


@pytest.mark.standard
def test_a_folder_is_scored_as_the_checkpoint_whatever_the_family_of_the_config(
    setting, scored, model, tmp_path
):
    """And under the masks that the config has; the scores lie beside the folder, under the name of its weights."""
    _, workdir, manifest = setting
    folder = str(write_folder(model, tmp_path / "folder"))
    config = tiny_config(*SIZES, "model.family=modernbert", "masking.kind=word")
    found = evaluate.run(config, workdir, manifest, model=folder, split="validation")
    wanted = scored[0]["masks"]["word"]
    for key in ("loss", "perplexity", "accuracy", "bits_per_byte", "predictions"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5)
    (name,) = kept_in(folder)
    assert ", weights " in name and found["model"] == folder and "masks" not in found
    assert not any("weights" in name for name in kept_in(workdir.root))


@pytest.mark.parametrize(
    ("as_json", "terminal"), [(False, True), (True, True), (False, False), (True, False)]
)
def test_a_terminal_gets_the_table_and_a_program_json(monkeypatch, capsys, as_json, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    results.publish({"loss": float("nan")}, ["a line"], as_json=as_json)
    out, err = capsys.readouterr()
    prints_json = as_json or not terminal
    assert out == ('{"loss": null}\n' if prints_json else "a line\n")
    assert err == ("a line\n" if prints_json and not as_json else "")


def test_a_split_that_tells_little_is_said_with_its_standard_error():
    scores = {"loss": 2.0, "perplexity": 7.4, "accuracy": 0.5, "loss_se_records": 0.0321}
    for count, is_shown in ((1999, True), (2000, False)):
        result = {"split": "validation", "model": "runs/a", **scores, "predictions": count}
        remarks = [line for line in evaluate.summary(result)[1:] if isinstance(line, str)]
        assert any("only 1,999 masked tokens" in line for line in remarks) == is_shown
        assert any("0.0321" in line for line in remarks) == is_shown


def test_where_results_are_kept(tmp_path, capsys):
    """Beside a folder or a run, whatever its step; those of a name on the Hub in the workdir. None is ever lost."""
    workdir = SimpleNamespace(root=UPath(tmp_path))
    folder = tmp_path / "folder"
    (folder / "checkpoints").mkdir(parents=True)
    for number, model in enumerate((str(folder), f"{folder}@4", "someone/small", "")):
        results.add_results(model, workdir, {f"entry {number}": {"loss": 1.5}})
    assert list(kept_in(folder)) == ["entry 0", "entry 1"]
    results.add_results("", workdir, {"entry 2": {"by_position": {"1": {"loss": float("inf")}}}})
    kept = {"entry 2": {"by_position": {"1": {"loss": None}}}, "entry 3": {"loss": 1.5}}
    assert kept_in(tmp_path) == kept
    torn = folder / "evaluation.json"
    torn.write_text("{torn")
    results.add_results(str(folder), workdir, {"new": {"loss": 1.0}})
    assert f"not written: {torn}" in capsys.readouterr().err and torn.read_text() == "{torn"


def test_what_does_not_fit_is_refused(setting, model, tmp_path):
    config, workdir, manifest = setting

    def refuse(match: str, folder="", split: str = "validation", manifest=manifest, **flags):
        with pytest.raises(InputError, match=match):
            evaluate.run(config, workdir, manifest, model=str(folder), split=split, **flags)

    refuse("--split=test: .* name one of train, validation", split="test")
    refuse("--pseudo=-1: ", pseudo=-1)
    long = dataclasses.replace(manifest, length=40_000)
    refuse(r"reads at most 32 tokens, .* have 40000", manifest=long)
    other = dataclasses.replace(model, tokenizer=train_tokenizer(tmp_path / "tokenizer", "bpe"))
    folder = write_folder(other, tmp_path / "other")
    refuse("other: its tokenizer gives other ids than .*tokenizer", folder)
    headless = dataclasses.replace(model, params={"roberta": model.params["roberta"]})
    refuse("--model=.*headless: .*head", write_folder(headless, tmp_path / "headless"))


def test_predicted_numbers_are_the_float32_so_that_scores_can_be_recomputed():
    predicted_N = np.nextafter(np.full(3, 1.2, np.float32), np.float32([0, 1.2, 9]))
    labels_N = np.float32([1.6, 0.12345679, np.nan])
    rows = LabelledSplit(np.zeros(3, np.int32), np.arange(4), labels_N, 0)
    text = _prediction_rows(Examples({"new": rows}, (), 8, 0, 9, ""), "new", predicted_N)
    lines = list(csv.DictReader(text.splitlines(), delimiter="\t"))
    assert [np.float32(line["prediction"]) for line in lines] == predicted_N.tolist()
    assert [line["label"] for line in lines] == ["1.6", "0.12345679", ""]
