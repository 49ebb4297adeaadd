"""The comparison of runs: the points and numbers are those of the logs, and only config keys that differ are shown."""

import json

import pytest

from mlm import __main__
from mlm.errors import InputError
from mlm.report import report
from mlm.workdir import Workdir
from tests.support.reports import EVALS, TIMING, TRAIN, Cells, make_workdir

TWICE = [line | {"loss": 2 * line["loss"]} for line in (*TRAIN, *EVALS)]


@pytest.fixture
def runs(tmp_path) -> list[Workdir]:
    """Two runs: the second reads batches twice as large, at twice the loss, and was never killed."""
    first = make_workdir(tmp_path / "first", overrides=["train.steps=40", "data.global_batch=8", "shards.length=64"])
    overrides = ["train.steps=40", "data.global_batch=16", "shards.length=64", "corpus.sources=text:<b>*"]
    return [first, make_workdir(tmp_path / "second", metrics=TWICE, timing=TIMING[:5], overrides=overrides)]


def page_of(runs: list[Workdir]) -> Cells:
    path = report.compare(runs)
    assert path == str(runs[0].root / "compare.html")
    return Cells((runs[0].root / "compare.html").read_text())


def points_of(runs: list[Workdir]) -> dict[str, list[tuple]]:
    figures = report.draw_losses(dict(zip(("first", "second"), map(report.gather, runs), strict=True)))
    return {
        title: [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].get_lines()]
        for title, figure in figures.items()
    }


def test_curves_over_steps_tokens_and_wall_clock(runs):
    points = points_of(runs)
    assert list(points) == ["Loss over steps", "Loss over tokens", "Loss over wall-clock"]
    steps, losses = [10, 20, 30, 40], [line["loss"] for line in TRAIN]
    twice = [2 * loss for loss in losses]
    lines = [losses, [4.125, 4.25], twice, [8.25, 8.5]]
    assert points["Loss over steps"] == list(zip([steps, [20, 40]] * 2, lines, strict=True))
    tokens = [[step * size for step in line] for size in (384, 768) for line in (steps, [20, 40])]
    assert points["Loss over tokens"] == list(zip(tokens, lines, strict=True))
    seconds = [[x * 3600 for x in line[0]] for line in points["Loss over wall-clock"]]
    # of the stretch to step 30, which was made twice, the time of the one that was kept
    assert seconds[0] == pytest.approx([48, 68, 196, 326])
    assert seconds[1] == pytest.approx([73, 330])
    assert seconds[2] == pytest.approx([48, 68]), "of the second run no more is known"


def test_final_scores_and_the_config_keys_that_differ(runs, tmp_path):
    """Hostile names are text, and the page needs no network."""
    runs[0].root.rename(tmp_path / "<script>x$name")
    page = page_of([Workdir(str(tmp_path / "<script>x$name"), create=False), runs[1]])
    assert page.row("last scores") == page.row("key") == ["<script>x$name", "second"]
    assert page.row("steps") == ["40", "40"]
    assert page.row("loss, nats") == ["4.2500", "8.5000"]
    assert page.row("best evaluation loss, nats") == ["4.1250", "8.2500"]
    assert page.row("training loss, nats") == ["4.0000", "8.0000"]
    assert page.row("tokens read") == ["15,360", "30,720"]
    assert page.row("wall-clock") == ["5 min 31 s", "1 min 13 s"]
    assert page.row("data.global_batch") == ["8", "16"]
    assert page.row("corpus.sources") == ['["docstrings"]', '["text:<b>*"]']
    assert [row[0] for row in page.rows if "." in row[0]] == ["corpus.sources", "data.global_batch"]
    assert len(page.images) == 3 and all(image.startswith("data:image/svg+xml;base64,") for image in page.images)
    assert not {"script", "iframe", "link", "b"} & set(page.tags) and "<script>x$name" in page.text


def test_a_key_that_one_config_lacks_differs(runs):
    config = json.loads(runs[0].config.read_text())
    config["mine"]["power"] = 0.5
    runs[0].config.write_text(json.dumps(config))
    assert page_of(runs).row("mine.power") == ["0.5", "no such key"]
    del config["pod"]["hang"]
    runs[1].config.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"second/config\.json: has no pod\.hang"):
        page_of(runs)


def test_runs_without_config_or_times_and_classifiers(runs):
    """A classifier reads no tokens of shards."""
    config = json.loads(runs[1].config.read_text())
    config["classify"]["train"] = "csv:a.csv"
    runs[1].config.write_text(json.dumps(config))
    report.write(runs[1])
    assert "Tokens read" not in runs[1].report.read_text()
    assert page_of(runs).row("tokens read") == ["15,360", ""]
    runs[1].config.unlink()
    runs[1].timing.unlink()
    page = page_of(runs)
    assert page.row("tokens read") == ["15,360", ""]
    assert page.row("wall-clock") == ["5 min 31 s", ""]
    assert page.row("loss, nats") == ["4.2500", "8.5000"]


def test_the_unit_of_regressions_and_names_that_begin_with_an_underscore(runs):
    """matplotlib leaves such a name out of its legend."""
    runs[1].metrics.write_text("".join(f"{json.dumps(line | {'mse': line['loss']})}\n" for line in TWICE))
    assert page_of(runs[1:]).row("best evaluation loss, squared error") == ["8.2500"]
    figure = report.draw_losses({"_first": report.gather(runs[0]), "_$1": report.gather(runs[1])})["Loss over steps"]
    assert figure.axes[0].get_ylabel() == "loss, nats per prediction or squared error"
    assert page_of(runs).row("loss, nats or squared error") == ["4.2500", "8.5000"]
    assert [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()] == ["_first", r"_\$1"]


def test_names_tell_runs_apart():
    assert report._distinct_names(["/a/x", "/b/x", "gs://c/x"]) == ["a/x", "b/x", "c/x"]


def test_what_can_not_be_compared_is_refused(runs, tmp_path):
    with pytest.raises(InputError, match=r"/first: .*twice"):
        report.compare([runs[0], runs[1], runs[0]])
    (tmp_path / "link").symlink_to(runs[0].root)
    with pytest.raises(InputError, match="twice"):
        report.compare([*runs, Workdir(str(tmp_path / "link"))])
    with pytest.raises(InputError, match=r"empty/metrics\.jsonl"):
        report.compare([runs[0], Workdir(str(tmp_path / "empty"))])
    with pytest.raises(InputError, match="9 runs, at most 8"):
        report.compare([Workdir(str(tmp_path / str(n))) for n in range(9)])
    assert not (runs[0].root / "compare.html").exists()


def test_the_command(runs, capsys):
    arguments = ["report", f"--workdir={runs[0].root}", "--compare", str(runs[1].root)]
    assert __main__.main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(runs[0].root / "compare.html")
    assert not runs[0].report.exists(), "the page of the one run is another"
    assert __main__.main([*arguments, f"{runs[1].root}x"]) == 2
    assert f"{runs[1].root}x" in capsys.readouterr().err
