"""The command `sweep`: real runs over a grid, one of them killed, one failing; its table; what it refuses."""

import json
import pathlib
import statistics

from mlm import __main__
from tests import labelled_texts, processes

GRID = ("optimizer.learning_rate=1e-2,1e-3", "train.seed=0,1")


def classify_arguments(root: pathlib.Path, rows: pathlib.Path, tokenizer_folder: str, *vary: str) -> list[str]:
    rows.mkdir(exist_ok=True)
    settings = labelled_texts.settings(rows, tokenizer_folder, "train.epochs=1")
    varied = tuple(each.partition("=")[0] + "=" for each in vary)
    own = [f"--config.{each}" for each in dict.fromkeys(settings) if not each.startswith(varied)]
    return ["sweep", "classify", "--config=configs/base.py", f"--workdir={root}", *own, "--vary", *vary]


def content(root: pathlib.Path) -> dict:
    return json.loads((root / "sweep.json").read_text())


def test_two_rates_and_two_seeds(tokenizer_folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", processes.environment(1)["XLA_FLAGS"])
    root = tmp_path / "sweep"
    arguments = classify_arguments(root, tmp_path / "rows", tokenizer_folder, *GRID)
    assert __main__.main(arguments) == 0
    out, err = capfd.readouterr()
    names = [f"learning_rate={rate},seed={seed}" for rate in ("0.01", "0.001") for seed in (0, 1)]
    assert [line.split()[1].rstrip(":") for line in err.splitlines()] == names
    found = content(root)
    assert [run["name"] for run in found["runs"]] == names and found["command"] == "classify"
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
    assert out.splitlines()[1].split() == ["learning_rate", "median", "min", "max", "runs"]
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
    assert "--metric=f2: the runs have no such score; name one of step, " in capfd.readouterr().err
