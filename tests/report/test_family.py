"""The family of a run: its tree, the tokens read on the way, the scores of its checkpoints."""

import json
from pathlib import Path

import pytest

from mlm import config as configs
from mlm.pretrained import checkpoint_files
from mlm.report import report
from mlm.report.family import INDENT, Family
from mlm.workdir import Workdir
from tests.support.reports import Cells

ROWS = 8 * 64  # tokens in a step of the trunk


def make_run(root: Path, *overrides: str, steps: int, milestones=()) -> Workdir:
    """Writes what a run leaves behind, but for its arrays."""
    workdir = Workdir(str(root))
    sizes = ("data.global_batch=8", "shards.length=64", f"train.steps={steps}", f"checkpoint.milestones={milestones!r}")
    config = configs.load("configs/base.py", [*sizes, *overrides])
    workdir.config.write_text(config.to_json())
    meta = {"format": checkpoint_files.FORMAT, "config": config.to_dict(), "milestones": list(milestones)}
    for step in {*milestones, steps}:
        file = workdir.checkpoints / str(step) / "meta" / "metadata"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(meta))
    lines = [{"kind": "eval", "step": step, "loss": 5 - step / 100, "accuracy": 0.1} for step in (*milestones, steps)]
    workdir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


@pytest.fixture
def family(tmp_path) -> dict[str, Workdir]:
    trunk = make_run(tmp_path / "trunk", steps=60, milestones=(20, 40))
    table = {"protocol": "quick", "model": "trunk", "device_hours": 1.5, "tasks": {}}
    tables = {step: table | {"average": step / 100} for step in (20, 60)}
    trunk.glue.write_text(json.dumps(tables))
    half = make_run(tmp_path / "half", f"train.branch_from={trunk.root}@40", "shards.length=32", steps=80)
    pairs = {"pairs": "jsonl:blimp/*.jsonl", "original": {"accuracy": 0.5}, "within_word": {"accuracy": 0.875}}
    content = {"pairs jsonl:blimp/*.jsonl, step 80": pairs, "validation, token masks, step 80": {"loss": 4.0}}
    (half.root / "evaluation.json").write_text(json.dumps(content))
    twice = make_run(tmp_path / "twice", f"train.branch_from={half.root}@80", "optimizer.b2=0.9", steps=100)
    make_run(tmp_path / "stranger", steps=10)
    for name, content in (("damaged", "{"), ("export", '{"model_type": "roberta"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    return {workdir.root.name: workdir for workdir in (trunk, half, twice)}


@pytest.mark.parametrize("length", [(), ("train.steps=0", "train.epochs=1")])
def test_tokens_of_a_run_in_stages(tmp_path, length):
    """Half of its 60 steps read 4 rows in place of 8, whether it counts steps or epochs."""
    stages = ("data.lanes=4", "data.batch_stages=((4, 30),)")
    run = make_run(tmp_path / "run", *stages, *length, steps=60, milestones=(20, 40))
    assert [row[1] for row in Family(run).table()[2:]] == [f"{n * ROWS:,}" for n in (10, 25, 45)]


def test_the_tree_of_a_run_in_the_middle(family, tmp_path):
    head, *rows = Family(family["half"]).table()
    assert head == ("", "tokens read", "loss, nats", "GLUE quick", "pairs jsonl:blimp/*.jsonl", "changes")
    half, branched = 40 * ROWS + 40 * ROWS // 2, 40 * ROWS + 40 * ROWS // 2 + 20 * ROWS
    changed = "checkpoint.milestones: (20, 40) -> (), shards.length: 64 -> 32, train.steps: 60 -> 80"
    again = "optimizer.b2: 0.98 -> 0.9, shards.length: 32 -> 64, train.steps: 80 -> 100"
    assert rows == [
        ("trunk", "", "", "", "", ""),
        (INDENT + "step 20", f"{20 * ROWS:,}", "4.8000", "20.0%", "", ""),
        (INDENT + "step 40", f"{40 * ROWS:,}", "4.6000", "", "", ""),
        (2 * INDENT + "half", "", "", "", "", changed),
        (3 * INDENT + "step 80", f"{half:,}", "4.2000", "", "87.5%", ""),
        (4 * INDENT + "twice", "", "", "", "", again),
        (5 * INDENT + "step 100", f"{branched:,}", "4.0000", "", "", ""),
        (INDENT + "step 60", f"{60 * ROWS:,}", "4.4000", "60.0%", "", ""),
    ]
    assert Family(family["trunk"]).table() == Family(family["twice"]).table() == [head, *rows]
    (tmp_path / "moved").mkdir()
    for name, workdir in family.items():
        workdir.root.rename(tmp_path / "moved" / name)
    assert Family(Workdir(str(tmp_path / "moved" / "half"))).table() == [head, *rows], "moved together"


def test_scores_over_the_tokens_of_the_way(family):
    """Those of the trunk count up to the step where the branch leaves it."""
    half = 40 * ROWS + 40 * ROWS // 2
    assert Family(family["half"]).curves() == {
        "GLUE quick": ((20 * ROWS,), (20.0,)),
        "pairs jsonl:blimp/*.jsonl": ((half,), (87.5,)),
    }
    assert Family(family["trunk"]).curves() == {"GLUE quick": ((20 * ROWS, 60 * ROWS), (20.0, 60.0))}


def test_a_branch_without_its_trunk_and_a_run_alone(family, tmp_path):
    family["trunk"].root.rename(tmp_path / "gone")
    rows = Family(family["half"]).table()[1:]
    assert [row[0].strip() for row in rows] == ["half", "step 80", "twice", "step 100"]
    assert rows[0][-1] == f"from {family['trunk'].root}@40"
    assert [row[1] for row in rows] == [""] * 4 and Family(family["half"]).curves() == {}, "tokens: not known"
    report.write(family["half"])
    assert "Tokens read" not in family["half"].report.read_text()
    assert Family(Workdir(str(tmp_path / "stranger"))).table() == []


def test_the_page_shows_the_tree_and_the_curve(family):
    report.write(family["half"])
    page = Cells(family["half"].report.read_text())
    assert [f"{INDENT}step 20", f"{20 * ROWS:,}", "4.8000", "20.0%", "", ""] in page.rows
    assert page.row("Tokens read") == [f"{40 * ROWS + 40 * ROWS // 2:,} in 80 steps"], "the branch's rows are shorter"
    assert "Downstream scores" in page.text and "Milestones and branches" in page.text


def test_runs_whose_names_lead_back_to_them_are_branches_of_what_is_gone(tmp_path):
    """The run that a branch came from is gone; the folder of that name beside it is the branch itself, or another."""
    for folder, names in (("one", ("a",)), ("two", ("a", "b"))):
        for name, source in zip(names, reversed(names), strict=True):
            start = f"{tmp_path}/gone/{source}@20"
            make_run(tmp_path / folder / name, f"train.branch_from={start}", steps=60, milestones=(20,))
        rows = Family(Workdir(str(tmp_path / folder / "a"))).table()[1:]
        assert [row[0].strip(INDENT) for row in rows if "step" not in row[0]] == list(reversed(names))
        assert rows[0][-1] == f"from {tmp_path}/gone/{names[0]}@20" and rows[-1][1] == "", "unknown tokens"
