"""The table of a sweep: medians over seeds, the best by the metric's rule, and the curves of its page."""

import json
import math
import pathlib

import pytest

from mlm.errors import InputError
from mlm.paths import UPath
from mlm.report import plots
from mlm.sweep import grid, table
from mlm.sweep.runs import Outcome, Trial
from tests.support.tiny import tiny_config

SCORES = {
    (0.1, 0): 3.0,
    (0.1, 1): 1.0,
    (0.1, 2): 1.5,
    (0.01, 0): 2.0,
    (0.01, 1): 2.5,
    (0.01, 2): None,
}


def outcome_of(root: pathlib.Path, values: dict, command: str = "train", code: int = 0) -> Outcome:
    name = grid.name(values)
    (root / name).mkdir(exist_ok=True)
    return Outcome(Trial(name, str(root / name), (command,), values), code, 60.0, "the last line")


@pytest.fixture
def outcomes(tmp_path) -> list[Outcome]:
    """Runs whose logs hold the SCORES as their best saved loss; the one without a score has failed."""
    done = []
    for (rate, seed), score in SCORES.items():
        values = {"optimizer.learning_rate": rate, "train.seed": seed}
        done.append(outcome_of(tmp_path, values, code=2 * (score is None)))
        losses = {1: 9.0, 2: score, 3: None, 4: 0.5}
        evals = [{"kind": "eval", "step": step, "loss": loss} for step, loss in losses.items()]
        # not the last evaluation, the lowest
        saved = [{"kind": "checkpoint", "step": step} for step in (1, 2, 3)]
        for file, lines in (("metrics.jsonl", evals), ("timing.jsonl", saved)):
            path = pathlib.Path(done[-1].trial.folder) / file
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return done


def test_median_spread_and_best(tmp_path, outcomes, capsys):
    table.write(UPath(tmp_path), outcomes, "")
    rule, _, best, other, *_ = capsys.readouterr().out.splitlines()
    assert rule == "loss: the lowest median over seeds is best"
    assert best.split() == ["0.1", "1.5000", "1.0000", "3.0000", "3", "best"]
    assert other.split() == ["0.01", "2.2500", "2.0000", "2.5000", "2"]
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert [group["best"] for group in content["groups"]] == [True, False]
    assert content["runs"][0]["scores"] == {"step": 2, "loss": 3.0}, "of the best checkpoint"
    assert (content["runs"][-1]["code"], content["runs"][-1]["scores"]) == (2, {})
    page = (tmp_path / "sweep.html").read_text()
    assert "loss over optimizer.learning_rate" in page and "<td>2.2500</td>" in page


def test_a_metric_of_choice(tmp_path, outcomes, capsys):
    table.write(UPath(tmp_path), outcomes, "step")
    assert "step: the highest median over seeds is best" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--metric=f1: .*loss, step"):
        table.write(UPath(tmp_path), outcomes, "f1")
    signs = {
        "news/loss": -1,
        "perplexity": -1,
        "mse": -1,
        "loss_se_records": -1,
        "accuracy": 1,
        "matthews": 1,
    }
    assert {name: table.sign(name) for name in signs} == signs


@pytest.mark.parametrize("split", ["test", "validation"])
def test_scores_of_a_test_split_choose_nothing(tmp_path, capsys, split):
    outcomes = []
    for step, loss in ((1, 2.0), (2, 1.0)):
        outcomes.append(outcome_of(tmp_path, {"split": split, "step": step}, "evaluate"))
        output = pathlib.Path(outcomes[-1].trial.folder) / "output.txt"
        output.write_text(json.dumps({"split": split, "loss": loss}) + "\n")
    table.write(UPath(tmp_path), outcomes, "")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:4]]
    assert [row[2] for row in rows] == ["2.0000", "1.0000"] and ("best" in rows[1]) == (
        split == "validation"
    )
    groups = json.loads((tmp_path / "sweep.json").read_text())["groups"]
    assert [group["best"] for group in groups] == [False, split == "validation"]


def test_without_a_run_that_is_done_there_is_no_table(tmp_path, outcomes, capsys):
    table.write(UPath(tmp_path), [outcome._replace(code=2) for outcome in outcomes], "")
    assert (
        capsys.readouterr().out == ""
        and json.loads((tmp_path / "sweep.json").read_text())["groups"] == []
    )


def test_scores_that_evaluate_has_printed(tmp_path):
    trial = outcome_of(tmp_path, {}, "evaluate").trial
    scores = {
        "split": "x",
        "loss": 2.0,
        "other": math.nan,
        "original": {"accuracy": 0.5},
        "phenomena": {"a": {"b": 1}},
    }
    printed = f"{json.dumps({'loss': 1.0})}\nwarning\n{json.dumps(scores)}\n  a summary\n"
    (pathlib.Path(trial.folder) / "output.txt").write_text(printed)
    assert table.read_scores(trial) == {"loss": 2.0, "original.accuracy": 0.5}


@pytest.mark.parametrize(
    ("metrics", "name", "step"),
    [((), "loss", 3), (("matthews",), "matthews", 1), (("f1", "matthews"), "f1 + matthews", 1)],
)
def test_a_classifier_is_scored_at_the_checkpoint_that_its_metric_chooses(
    tmp_path, metrics, name, step
):
    trial = outcome_of(tmp_path, {}, "classify").trial
    lines = [(1, 0.5, 0.9), (2, 0.7, 0.2), (3, 0.7, 0.1)]
    evals = [
        {"kind": "eval", "step": s, "f1": f1, "matthews": m, "loss": 1.0} for s, f1, m in lines
    ]
    saved = [{"kind": "checkpoint", "step": s} for s, *_ in lines]
    for file, entries in (("metrics.jsonl", evals), ("timing.jsonl", saved)):
        (pathlib.Path(trial.folder) / file).write_text(
            "".join(json.dumps(entry) + "\n" for entry in entries)
        )
    (pathlib.Path(trial.folder) / "config.json").write_text(
        tiny_config(f"classify.metric={metrics!r}").to_json()
    )
    scores = table.read_scores(trial)
    assert scores["step"] == step and next(iter(scores)) == name
    assert scores.get("f1 + matthews", 0.7) == pytest.approx(0.7)


def test_curves_over_a_varied_number_for_each_choice_of_the_other_keys():
    pairs = [(a, b) for a in (100, 1) for b in ("", "$x")]
    groups = [
        table.Group({"a": a, "b": b}, [], [a + len(b) + more for more in (0, 2.0, 1.0)])
        for a, b in pairs
    ]
    ((title, figure),) = table.draw(groups, "accuracy", plots).items()
    assert title == "accuracy over a", "b is no number"
    (axes,) = figure.axes
    points = [
        (list(line.lines[0].get_xdata()), list(line.lines[0].get_ydata()))
        for line in axes.containers
    ]
    assert points == [([1, 100], [2, 101]), ([1, 100], [4, 103])]
    segments = axes.containers[0].lines[2][0].get_segments()
    assert [segment[:, 1].tolist() for segment in segments] == [[1, 3], [100, 102]], (
        "from the lowest to the highest"
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["b=", r"b=\$x"]
    assert axes.get_xscale() == "log" and [tick.get_text() for tick in axes.get_xticklabels()] == [
        "1",
        "100",
    ]
    groups = [table.Group({"a": a, "b": b}, [], [a + b]) for a in range(12) for b in range(9)]
    assert [
        len(figure.axes[0].containers) for figure in table.draw(groups, "loss", plots).values()
    ] == [9, 12]
    assert table.draw([table.Group({"a": 1}, [], [1.0])], "loss", plots) == {}, (
        "one value makes no curve"
    )
