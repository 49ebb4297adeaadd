"""What a classifier confuses: the whole table of a few classes, and the worst pairs of many."""

import json

from mlm.report import report
from tests.support.reports import Cells, make_workdir, page_of

FEW = {"split": "test", "step": 7, "scores": {"rows": 6}, "labels": ["a", "<b>"], "confusion": [[2, 1], [3, 0]]}
MANY = FEW | {
    "labels": [f"l{n}" for n in range(40)],
    "confusion": [[n * (n == m + 1) for n in range(40)] for m in range(40)],
}


def page_with(content: dict, folder) -> Cells:
    workdir = make_workdir(folder)
    workdir.classification.write_text(json.dumps(content))
    return page_of(workdir)


def test_a_small_table_and_the_worst_pairs_of_a_large_one(tmp_path):
    assert report.confused_pairs(FEW, 5) == [("<b>", "a", 3, 3), ("a", "<b>", 1, 3)]
    page = page_with(FEW, tmp_path / "few")
    assert page.row("true, and predicted:") == ["a", "<b>"] and page.row("<b>") == ["3", "0"]
    assert "Best checkpoint, after 7 steps, on the 6 test rows." in page.text
    rows = page_with(MANY, tmp_path / "many").rows
    shown = rows[rows.index(["true", "predicted", "rows", "of the true"]) + 1 :][: report.PAIRS + 1]
    assert shown[0] == ["l38", "l39", "39", "100%"] and [len(row) for row in shown] == [4] * report.PAIRS + [3]


def test_nothing_confused_is_not_shown(tmp_path):
    assert "Confusion" not in page_with(FEW | {"confusion": [[3, 0], [0, 3]]}, tmp_path / "run").text
    assert "Confusion" not in page_of(make_workdir(tmp_path / "other")).text
