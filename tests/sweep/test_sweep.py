"""The command `sweep`: real runs over a grid, one of them killed, one failing; its table; what it refuses."""

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import pytest

from mlm import __main__
from tests import ROOT
from tests.support import labelled_texts, processes
from tests.support.refusals import refuse
from tests.support.tiny import TINY

GRID = ("optimizer.learning_rate=1e-2,1e-3", "train.seed=0,1")


def classify_arguments(root: pathlib.Path, rows: pathlib.Path, tokenizer_folder: str, *vary: str) -> list[str]:
    rows.mkdir(exist_ok=True)
    settings = labelled_texts.settings(rows, tokenizer_folder, "train.epochs=1")
    varied = tuple(each.partition("=")[0] + "=" for each in vary)
    own = [f"--config.{each}" for each in dict.fromkeys(settings) if not each.startswith(varied)]
    return ["sweep", "classify", "--config=configs/base.py", f"--workdir={root}", *own, "--vary", *vary]


def content(root: pathlib.Path) -> dict:
    return json.loads((root / "sweep.json").read_text())


@pytest.mark.slow
def test_two_rates_and_two_seeds(tokenizer_folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", processes.environment(1)["XLA_FLAGS"])
    root = tmp_path / "sweep"
    arguments = classify_arguments(root, tmp_path / "rows", tokenizer_folder, *GRID)
    assert __main__.main(arguments) == 0
    out, err = capfd.readouterr()
    names = [f"learning_rate={rate},seed={seed}" for rate in ("0.01", "0.001") for seed in (0, 1)]
    assert [line.split()[1].rstrip(":") for line in err.splitlines()] == names
    found = content(root)
    assert [run["run"] for run in found["runs"]] == names and found["command"] == "classify"
    scores = {}
    for run, name in zip(found["runs"], names, strict=True):
        lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        best = max((line for line in lines if line["kind"] == "eval"), key=lambda line: line["accuracy"])
        assert run["scores"]["accuracy"] == best["accuracy"] and run["code"] == 0
        assert run["values"]["train.seed"] == int(name[-1])
        scores.setdefault(run["values"]["optimizer.learning_rate"], []).append(best["accuracy"])
        config = json.loads((root / name / "config.json").read_text())
        assert (config["optimizer"]["learning_rate"], config["train"]["seed"]) == tuple(run["values"].values())
    assert [group["scores"] for group in found["groups"]] == list(scores.values())
    assert [group["median"] for group in found["groups"]] == list(map(statistics.median, scores.values()))
    medians = list(map(statistics.median, scores.values()))
    assert [group["best"] for group in found["groups"]].index(True) == medians.index(max(medians))
    assert out.splitlines()[0] == "accuracy: the highest median over seeds is best"
    assert out.splitlines()[1].split()[:5] == ["learning_rate", "median", "min", "max", "runs"]
    page = (root / "sweep.html").read_text()
    for words in ("4 runs of classify", "accuracy over optimizer.learning_rate", "train.seed", names[3]):
        assert words in page, words
    before = {path: path.stat().st_mtime_ns for path in root.glob("*/run.json")}
    (root / "sweep.json").unlink()
    assert __main__.main([*arguments, "--metric=loss"]) == 0
    assert {path: path.stat().st_mtime_ns for path in root.glob("*/run.json")} == before, "done, so none is run again"
    assert content(root)["rule"] == "loss: the lowest median over seeds is best"
    assert capfd.readouterr().err == ""
    assert __main__.main([*arguments, "--metric=f2"]) == 2
    assert "--metric=f2: the runs have no such score; name one of accuracy, step, loss, " in capfd.readouterr().err


def train_arguments(root: pathlib.Path, shards: str, *settings: str, vary: tuple[str, ...]) -> list[str]:
    line = processes.train_arguments(root, shards, "log.every=1", "checkpoint.every=0", *settings)
    return ["sweep", *line, "--vary", *vary]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_killed_it_goes_on(manifest, tmp_path, name):
    """SIGTERM reaches the sweep alone, Ctrl-C its run as well."""
    root, number = tmp_path / "sweep", signal.Signals[name]
    arguments = train_arguments(root, manifest.folder, "train.steps=600", vary=("masking.seed=0,1",))
    command, env = [sys.executable, "-m", "mlm", *arguments], processes.environment(1)
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 200
    while processes.logged_step(root / "seed=0") < 20:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (os.killpg if name == "SIGINT" else os.kill)(process.pid, number)
    err = process.communicate(timeout=200)[1]
    assert process.returncode == 75
    assert err.splitlines()[-1] == "mlm sweep: stopped, 0 of 2 runs are done; run the same command to continue."
    stopped = processes.logged_step(root / "seed=0")
    assert 20 <= stopped < 600 and not (root / "seed=1").exists() and not (root / "sweep.json").exists()
    out, _ = processes.run(arguments, devices=1)
    steps = [json.loads(line)["step"] for line in (root / "seed=0" / "metrics.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(steps)) == list(range(1, 601))
    printed = (root / "seed=0" / "output.txt").read_text()
    assert printed.count("step 2/600") == 1 and f"stopped after step {stopped} of 600, and saved;" in printed
    found = content(root)
    assert found["rule"].startswith("loss: the lowest") and len(found["groups"][0]["scores"]) == 2
    assert "seed" not in out.splitlines()[1], "scores are summarized over seeds"


@pytest.mark.slow
def test_a_failing_run_is_named_and_the_others_go_on(manifest, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", processes.environment(1)["XLA_FLAGS"])
    decays = ("optimizer.weight_decay=1e35,0.01", "train.seed=3")
    arguments = train_arguments(tmp_path, manifest.folder, "train.guard_limit=1", "train.steps=8", vary=decays)
    code = __main__.main(arguments)
    out, err = capfd.readouterr()
    assert code == 3, err
    bad, good = (run["run"] for run in content(tmp_path)["runs"])
    lines = err.splitlines()
    assert lines[-2].startswith(f"{bad}: exit code 3: mlm train: ") and "train.guard_limit" in lines[-2]
    assert lines[-1] == (
        f"mlm sweep: 1 of 2 runs failed; the output of the first one is in {tmp_path}/{bad}/output.txt; "
        "run the same command to repeat them."
    )
    assert good.startswith("weight_decay=0.01") and out.splitlines()[2].endswith("best")
    assert "train.guard_limit" in (tmp_path / bad / "output.txt").read_text()


@pytest.mark.slow
def test_evaluate_over_models_and_masks(manifest, tmp_path):
    arguments = train_arguments(tmp_path, manifest.folder, vary=("train.seed=0,1",))
    processes.run(arguments, devices=1)
    models = ",".join(f"'{tmp_path}/seed={seed}'" for seed in (0, 1))
    evaluates = ["sweep", "evaluate", f"--workdir={tmp_path}/seed=0", "--vary", f"model={models}", "evaluate.seed=0,1"]
    out, _ = processes.run(evaluates, devices=1)
    root = tmp_path / "seed=0" / "sweep"
    groups = content(root)["groups"]
    assert [group["values"]["model"] for group in groups] == [f"{tmp_path}/seed={seed}" for seed in (0, 1)]
    assert all(len(set(group["scores"])) == 2 for group in groups)
    trained = content(tmp_path)["runs"][0]["scores"]["loss"]
    assert groups[0]["scores"][0] == pytest.approx(trained, rel=1e-5), "seed 0 of the masks is the run's own"
    assert "model" in out and len(list(root.glob("*/output.txt"))) == 4


BASE = ["--config=configs/base.py", *(f"--config.{each}" for each in TINY if not each.startswith("optimizer"))]
BAD = [
    (
        ["train", "optimizer.learning=1"],
        "--vary optimizer.learning: is no config key and no flag that train can vary",
        "learning_rate",
    ),
    (["train", "stepp=1"], "--vary stepp: is no config key"),
    (["train", "workdir=a,b"], "--vary workdir: is no config key and no flag"),
    (["train", "train.seed=0,x"], "--config.train.seed=x: must be a whole number."),
    (["train", "optimizer.learning_rate=1e-3,nan"], "config.optimizer.learning_rate = nan: must be"),
    (["train", "train.seed=0,1,0"], "--vary train.seed=0,1,0: has a value twice; name each value once."),
    (["train", "optimizer.learning_rate=1e-3,0.001"], "has a value twice"),
    (["train", "train.seed=0", "train.seed=1"], "train.seed is varied twice"),
    (["train", "train.steps=1,2"], "--vary train.steps: --config.train.steps sets it for all runs"),
    (["train", "config=configs/none.py"], "--vary config: --config sets it for all runs"),
    (["train", "train.seed=" + ",".join(map(str, range(101)))], "asks for 101 runs; add --yes to start more than 100."),
    (["predict", "step=1,2"], "predict: can't be swept; the commands that can are train, run, classify, evaluate."),
]


@pytest.mark.parametrize(
    ("vary", "words"), [(case[0], case[1:]) for case in BAD], ids=[" ".join(c[0])[:40] for c in BAD]
)
def test_what_is_refused_before_anything_starts(tmp_path, capsys, vary, words):
    command, *entries = vary
    arguments = ["sweep", command, *BASE, f"--workdir={tmp_path}/new", "--vary", *entries]
    refuse(arguments, 2, *words, capsys=capsys)
    assert not list(tmp_path.iterdir())


def test_flags_are_checked_by_the_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    line = ["sweep", "evaluate", f"--workdir={tmp_path}", "--vary"]
    refuse([*line, "step=x,1000"], 2, "evaluate: argument --step: invalid int value: 'x'", capsys=capsys)
    refuse(
        ["sweep", "train", "--vary", "train.seed=0"], 2, "train: the following arguments are required", capsys=capsys
    )
    refuse([*line[:2], f"--workdir={tmp_path}/none", *line[3:], "step=1"], 2, "there is no such folder", capsys=capsys)
