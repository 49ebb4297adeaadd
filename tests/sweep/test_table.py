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

SCORES = {0.1: (3.0, 1.0, 1.5), 0.01: (2.0, 2.5, None)}  # of each rate, by seed


def outcome_of(root: pathlib.Path, values: dict, command: str = "train", code: int = 0) -> Outcome:
    name = grid.name(values)
    (root / name).mkdir(exist_ok=True)
    return Outcome(Trial(name, str(root / name), (command,), values), code, 60.0, "the last line")


def write_logs(folder: str, evals: list[dict], saved: int) -> None:
    """Evaluations after steps 1, 2, ..., of which the first ones are saved."""
    lines = [{"kind": "eval", "step": step} | scores for step, scores in enumerate(evals, 1)]
    checkpoints = [{"kind": "checkpoint", "step": step + 1} for step in range(saved)]
    for file, content in (("metrics.jsonl", lines), ("timing.jsonl", checkpoints)):
        text = "".join(json.dumps(line) + "\n" for line in content)
        (pathlib.Path(folder) / file).write_text(text)


@pytest.fixture
def outcomes(tmp_path) -> list[Outcome]:
    """Runs whose logs hold the SCORES as their best saved loss; the one without a score has failed."""
    done = []
    for rate, scores in SCORES.items():
        for seed, score in enumerate(scores):
            values = {"optimizer.learning_rate": rate, "train.seed": seed}
            done.append(outcome_of(tmp_path, values, code=2 * (score is None)))
            # not the last evaluation, the lowest of those that are saved
            evals = [{"loss": loss} for loss in (9.0, score, None, 0.5)]
            write_logs(done[-1].trial.folder, evals, saved=3)
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
    lower = ("news/loss", "perplexity", "mse", "loss_se_records")
    assert [table.sign(name) for name in (*lower, "accuracy", "matthews")] == [-1] * 4 + [1] * 2


@pytest.mark.parametrize("split", ["test", "validation"])
def test_scores_of_a_test_split_choose_nothing(tmp_path, split):
    outcomes = []
    for step, loss in ((1, 2.0), (2, 1.0)):
        outcomes.append(outcome_of(tmp_path, {"split": split, "step": step}, "evaluate"))
        output = pathlib.Path(outcomes[-1].trial.folder) / "output.txt"
        output.write_text(json.dumps({"split": split, "loss": loss}) + "\n")
    table.write(UPath(tmp_path), outcomes, "")
    groups = json.loads((tmp_path / "sweep.json").read_text())["groups"]
    assert [group["best"] for group in groups] == [False, split == "validation"]


def test_without_a_run_that_is_done_there_is_no_table(tmp_path, outcomes, capsys):
    table.write(UPath(tmp_path), [outcome._replace(code=2) for outcome in outcomes], "")
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "sweep.json").read_text())["groups"] == []


def test_scores_that_evaluate_has_printed(tmp_path):
    trial = outcome_of(tmp_path, {}, "evaluate").trial
    scores = {"split": "x", "loss": 2.0, "other": math.nan, "original": {"accuracy": 0.5}}
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
    pairs = ((0.5, 0.9), (0.7, 0.2), (0.7, 0.1))
    evals = [{"f1": f1, "matthews": matthews, "loss": 1.0} for f1, matthews in pairs]
    write_logs(trial.folder, evals, saved=3)
    config = tiny_config(f"classify.metric={metrics!r}")
    (pathlib.Path(trial.folder) / "config.json").write_text(config.to_json())
    scores = table.read_scores(trial)
    assert scores["step"] == step and next(iter(scores)) == name
    assert scores.get("f1 + matthews", 0.7) == pytest.approx(0.7)


def test_curves_over_a_varied_number_for_each_choice_of_the_other_keys():
    groups = [
        table.Group({"a": a, "b": b}, [], [a + len(b) + more for more in (0, 2.0, 1.0)])
        for a in (100, 1)
        for b in ("", "$x")
    ]
    ((title, figure),) = table.draw(groups, "accuracy", plots).items()
    assert title == "accuracy over a", "b is no number"
    (axes,) = figure.axes
    (line, _, (bars,)), (other, *_) = (container.lines for container in axes.containers)
    assert line.get_xydata().tolist() == [[1, 2], [100, 101]]
    assert other.get_xydata().tolist() == [[1, 4], [100, 103]]
    ranges = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ranges == [[1, 3], [100, 102]], "from the lowest to the highest"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["b=", r"b=\$x"]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "100"]
    assert table.draw(groups[:1], "loss", plots) == {}, "one value makes no curve"
