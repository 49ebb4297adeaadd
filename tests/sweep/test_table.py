"""The table of a sweep: medians over seeds, the best by the metric's rule, and the curves of its page."""

import json
import math
import pathlib

import pytest

from mlm.errors import InputError
from mlm.paths import UPath
from mlm.sweep import grid, table
from mlm.sweep.runs import Outcome, Run
from tests.support.tiny import tiny_config

SCORES = {(0.1, 0): 3.0, (0.1, 1): 1.0, (0.1, 2): 1.5, (0.01, 0): 2.0, (0.01, 1): 2.5, (0.01, 2): None}


def sweep(root: pathlib.Path, command: str = "train") -> tuple[list[grid.Case], list[Outcome]]:
    """Runs whose logs hold the SCORES as their best saved loss; the one without a score has failed."""
    cases, outcomes = [], []
    for (rate, seed), score in SCORES.items():
        values = {"optimizer.learning_rate": rate, "train.seed": seed}
        run = Run(grid.name(values), str(root / grid.name(values)), (command,))
        losses = {1: 9.0, 2: score, 3: None, 4: 0.5}
        evals = [{"kind": "eval", "step": step, "loss": loss} for step, loss in losses.items()]
        saved = [{"kind": "checkpoint", "step": step} for step in (1, 2, 3)]  # not the last evaluation, the lowest
        (root / run.name).mkdir()
        for file, lines in (("metrics.jsonl", evals), ("timing.jsonl", saved)):
            (root / run.name / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        cases.append(grid.Case(values, values, run))
        outcomes.append(Outcome(run, 2 * (score is None), 60.0, "the last line"))
    return cases, outcomes


def test_median_spread_and_best(tmp_path, capsys):
    table.write(UPath(tmp_path), *sweep(tmp_path), "")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["loss:", "the", "lowest", "median", "over", "seeds", "is", "best"]
    assert lines[2] == ["0.1", "1.5000", "1.0000", "3.0000", "3", "best"]
    assert lines[3] == ["0.01", "2.2500", "2.0000", "2.5000", "2"]
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert [group["best"] for group in content["groups"]] == [True, False]
    assert content["runs"][0]["scores"] == {"step": 2, "loss": 3.0}, "of the best checkpoint"
    assert (content["runs"][-1]["code"], content["runs"][-1]["scores"]) == (2, {})
    page = (tmp_path / "sweep.html").read_text()
    assert "loss over optimizer.learning_rate" in page and "<td>2.2500</td>" in page and "1 min 00 s" in page


def test_a_metric_of_choice(tmp_path, capsys):
    cases, outcomes = sweep(tmp_path)
    table.write(UPath(tmp_path), cases, outcomes, "step")
    assert "step: the highest median over seeds is best" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--metric=f1: .*loss, step"):
        table.write(UPath(tmp_path), cases, outcomes, "f1")
    table.check_metric("loss", cases[0]._replace(run=cases[-1].run))  # not finite
    with pytest.raises(InputError, match=r"--metric=f1: learning_rate=0\.1,seed=0 .*loss, step"):
        table.check_metric("f1", cases[0])
    assert {table.sign(name) for name in ("news/loss", "perplexity", "mse", "loss_se_records")} == {-1}
    assert {table.sign(name) for name in ("accuracy", "matthews")} == {1}


@pytest.mark.parametrize(("kind", "unit"), [("classes", 1.0), ("regression", 4.0), ("tokens", None)])
def test_classifiers_are_compared_with_the_best_by_their_rows(tmp_path, capsys, kind, unit):
    cases, outcomes = sweep(tmp_path, "classify")
    cases = [case._replace(config=case.config | {"classify.kind": kind}) for case in cases]
    for case in cases[:5]:
        wrong = 0 if case.values["optimizer.learning_rate"] == 0.1 else 40
        lines = ["index\tprediction\tlabel", *(f"{row}\t{3 if row < wrong else 1}\t1" for row in range(200))]
        (pathlib.Path(case.run.folder) / "predictions").mkdir()
        (pathlib.Path(case.run.folder) / "predictions" / "validation.tsv").write_text("\n".join(lines) + "\n")
    table.write(UPath(tmp_path), cases, outcomes, "")
    best, other = json.loads((tmp_path / "sweep.json").read_text())["groups"]
    assert best["best"] and best["difference"] is None
    found = other["difference"]
    if unit is None:
        assert found is None, "the rows of its file are words"
    else:
        assert found["difference"] == pytest.approx(-0.2 * unit) and found["low"] < -0.2 * unit < found["high"] < 0
        assert f"{-0.2 * unit:.4f} (" in capsys.readouterr().out


@pytest.mark.parametrize("split", ["test", "validation"])
def test_scores_of_a_test_split_choose_nothing(tmp_path, capsys, split):
    cases, outcomes = [], []
    for step, loss in ((1, 2.0), (2, 1.0)):
        values = {"split": split, "step": step}
        run = Run(grid.name(values), str(tmp_path / grid.name(values)), ("evaluate", f"--split={split}"))
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "output.txt").write_text(json.dumps({"split": split, "loss": loss}) + "\n")
        cases.append(grid.Case(values, values, run))
        outcomes.append(Outcome(run, 0, 1.0, ""))
    table.write(UPath(tmp_path), cases, outcomes, "")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:4]]
    assert [row[2] for row in rows] == ["2.0000", "1.0000"] and ("best" in rows[1]) == (split == "validation")
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert [group["best"] for group in content["groups"]] == [False, split == "validation"]
    assert ("against the best" in (tmp_path / "sweep.html").read_text()) == (split == "validation")


