"""The command `classify`, and `evaluate`, `predict`, `export` and `report` on what it leaves; what it refuses."""

import csv
import json
import pathlib
import shutil

import numpy as np
import pytest

from mlm import __main__, logs
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.model import classifier
from mlm.pretrained import checkpoint_files, load, locate
from mlm.workdir import Workdir
from tests.support import labelled_texts
from tests.support.labelled_texts import rows, sentences, word_settings, write_csv
from tests.support.refusals import refuse
from tests.support.streams import Pipe
from tests.support.tiny import command

pytestmark = pytest.mark.usefixtures("one_device")


def arguments(folder: pathlib.Path, *overrides: str) -> list[str]:
    settings = labelled_texts.settings(folder, "", *overrides)
    settings.remove("tokenizer.path=")
    return command("classify", folder / "run", *settings)


def call(capsys, *line: str) -> list[dict]:
    """Returns what a command printed."""
    capsys.readouterr()
    assert __main__.main([*line]) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def predictions(workdir: Workdir, name: str) -> list[dict[str, str]]:
    lines = (workdir.predictions / f"{name}.tsv").read_text().splitlines()
    return list(csv.DictReader(lines, delimiter="\t"))


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Exports are not read back, which their room's tests hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "check_files", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def finished(trained_workdir, one_device, tmp_path_factory) -> Workdir:
    """A run that started from a pretrained workdir."""
    folder = tmp_path_factory.mktemp("rows")
    test = write_csv(folder / "test.csv", rows(17, seed=2))
    unlabelled = write_csv(folder / "new.csv", [{"text": row["text"]} for row in rows(9, seed=3)])
    some = [row if n % 2 else row | {"label": ""} for n, row in enumerate(rows(9, seed=3))]
    predict = (("new", unlabelled), ("half", write_csv(folder / "half.csv", some)))
    line = arguments(
        folder,
        f"train.init_from={trained_workdir.root}",
        f"classify.test={test}",
        "optimizer.learning_rate=0.01",
        f"classify.predict={predict!r}",
        "classify.metric=('f1_macro', 'matthews')",
        "train.epochs=6",  # the best must not be the last
        "checkpoint.keep=1",
    )
    assert __main__.main(line) == 0
    return Workdir(str(folder / "run"), create=False)


@pytest.mark.standard
def test_it_starts_from_a_run_with_its_sizes_and_tokenizer(finished, trained_workdir):
    assert locate.is_classifier(finished) and not locate.is_classifier(trained_workdir)
    sizes = json.loads(finished.config.read_text())["model"]
    assert (sizes["layers"], sizes["hidden_size"], sizes["positions"]) == (2, 64, 32)
    folders = (finished.tokenizer, trained_workdir.tokenizer)
    assert len({tokenizer.fingerprint(str(folder)) for folder in folders}) == 1


@pytest.mark.standard
def test_the_best_checkpoint_is_kept_and_exported(finished):
    """It is chosen by the 29 rows of classify.validation; those of classify.test choose nothing."""
    evals = logs.read(finished.metrics, "eval")
    assert [line["rows"] for line in evals] == [29] * 6
    means = {line["step"]: line["f1_macro"] + line["matthews"] for line in evals}
    found = load.from_workdir(finished, head=load.CLASSIFIER)
    assert means[found.step] == max(means.values())
    content = json.loads(finished.classification.read_text())
    labels = [row["label"] for row in rows(17, seed=2)]
    assert content["split"] == "test"
    counts = [labels.count(label) for label in labelled_texts.LABELS]
    assert list(map(sum, content["confusion"])) == counts
    steps = checkpoint_files.complete_steps(finished.checkpoints)
    assert {*steps} == {found.step, max(means)}, "keep=1, and the best"


@pytest.mark.standard
def test_evaluate_gives_the_scores_of_the_log(finished, capsys):
    line = ("evaluate", f"--workdir={finished.root}")
    (found,) = call(capsys, *line)
    step = load.from_workdir(finished, head=load.CLASSIFIER).step
    logged = next(line for line in logs.read(finished.metrics, "eval") if line["step"] == step)
    for key in ("accuracy", "f1", "rows"):
        assert found[key] == logged[key]
    assert found["loss"] == pytest.approx(logged["loss"], rel=1e-5)
    (found,) = call(capsys, *line, f"--model={finished.export}", "--split=test")
    assert (found["split"], found["rows"], found["model"]) == ("test", 17, str(finished.export))


@pytest.mark.standard
def test_a_classifier_in_another_workdir(finished, tmp_path, capsys):
    """Its scores are not written down as this workdir's; its body is a start for any head."""
    (tmp_path / "config.json").write_text(finished.config.read_text())
    model = f"--model={finished.root}"
    (found,) = call(capsys, "evaluate", f"--workdir={tmp_path}", model, "--split=test")
    assert found["model"] == str(finished.root)
    assert not (tmp_path / "classification.json").exists()
    found = load.load(str(finished.root), head=None)
    assert "classifier/dense/kernel" in found.leaves
    assert found.encoder["roberta"].keys() == {"embeddings", "encoder"}
    larger = tokenizer.load(str(shutil.copytree(finished.export, tmp_path / "larger")))
    larger.add_tokens(["another"])
    larger.save_pretrained(tmp_path / "larger")
    for flag, *words in (
        ("--draws=4", "--draws"),
        ("--config.classify.length=33", "config.classify.length = 33: ", " 32 tokens"),
        (f"--model={tmp_path}/larger", "has 1000 vocabulary entries, its tokenizer", "1001"),
    ):
        refuse(["evaluate", f"--workdir={finished.root}", flag], 2, *words, capsys=capsys)
    with pytest.raises(InputError, match=r"^--model=.*no language-model head"):
        load.load(str(finished.root), head=load.LM_HEAD)


