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

pytestmark = pytest.mark.usefixtures("one_device")


def arguments(workdir: pathlib.Path, folder: pathlib.Path, *overrides: str) -> list[str]:
    settings = [
        each
        for each in labelled_texts.settings(folder, "", *overrides)
        if each != "tokenizer.path="
    ]
    return [
        "classify",
        "--config=configs/base.py",
        f"--workdir={workdir}",
        *(f"--config.{text}" for text in settings),
    ]


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Exports are not read back, which their room's tests hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "check_files", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def finished(trained_workdir, one_device, tmp_path_factory) -> tuple[Workdir, pathlib.Path]:
    """A run that started from a pretrained workdir, and the folder of its rows."""
    folder = tmp_path_factory.mktemp("rows")
    test = write_csv(folder / "test.csv", rows(17, seed=2))
    unlabelled = write_csv(folder / "new.csv", [{"text": row["text"]} for row in rows(9, seed=3)])
    some = [row if n % 2 else row | {"label": ""} for n, row in enumerate(rows(9, seed=3))]
    predict = (("new", unlabelled), ("half", write_csv(folder / "half.csv", some)))
    overrides = (
        f"train.init_from={trained_workdir.root}",
        f"classify.test={test}",
        "optimizer.learning_rate=0.01",
    )
    overrides += (f"classify.predict={predict!r}", "classify.metric=('f1_macro', 'matthews')")
    assert (
        __main__.main(
            arguments(folder / "run", folder, *overrides, "train.epochs=6", "checkpoint.keep=1")
        )
        == 0
    )
    return Workdir(str(folder / "run"), create=False), folder


@pytest.mark.standard
def test_it_starts_from_a_run_with_its_sizes_and_tokenizer(finished, trained_workdir):
    workdir, _ = finished
    assert locate.is_classifier(workdir) and not locate.is_classifier(trained_workdir)
    sizes = json.loads(workdir.config.read_text())["model"]
    assert (sizes["layers"], sizes["hidden_size"], sizes["positions"]) == (2, 64, 32)
    folders = (workdir.tokenizer, trained_workdir.tokenizer)
    assert len({tokenizer.fingerprint(str(folder)) for folder in folders}) == 1


@pytest.mark.standard
def test_the_best_checkpoint_is_kept_and_exported(finished):
    """It is chosen by the 29 rows of classify.validation; those of classify.test choose nothing."""
    workdir, _ = finished
    evals = logs.read(workdir.metrics, "eval")
    assert [line["rows"] for line in evals] == [29] * 6
    means = {line["step"]: line["f1_macro"] + line["matthews"] for line in evals}
    found = load.from_workdir(workdir, head=load.CLASSIFIER)
    assert means[found.step] == max(means.values())
    content = json.loads(workdir.classification.read_text())
    labels = [row["label"] for row in rows(17, seed=2)]
    assert content["split"] == "test"
    counts = [labels.count(label) for label in labelled_texts.LABELS]
    assert list(map(sum, content["confusion"])) == counts
    steps = checkpoint_files.complete_steps(workdir.checkpoints)
    assert len(steps) <= 2, "keep=1, and the best"
    assert checkpoint_files.choose(workdir.checkpoints, on_damage="stop") == steps[-1]
    assert checkpoint_files.choose(workdir.checkpoints, on_damage="stop", best=True) == found.step


@pytest.mark.standard
def test_evaluate_gives_the_scores_of_the_log(finished, capsys):
    workdir, _ = finished
    capsys.readouterr()
    assert __main__.main(["evaluate", f"--workdir={workdir.root}"]) == 0
    found = json.loads(capsys.readouterr().out)
    step = load.from_workdir(workdir, head=load.CLASSIFIER).step
    logged = next(line for line in logs.read(workdir.metrics, "eval") if line["step"] == step)
    for key in ("accuracy", "f1", "rows"):
        assert found[key] == logged[key]
    assert found["loss"] == pytest.approx(logged["loss"], rel=1e-5)
    line = ["evaluate", f"--workdir={workdir.root}", f"--model={workdir.export}", "--split=test"]
    assert __main__.main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["rows"], found["model"]) == ("test", 17, str(workdir.export))


