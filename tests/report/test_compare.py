"""The comparison of runs: points and numbers are those of the logs, and what makes runs incomparable is said."""

import contextlib
import io
import json

import pytest

from mlm import __main__
from mlm.errors import InputError
from mlm.report import plots, report
from mlm.workdir import Workdir
from tests.support.reports import EVALS, TIMING, TRAIN, Cells, make_workdir

TWICE = [line | {"loss": 2 * line["loss"]} for line in (*TRAIN, *EVALS)]


@pytest.fixture
def runs(tmp_path) -> list[Workdir]:
    """Two runs: the second reads batches twice as large, at twice the loss, and was never killed."""
    keys = ["train.steps=40", "shards.length=64"]
    small = [*keys, "data.global_batch=8"]
    large = [*keys, "data.global_batch=16", "corpus.sources=text:<b>*"]
    return [
        make_workdir(tmp_path / "first", overrides=small),
        make_workdir(tmp_path / "second", metrics=TWICE, timing=TIMING[:5], overrides=large),
    ]


def page_of(runs: list[Workdir]) -> Cells:
    first, *others = (str(run.root) for run in runs)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert __main__.main(["report", f"--workdir={first}", "--compare", *others]) == 0
    assert out.getvalue().strip() == f"{first}/compare.html"
    assert not runs[0].report.exists(), "the page of the one run is another"
    return Cells((runs[0].root / "compare.html").read_text())


def test_curves_over_steps_tokens_and_seconds_of_training(runs):
    first, second = map(report.gather, runs)
    figures = plots.draw_comparison({"_$1": first, "second": second}, "nats")
    losses = [line["loss"] for line in TRAIN]
    y = [losses, [4.125, 4.25], [2 * loss for loss in losses], [8.25, 8.5]]
    for name, x, second_x in (
        ("steps", [10, 20, 30, 40], [10, 20, 30, 40]),
        ("tokens read", [3840, 7680, 11520, 15360], [7680, 15360, 23040, 30720]),
        ("seconds of training", [20, 40, 80, 120], [20, 40, 40, 40]),
    ):
        (axes,) = figures[f"Loss over {name}"].axes
        assert [line.get_ydata().tolist() for line in axes.lines] == y
        found = [line.get_xdata().tolist() for line in axes.lines]
        assert found == [x, x[1::2], second_x, second_x[1::2]]
    # no formula, none left out
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == [
        r"_\$1",
        "second",
    ]


def test_final_scores_and_the_config_keys_that_differ(runs):
    page = page_of(runs)
    expected = {
        "last scores": ["first", "second"],
        "steps": ["40", "40"],
        "loss, nats": ["4.2500", "8.5000"],
        "tokens read": ["15,360", "30,720"],
        "time in all": ["5 min 31 s", "1 min 13 s"],
        "data.global_batch": ["8", "16"],
        "corpus.sources": ['["docstrings"]', '["text:<b>*"]'],
    }
    assert {name: page.row(name) for name in expected} == expected
    assert [row[0] for row in page.rows if "." in row[0]] == ["corpus.sources", "data.global_batch"]
    assert len(page.images) == 3 and "b" not in page.tags and "differ, so" not in page.text


@pytest.fixture
def without_plots(monkeypatch):
    monkeypatch.setattr(plots, "draw_comparison", lambda *_: {})


@pytest.mark.usefixtures("without_plots")
def test_other_tokenizers_and_other_validation_rows_are_said(runs):
    file = runs[1].shards / "manifest.json"
    content = json.loads(file.read_text())
    content["splits"]["validation"]["shards"][0]["sha256"] = "1" * 64
    file.write_text(json.dumps(content))
    assert "validation rows differ" in page_of(runs).text
    file.write_text(json.dumps(content | {"tokenizer_fingerprint": "1" * 64}))
    assert "tokenizers differ" in page_of(runs).text


@pytest.mark.usefixtures("without_plots")
def test_classifiers_by_their_rows_and_tokenizers(runs, tokenizer_folder):
    for number, run in enumerate(runs):
        (run.shards / "manifest.json").unlink()
        config = json.loads(run.config.read_text())
        config["classify"] |= {"train": "csv:a.csv", "validation": f"csv:{number}.csv"}
        run.config.write_text(json.dumps(config))
    page = page_of(runs)
    assert "validation rows differ" in page.text and page.row("tokens read") == ["", ""]
    runs[0].tokenizer.symlink_to(tokenizer_folder)
    runs[1].tokenizer.mkdir()
    content = (runs[0].tokenizer / "tokenizer.json").read_text()
    (runs[1].tokenizer / "tokenizer.json").write_text(content.replace('"unk_id": 3', '"unk_id": 4'))
    assert "tokenizers differ" in page_of(runs).text


@pytest.mark.usefixtures("without_plots")
def test_a_key_that_one_config_lacks_a_regression_and_a_run_without_times(runs):
    config = json.loads(runs[0].config.read_text())
    config["mine"]["power"] = 0.5
    runs[0].config.write_text(json.dumps(config))
    runs[1].metrics.write_text(
        "".join(f"{json.dumps(line | {'mse': line['loss']})}\n" for line in TWICE)
    )
    runs[1].timing.unlink()
    page = page_of(runs)
    assert page.row("mine.power") == ["0.5", ""]
    assert page.row("loss, nats or squared error") == ["4.2500", "8.5000"]
    assert page.row("time in all") == ["5 min 31 s", ""]
    runs[1].config.unlink()
    assert page_of(runs).row("tokens read") == ["15,360", ""]


def test_what_can_not_be_compared_is_refused(runs, tmp_path):
    first = runs[0]
    (tmp_path / "link").symlink_to(first.root)
    many = [Workdir(str(tmp_path / str(n))) for n in range(8)]
    words = r"--compare: .*at most 8 runs, each once"
    for others, match in (
        ([Workdir(str(tmp_path / "link"))], words),
        (many, words),
        (many[:1], r"0/metrics\.jsonl"),
    ):
        with pytest.raises(InputError, match=match):
            report.compare([first, *others])
    assert not (first.root / "compare.html").exists()
