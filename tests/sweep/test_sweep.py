"""The command `sweep`: real runs over a grid, stopped and continued, one failing; its table; what it refuses."""

import json
import pathlib
import signal

import psutil
import pytest

from mlm import __main__
from mlm.doctor import preflight
from mlm.paths import UPath
from mlm.sweep import runs, table
from tests.support import processes
from tests.support.dask_cluster import until
from tests.support.refusals import refuse
from tests.support.tiny import TINY, flags

BASE = [
    "--config=configs/base.py",
    *flags(*(each for each in TINY if not each.startswith("optimizer"))),
]


def content(root: pathlib.Path) -> dict:
    return json.loads((root / "sweep.json").read_text())


@pytest.mark.slow
def test_stopped_it_goes_on_and_evaluate_scores_its_models(manifest, tmp_path, monkeypatch):
    """Ctrl-C reaches the sweep, and its run as well."""
    root = tmp_path / "sweep"
    steps = 300
    settings = ("log.every=1", "checkpoint.every=0", f"train.steps={steps}")
    train = processes.train_arguments(root, manifest.folder, *settings)
    arguments = ["sweep", *train, "--vary", "masking.seed=0,1"]
    process = processes.start(arguments, devices=1)
    until(lambda: processes.logged_step(root / "seed=0") >= 20 or process.poll() is not None)
    for running in (process, *psutil.Process(process.pid).children()):
        running.send_signal(signal.SIGINT)
    err = process.communicate(timeout=200)[1]
    assert process.returncode == 75 and "0 of 2 runs" in err.splitlines()[-1]
    stopped = processes.logged_step(root / "seed=0")
    assert 20 <= stopped < steps
    assert not (root / "seed=1").exists() and not (root / "sweep.json").exists()
    monkeypatch.setenv("XLA_FLAGS", processes.environment(1)["XLA_FLAGS"])
    assert __main__.main(arguments) == 0
    lines = (root / "seed=0" / "metrics.jsonl").read_text().splitlines()
    logged = dict.fromkeys(json.loads(line)["step"] for line in lines)
    assert list(logged) == list(range(1, steps + 1))
    printed = (root / "seed=0" / "output.txt").read_text()
    assert printed.count(f"step 2/{steps}") == 1
    assert f"stopped after step {stopped} of {steps}" in printed
    (group,) = content(root)["groups"]
    assert len(group["scores"]) == 2, "scores are summarized over seeds"
    vary = f"model='{root}/seed=0'"
    assert __main__.main(["sweep", "evaluate", f"--workdir={root}/seed=0", "--vary", vary]) == 0
    (evaluated,) = content(root / "seed=0" / "sweep")["groups"]
    assert evaluated["scores"] == pytest.approx(group["scores"][:1], rel=1e-5)


def test_evaluate_names_the_newest_step_so_that_a_score_is_of_no_earlier_one(
    trained_workdir, monkeypatch
):
    planned = []
    monkeypatch.setattr(runs, "run_all", lambda trials, root: planned.extend(trials) or [])
    monkeypatch.setattr(table, "write", lambda *_: None)
    monkeypatch.setattr(preflight, "refuse", lambda case: None)
    root = str(trained_workdir.root)
    vary = ["--vary", f"model={root},{root}@5"]
    assert __main__.main(["sweep", "evaluate", *BASE, f"--workdir={root}", *vary]) == 0
    named = ["--step=5" in trial.arguments for trial in planned]
    assert named == [True, False]


def test_a_failing_run_is_named_and_the_others_are_compared(tmp_path, capsys, monkeypatch):
    def run_all(trials, root):
        good = UPath(trials[1].folder)
        good.mkdir()
        (good / "metrics.jsonl").write_text('{"kind": "eval", "step": 1, "loss": 2.0}\n')
        (good / "timing.jsonl").write_text('{"kind": "checkpoint", "step": 1}\n')
        endings = ((3, "mlm train: why"), (0, ""))
        return [
            runs.Outcome(trial, code, 1.0, line)
            for trial, (code, line) in zip(trials, endings, strict=True)
        ]

    monkeypatch.setattr(runs, "run_all", run_all)
    vary = ["--vary", "optimizer.weight_decay=1e35,0.01"]
    assert __main__.main(["sweep", "train", *BASE, f"--workdir={tmp_path}", *vary]) == 3
    out, err = capsys.readouterr()
    bad, good = (run["trial"] for run in content(tmp_path)["runs"])
    assert err.splitlines()[-2] == f"{bad}: exit code 3: mlm train: why"
    assert "1 of 2 runs" in err.splitlines()[-1] and f"{tmp_path}/{bad}/output.txt" in err
    assert good == "weight_decay=0.01" and out.splitlines()[2].endswith("best")


BAD = {
    "train optimizer.learning=1": ["--vary optimizer.learning", "learning_rate"],
    "train workdir=a,b": ["--vary workdir"],
    "train train.seed=0 train.seed=1": ["--vary", "train.seed"],
    "train train.seed=0,x": ["--config.train.seed=x"],
    "train optimizer.learning_rate=1e-3,nan": ["config.optimizer.learning_rate = nan"],
    "train optimizer.learning_rate=1e-3,0.001": ["--vary", "learning_rate=0.001"],
    "train train.steps=1,2": ["--vary train.steps", "--config.train.steps"],
    "train config=configs/none.py": ["--vary config", "--config"],
    "predict step=1,2": ["predict", "train, run, classify, evaluate"],
    "evaluate step=x,1000": ["--step", "'x'"],
    "train train.seed=0,1 --metric=fun": ["--metric=fun", "loss, "],
}


@pytest.mark.parametrize("line", BAD)
def test_what_is_refused_before_anything_starts(tmp_path, capsys, line):
    command, *entries = line.split()
    arguments = ["sweep", command, *BASE, f"--workdir={tmp_path}/new", "--vary", *entries]
    if command == "evaluate":
        arguments = ["sweep", command, f"--workdir={tmp_path}", "--vary", *entries]
        (tmp_path / "config.json").write_text("{}")
    refuse(arguments, 2, *BAD[line], capsys=capsys)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["config.json"])


def test_flags_are_those_of_the_command(capsys):
    refuse(["sweep", "train", "--vary", "train.seed=0"], 2, "train: ", "--config", capsys=capsys)