@pytest.mark.standard
def test_a_classifier_in_another_workdir(finished, tmp_path, capsys):
    """Its scores are not written down as this workdir's; its body is a start for any head."""
    workdir, _ = finished
    (tmp_path / "config.json").write_text(workdir.config.read_text())
    assert (
        __main__.main(
            ["evaluate", f"--workdir={tmp_path}", f"--model={workdir.root}", "--split=test"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["model"] == str(workdir.root)
    assert not (tmp_path / "classification.json").exists()
    found = load.load(str(workdir.root), head=None)
    assert "classifier/dense/kernel" in found.leaves and found.encoder["roberta"].keys() == {
        "embeddings",
        "encoder",
    }
    command = ["evaluate", f"--workdir={workdir.root}", "--draws=4"]
    refuse(command, 2, "--draws", capsys=capsys)
    command = ["evaluate", f"--workdir={workdir.root}", "--config.classify.length=33"]
    refuse(command, 2, "config.classify.length = 33: ", " 32 tokens", capsys=capsys)
    larger = tokenizer.load(str(shutil.copytree(workdir.export, tmp_path / "larger")))
    larger.add_tokens(["another"])
    larger.save_pretrained(tmp_path / "larger")
    command = ["evaluate", f"--workdir={workdir.root}", f"--model={tmp_path / 'larger'}"]
    refuse(command, 2, "has 1000 vocabulary entries, its tokenizer", "1001", capsys=capsys)
    with pytest.raises(InputError, match=r"^--model=.*no language-model head"):
        load.load(str(workdir.root), head=load.LM_HEAD)


@pytest.mark.standard
def test_predictions_of_rows_with_and_without_labels(finished):
    workdir, _ = finished
    content = json.loads(workdir.classification.read_text())
    tables = {
        path.stem: list(csv.DictReader(path.read_text().splitlines(), delimiter="\t"))
        for path in workdir.predictions.glob("*.tsv")
    }
    assert set(tables) == set(content["sets"]) == {"validation", "new", "half"}
    labels = [row["label"] for row in rows(9, seed=3)]
    given = ["" if n % 2 == 0 else label for n, label in enumerate(labels)]
    assert [row["label"] for row in tables["half"]] == given
    new = [row["prediction"] for row in tables["new"]]
    assert [row["prediction"] for row in tables["half"]] == new
    assert [row["index"] for row in tables["new"]] == [str(n) for n in range(9)]
    assert content["sets"]["new"] == {} and content["sets"]["half"]["rows"] == 4
    right = [row["prediction"] == row["label"] for row in tables["validation"]]
    assert content["sets"]["validation"]["accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.standard
def test_predict_and_report(finished, capsys, monkeypatch):
    workdir, _ = finished
    for place in (f"--workdir={workdir.root}", f"--model={workdir.export}"):
        monkeypatch.setattr("sys.stdin", Pipe("a red cat\nrain\n"))
        capsys.readouterr()
        assert __main__.main(["predict", place, "--top-k=2"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["text"] for line in found] == ["a red cat", "rain"]
        assert all(len(line["probabilities"]) == 2 for line in found)
    command = ["predict", f"--workdir={workdir.root}", "--targets", "cat"]
    refuse(command, 2, f"--targets: {workdir.root} ", capsys=capsys)
    page = workdir.report.read_text()
    content = json.loads(workdir.classification.read_text())
    wrong = sum(map(sum, content["confusion"])) - sum(
        row[i] for i, row in enumerate(content["confusion"])
    )
    assert ("<h2>Confusion</h2>" in page) == (wrong > 0)
    assert "F1, weighted" in page and "perplexity" not in page and "Tokens read" not in page


@pytest.fixture(scope="module")
def labelled_words(trained_workdir, one_device, tmp_path_factory) -> tuple[Workdir, pathlib.Path]:
    """A run on words with labels, and the folder of its sentences."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "new.conll").write_text(
        "\n\n".join("\n".join(row["tokens"]) for row in sentences(5, seed=4))
    )
    overrides = (
        *word_settings(folder),
        f"tokenizer.path={trained_workdir.tokenizer}",
        "optimizer.learning_rate=0.01",
    )
    overrides += (
        f"classify.predict=(('new', 'conll:{folder}/new.conll'),)",
        "train.epochs=8",
        "model.init_stddev=0.1",
    )
    overrides += ("model.layers=1", "model.hidden_size=32")
    assert __main__.main(arguments(folder / "run", folder, *overrides)) == 0
    return Workdir(str(folder / "run"), create=False), folder


@pytest.mark.standard
def test_words_with_labels(labelled_words, capsys, monkeypatch):
    workdir, _ = labelled_words
    evals = logs.read(workdir.metrics, "eval")
    assert json.loads(workdir.config.read_text())["classify"]["metric"] == ["f1"], (
        "what chooses, for the report"
    )
    best = load.from_workdir(workdir, head=load.CLASSIFIER)
    chosen = next(line for line in evals if line["step"] == best.step)
    assert (
        classifier.kind(best.config) == "tokens"
        and chosen["f1"] == max(line["f1"] for line in evals) > 0.5
    )
    capsys.readouterr()
    assert (
        __main__.main(["evaluate", f"--workdir={workdir.root}", f"--model={workdir.export}"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["f1"] == chosen["f1"] and found["rows"] == 29
    tables = {}
    for name, rows_of in (("validation", sentences(29, seed=1)), ("new", sentences(5, seed=4))):
        lines = list(
            csv.DictReader(
                (workdir.predictions / f"{name}.tsv").read_text().splitlines(), delimiter="\t"
            )
        )
        words = [
            (str(number), word) for number, row in enumerate(rows_of) for word in row["tokens"]
        ]
        assert [(line["index"], line["word"]) for line in lines] == words
        tables[name] = lines
    assert (
        np.mean([line["prediction"] == line["label"] for line in tables["validation"]])
        == chosen["accuracy"]
    )
    assert {line["label"] for line in tables["new"]} == {""}
    monkeypatch.setattr("sys.stdin", Pipe(" ".join(sentences(5, seed=4)[0]["tokens"]) + "\n"))
    assert __main__.main(["predict", f"--workdir={workdir.root}"]) == 0
    answer = json.loads(capsys.readouterr().out)
    own = [(line["word"], line["prediction"]) for line in tables["new"] if line["index"] == "0"]
    assert [(word["word"], word["label"]) for word in answer["words"]] == own
    page = workdir.report.read_text()
    assert (
        "F1, spans of words" in page
        and "recall, spans of words" in page
        and "F1, weighted" not in page
    )


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
    command = arguments(
        tmp_path / "run", tmp_path, f"train.init_from={trained_workdir.root}", *overrides
    )
    refuse(command, 2, words, capsys=capsys)
    assert (
        not (tmp_path / "run" / "checkpoints").exists()
        and not (tmp_path / "run" / "metrics.jsonl").exists()
    )


def test_bad_rows_are_named_with_file_and_line(trained_workdir, tmp_path, capsys):
    start = f"train.init_from={trained_workdir.root}"
    for table, words in (
        ([*rows(5), {"text": "x", "label": "unheard", "score": 1}], "line 7: its label 'unheard' "),
        ([*rows(5), {"text": "", "label": "money", "score": 1}], "line 7: its 'text' is empty"),
    ):
        bad = write_csv(tmp_path / "bad.csv", table)
        refuse(
            arguments(tmp_path / "run", tmp_path, start, f"classify.validation={bad}"),
            2,
            words,
            capsys=capsys,
        )