@pytest.mark.standard
def test_predictions_of_rows_with_and_without_labels(finished):
    sets = json.loads(finished.classification.read_text())["sets"]
    assert sets.keys() == {"validation", "new", "half"}
    new, half = (predictions(finished, name) for name in ("new", "half"))
    for number, (row, unlabelled, labelled) in enumerate(
        zip(rows(9, seed=3), new, half, strict=True)
    ):
        assert (unlabelled["index"], unlabelled["label"]) == (str(number), "")
        assert labelled["label"] == (row["label"] if number % 2 else "")
        assert labelled["prediction"] == unlabelled["prediction"]
    assert sets["new"] == {} and sets["half"]["rows"] == 4
    right = [row["prediction"] == row["label"] for row in predictions(finished, "validation")]
    assert sets["validation"]["accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.standard
def test_predict_and_report(finished, capsys, monkeypatch):
    for place in (f"--workdir={finished.root}", f"--model={finished.export}"):
        monkeypatch.setattr("sys.stdin", Pipe("a red cat\nrain\n"))
        found = call(capsys, "predict", place, "--top-k=2")
        assert [line["text"] for line in found] == ["a red cat", "rain"]
        assert all(len(line["probabilities"]) == 2 for line in found)
    line = ["predict", f"--workdir={finished.root}", "--targets", "cat"]
    refuse(line, 2, f"--targets: {finished.root} ", capsys=capsys)
    page = finished.report.read_text()
    confusion = json.loads(finished.classification.read_text())["confusion"]
    assert ("<h2>Confusion</h2>" in page) == (np.sum(confusion) > np.trace(confusion))
    assert "F1, weighted" in page and "perplexity" not in page and "Tokens read" not in page


@pytest.mark.standard
def test_words_with_labels(trained_workdir, tmp_path, capsys, monkeypatch):
    unlabelled = sentences(5, seed=4)
    blocks = ["\n".join(row["tokens"]) for row in unlabelled]
    (tmp_path / "new.conll").write_text("\n\n".join(blocks))
    line = arguments(
        tmp_path,
        *word_settings(tmp_path),
        f"tokenizer.path={trained_workdir.tokenizer}",
        "optimizer.learning_rate=0.01",
        f"classify.predict=(('new', 'conll:{tmp_path}/new.conll'),)",
        "train.epochs=6",
        "model.init_stddev=0.1",
    )
    assert __main__.main(line) == 0
    workdir = Workdir(str(tmp_path / "run"), create=False)
    evals = logs.read(workdir.metrics, "eval")
    metric = json.loads(workdir.config.read_text())["classify"]["metric"]
    assert metric == ["f1"], "what chooses, for the report"
    best = load.from_workdir(workdir, head=load.CLASSIFIER)
    chosen = next(line for line in evals if line["step"] == best.step)
    assert classifier.kind(best.config) == "tokens"
    assert chosen["f1"] == max(line["f1"] for line in evals) > 0.5
    place = f"--workdir={workdir.root}"
    (found,) = call(capsys, "evaluate", place, f"--model={workdir.export}")
    assert found["f1"] == chosen["f1"] and found["rows"] == 29
    validation, new = (predictions(workdir, name) for name in ("validation", "new"))
    for lines, table in ((validation, sentences(29, seed=1)), (new, unlabelled)):
        words = [(str(number), word) for number, row in enumerate(table) for word in row["tokens"]]
        assert [(line["index"], line["word"]) for line in lines] == words
    right = [line["prediction"] == line["label"] for line in validation]
    assert np.mean(right) == chosen["accuracy"]
    assert {line["label"] for line in new} == {""}
    monkeypatch.setattr("sys.stdin", Pipe(" ".join(unlabelled[0]["tokens"]) + "\n"))
    (answer,) = call(capsys, "predict", place)
    expected = [(line["word"], line["prediction"]) for line in new if line["index"] == "0"]
    assert [(word["word"], word["label"]) for word in answer["words"]] == expected
    page = workdir.report.read_text()
    assert "F1, spans of words" in page and "recall, spans of words" in page
    assert "F1, weighted" not in page


BAD = {
    "no source": (["classify.train="], "config.classify.train: "),
    "no column": (["classify.text=('words',)"], "'words'"),
    "not a number": (["classify.kind=regression"], "line 2: its 'label' is"),
    "no start": (["train.init_from="], "config.tokenizer.path: "),
    "primed": (["model.init=primed"], "config.model.init = 'primed': "),
    "too long": (["classify.length=33"], "config.classify.length = 33: "),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_one_sentence(fault, trained_workdir, tmp_path, capsys):
    overrides, words = BAD[fault]
    line = arguments(tmp_path, f"train.init_from={trained_workdir.root}", *overrides)
    refuse(line, 2, words, capsys=capsys)
    assert not {"checkpoints", "metrics.jsonl"} & {path.name for path in tmp_path.glob("run/*")}
