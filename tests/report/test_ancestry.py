"""A run and what it branched off from: the tokens read on the way, the scores of its checkpoints."""

import json
from pathlib import Path

import pytest

from mlm import config as configs
from mlm.pretrained import checkpoint_files
from mlm.report import family, report, summary
from mlm.report.family import INDENT
from mlm.workdir import Workdir
from tests.support.reports import Cells

ROWS = 8 * 64  # tokens in a step of the trunk
HALF = 40 * ROWS + 40 * ROWS // 2  # tokens read by the branch with shorter rows


def make_run(root: Path, *overrides: str, steps: int, milestones: tuple[int, ...] = ()) -> Workdir:
    """Writes what a run leaves behind, but for its arrays."""
    workdir = Workdir(str(root))
    sizes = ("data.global_batch=8", "shards.length=64", f"train.steps={steps}", f"checkpoint.milestones={milestones!r}")
    config = configs.load("configs/base.py", [*sizes, *overrides])
    workdir.config.write_text(config.to_json())
    meta = {"format": checkpoint_files.FORMAT, "config": config.to_dict(), "milestones": milestones}
    if parent := configs.read(Path(config.train.branch_from.partition("@")[0]) / "config.json"):
        meta["branch"] = {"config_changes": configs.diff(parent, config, {"train.branch_from"}.__contains__)}
    for step in {*milestones, steps}:
        file = workdir.checkpoints / str(step) / "meta" / "metadata"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(meta))
    lines = [{"kind": "eval", "step": step, "loss": 5 - step / 100, "accuracy": 0.1} for step in (*milestones, steps)]
    workdir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


@pytest.fixture
def runs(tmp_path) -> dict[str, Workdir]:
    """A trunk, a branch of it, and a branch of that one."""
    trunk = make_run(tmp_path / "trunk", steps=60, milestones=(20, 40))
    table = {"protocol": "quick", "model": "trunk", "device_hours": 1.5, "tasks": {}}
    trunk.glue.write_text(json.dumps({step: table | {"average": step / 100} for step in (20, 60)}))
    half = make_run(tmp_path / "half", f"train.branch_from={trunk.root}@40", "shards.length=32", steps=80)
    pairs = {"pairs": "jsonl:blimp/*.jsonl", "original": {"accuracy": 0.5}, "within_word": {"accuracy": 0.875}}
    content = {"pairs jsonl:blimp/*.jsonl, step 80": pairs, "validation, token masks, step 80": {"loss": 4.0}}
    (half.root / "evaluation.json").write_text(json.dumps(content))
    twice = make_run(tmp_path / "twice", f"train.branch_from={half.root}@80", "optimizer.b2=0.9", steps=100)
    return {workdir.root.name: workdir for workdir in (trunk, half, twice)}


def tokens(root: Path, step: int) -> int | None:
    return summary.tokens_read(summary.ancestry(root), step)


@pytest.mark.parametrize("length", [(), ("train.steps=0", "train.epochs=1")])
def test_tokens_of_a_run_in_stages(tmp_path, length):
    """Half of its 60 steps read 4 rows in place of 8, whether it counts steps or epochs."""
    run = make_run(tmp_path / "run", "data.lanes=4", "data.batch_stages=((4, 30),)", *length, steps=60)
    assert [tokens(run.root, step) for step in (20, 40, 60)] == [n * ROWS for n in (10, 25, 45)]


def test_tokens_read_on_the_way_of_branches(runs, tmp_path):
    """Wherever the folders are moved together; without the trunk they are not known."""
    expected = [("trunk", 20, 20 * ROWS), ("half", 80, HALF), ("twice", 100, HALF + 20 * ROWS)]
    assert [tokens(runs[name].root, step) for name, step, _ in expected] == [count for *_, count in expected]
    (tmp_path / "moved").mkdir()
    for name, workdir in runs.items():
        workdir.root.rename(tmp_path / "moved" / name)
    moved = [tokens(tmp_path / "moved" / name, step) for name, step, _ in expected]
    assert moved == [count for *_, count in expected]
    (tmp_path / "moved" / "trunk").rename(tmp_path / "gone")
    half = Workdir(str(tmp_path / "moved" / "half"))
    assert tokens(half.root, 80) is None and summary.curves(summary.ancestry(half.root)) == {}
    report.write(half)
    assert "Tokens read" not in half.report.read_text()