def test_without_a_run_that_is_done_there_is_no_table(tmp_path, capsys):
    cases, outcomes = sweep(tmp_path)
    table.write(UPath(tmp_path), cases, [outcome._replace(code=2) for outcome in outcomes], "")
    assert capsys.readouterr().out == "" and json.loads((tmp_path / "sweep.json").read_text())["groups"] == []


def test_scores_that_evaluate_has_printed(tmp_path):
    run = Run("a", str(tmp_path), ("evaluate",))
    scores = {"split": "x", "loss": 2.0, "other": math.nan, "original": {"accuracy": 0.5}, "phenomena": {"a": {"b": 1}}}
    (tmp_path / "output.txt").write_text(f"{json.dumps({'loss': 1.0})}\nwarning\n{json.dumps(scores)}\n  a summary\n")
    assert table.read_scores(grid.Case({}, {}, run)) == {"loss": 2.0, "original.accuracy": 0.5}


def test_a_classifier_is_scored_at_the_checkpoint_that_its_metric_chooses(tmp_path):
    lines = [(1, 0.5, 0.9), (2, 0.7, 0.2), (3, 0.7, 0.1)]
    entries = ({"kind": "eval", "step": s, "accuracy": a, "f1": a, "matthews": m, "loss": 1.0} for s, a, m in lines)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    saved = ({"kind": "checkpoint", "step": step} for step, *_ in lines)
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in saved))
    run = Run("a", str(tmp_path), ("classify",))
    choices = [((), "loss", 3), (("matthews",), "matthews", 1), (("f1", "matthews"), "f1 + matthews", 1)]
    for metrics, name, step in choices:
        (tmp_path / "config.json").write_text(tiny_config(f"classify.metric={metrics!r}").to_json())
        found = table.read_scores(grid.Case({}, {}, run))
        assert found["step"] == step and next(iter(found)) == name
    assert found["f1 + matthews"] == pytest.approx(0.7)


def test_curves_over_a_varied_number_for_each_choice_of_the_other_keys():
    pairs = [(a, b) for a in (100, 1) for b in ("", "$x")]
    groups = [table.Group({"a": a, "b": b}, [a + len(b) + more for more in (0, 2.0, 1.0)], []) for a, b in pairs]
    figures = table.draw(groups, "accuracy")
    assert list(figures) == ["accuracy over a"], "b is no number"
    axes = figures["accuracy over a"].axes[0]
    points = [(list(line.lines[0].get_xdata()), list(line.lines[0].get_ydata())) for line in axes.containers]
    assert points == [([1, 100], [2, 101]), ([1, 100], [4, 103])]
    spread = [[segment[:, 1].tolist() for segment in line.lines[2][0].get_segments()] for line in axes.containers]
    assert spread[0] == [[1, 3], [100, 102]], "from the lowest to the highest score"
    names = [text.get_text() for text in figures["accuracy over a"].legends[0].get_texts()]
    assert axes.get_xscale() == "log" and names == ["b=", r"b=\$x"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "100"]
    groups = [table.Group({"a": a, "b": b}, [a + b], []) for a in range(12) for b in range(9)]
    assert list(table.draw(groups, "loss")) == ["loss over a, 8 of 9 curves", "loss over b, 8 of 12 curves"]
    assert table.draw([table.Group({"a": 1}, [1.0], [])], "loss") == {}, "one value makes no curve"