def test_scores_over_the_tokens_of_the_way(runs):
    """Those of the trunk count up to the step where the branch leaves it."""
    assert summary.curves(summary.ancestry(runs["half"].root)) == {
        "GLUE quick": ((20 * ROWS,), (20.0,)),
        "pairs jsonl:blimp/*.jsonl": ((HALF,), (87.5,)),
    }
    trunk = {"GLUE quick": ((20 * ROWS, 60 * ROWS), (20.0, 60.0))}
    assert summary.curves(summary.ancestry(runs["trunk"].root)) == trunk
    report.write(runs["half"])
    page = Cells(runs["half"].report.read_text())
    assert page.row("Tokens read") == [f"{HALF:,} in 80 steps"] and "Downstream scores" in page.text


def test_runs_whose_names_lead_back_to_them(tmp_path):
    """The run that a branch came from is gone; the folder of that name beside it is the branch itself, or another."""
    for folder, names in (("one", ("a",)), ("two", ("a", "b"))):
        for name, source in zip(names, reversed(names), strict=True):
            make_run(tmp_path / folder / name, f"train.branch_from={tmp_path}/gone/{source}@20", steps=60)
        assert tokens(tmp_path / folder / "a", 60) is None
        rows = table(Workdir(str(tmp_path / folder / "a")))[1:]
        assert [row[0].strip(INDENT) for row in rows if "step" not in row[0]] == (["b", "a"] if names[1:] else [])


def table(workdir: Workdir) -> list[tuple[str, ...]]:
    return family.tree(summary.ancestry(workdir.root))


def test_the_tree_of_a_run_in_the_middle(runs, tmp_path):
    """The same for each of its runs; folders beside them that hold no branch change nothing, as later keys of one."""
    later = configs.replace(configs.read(runs["trunk"].config), {"checkpoint.keep": 9})  # as a resumed run may
    runs["trunk"].config.write_text(later.to_json())
    make_run(tmp_path / "stranger", steps=10)
    for name, content in (("damaged", "{"), ("export", '{"model_type": "roberta"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    head = ("", "tokens read", "loss, nats", "GLUE quick", "pairs jsonl:blimp/*.jsonl", "changes")
    changed = "checkpoint.milestones: (20, 40) -> (), shards.length: 64 -> 32, train.steps: 60 -> 80"
    again = "optimizer.b2: 0.98 -> 0.9, shards.length: 32 -> 64, train.steps: 80 -> 100"
    expected = [
        head,
        ("trunk", "", "", "", "", ""),
        (INDENT + "step 20", f"{20 * ROWS:,}", "4.8000", "20.0%", "", ""),
        (INDENT + "step 40", f"{40 * ROWS:,}", "4.6000", "", "", ""),
        (2 * INDENT + "half", "", "", "", "", changed),
        (3 * INDENT + "step 80", f"{HALF:,}", "4.2000", "", "87.5%", ""),
        (4 * INDENT + "twice", "", "", "", "", again),
        (5 * INDENT + "step 100", f"{HALF + 20 * ROWS:,}", "4.0000", "", "", ""),
        (INDENT + "step 60", f"{60 * ROWS:,}", "4.4000", "60.0%", "", ""),
    ]
    for workdir in runs.values():
        assert table(workdir) == expected
    report.write(runs["half"])
    page = Cells(runs["half"].report.read_text())
    assert "Milestones and branches" in page.text
    assert [f"{INDENT}step 20", f"{20 * ROWS:,}", "4.8000", "20.0%", "", ""] in page.rows
    runs["trunk"].root.rename(tmp_path / "gone")
    rows = table(runs["half"])[1:]
    assert [row[0].strip() for row in rows] == ["half", "step 80", "twice", "step 100"]
    assert rows[0][-1] == f"from {runs['trunk'].root}@40" and {row[1] for row in rows} == {""}, "unknown tokens"
    assert table(Workdir(str(tmp_path / "stranger"))) == []
