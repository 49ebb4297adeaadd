"""GLUE by a protocol, on tables of its shapes: what is run, chosen, shown and submitted."""

import csv
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mlm import config as configs
from mlm.__main__ import main
from mlm.glue import glue
from mlm.glue.tasks import GLUE, MAJORITY, NAMES, TASKS, load_protocol
from tests import ROOT
from tests.support import glue_shaped
from tests.support.refusals import refuse
from tests.support.tiny import TINY

KEYS = [*(key for key in TINY if not key.startswith(("train.steps", "shards.", "data.global_batch", "model.")))]
KEYS += ["data.lanes=4", "data.global_batch=16", "train.epochs=1", "model.dtype=float32", "model.vocab_multiple=8"]
FILES = {"CoLA", "SST-2", "MRPC", "STS-B", "MNLI-m", "MNLI-mm", "AX", "QNLI", "QQP", "RTE", "WNLI"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return glue_shaped.write(tmp_path_factory.mktemp("glue"))


def run(model: object, workdir: pathlib.Path, *flags: str, keys=KEYS) -> subprocess.CompletedProcess:
    line = ["glue", f"--model={model}", f"--workdir={workdir}", *flags, *(f"--config.{key}" for key in keys)]
    return subprocess.run([sys.executable, "-m", "mlm", *line], cwd=ROOT, capture_output=True, text=True)


def plan(protocol, name: str, root: pathlib.Path, *, data: str = "", given=()) -> list[glue.Case]:
    flags = ["--config=configs/base.py"]
    return glue.plan(protocol, name, root=root, data=data, flags=flags, overrides=dict(given), longest=128)


def read_tsv(file: pathlib.Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines(), delimiter="\t"))


def test_tasks_are_those_of_the_benchmark():
    assert len(GLUE) == 9 and GLUE[0] == "mnli"
    assert {file.removesuffix(".tsv") for name in GLUE for _, file in TASKS[name].tests} == FILES
    one, both = ("accuracy",), ("f1_positive", "accuracy")  # Wang et al., 2019, table 1
    metrics = dict.fromkeys(("mnli", "qnli", "rte", "sst2", "wnli"), one) | {"qqp": both, "mrpc": both}
    metrics |= {"cola": ("matthews",), "stsb": ("pearson", "spearman")}
    assert {name: TASKS[name].metrics for name in GLUE} == metrics


def test_a_setting_that_is_given_is_no_choice_any_more():
    found = list(load_protocol("roberta").cells("rte", {"data.global_batch": 8, "train.epochs": 1.0}))
    assert [each["optimizer.learning_rate"] for each in found] == [1e-5, 2e-5, 3e-5]
    assert {(each["data.global_batch"], each["train.epochs"]) for each in found} == {(8, 1.0)}


@pytest.mark.parametrize("protocol", NAMES)
@pytest.mark.parametrize("name", sorted(TASKS.keys() - {MAJORITY}))
def test_settings_of_every_cell_are_keys_that_a_config_takes(protocol, name, data, tmp_path):
    seen = set()
    for _, own, each in plan(load_protocol(protocol), name, tmp_path, data=data):
        overrides = [flag.removeprefix("--config.") for flag in each.arguments if flag.startswith("--config.")]
        config = configs.load("configs/base.py", overrides, task=configs.CLASSIFICATION)
        assert config.classify.length <= 128 and config.train.epochs > 0
        assert {key: configs.flatten(config)[key] for key in own} == own
        seen.add((config.optimizer.learning_rate, config.data.global_batch, config.train.seed, each.folder))
    count = {"roberta": 30, "quick": 1, "mosaic": {"rte": 5, "stsb": 5, "mrpc": 5, "sst2": 3, "cola": 4}.get(name, 1)}
    assert len(seen) == count[protocol]


@pytest.mark.slow
def test_a_table_of_some_tasks(trained_workdir, data, tmp_path):
    flags = ("--protocol=quick", f"--data={data}", "--tasks", "rte", "wnli")
    done = run(trained_workdir.root, tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "glue.json").read_text())
    rte = found["tasks"]["rte"]
    held = read_tsv(pathlib.Path(rte["run"]) / "predictions" / "validation.tsv")
    assert rte["median"] == pytest.approx(np.mean([row["prediction"] == row["label"] for row in held]))
    assert found["average"] == rte["median"], "WNLI is not in it"
    for file, labels in (("RTE", {"entailment", "not_entailment"}), ("WNLI", {"0", "1"})):
        rows = read_tsv(tmp_path / "submission" / f"{file}.tsv")
        assert [row["index"] for row in rows] == [str(n) for n in range(16)]
        assert {row["prediction"] for row in rows} <= labels
    assert len({row["prediction"] for row in read_tsv(tmp_path / "submission" / "WNLI.tsv")}) == 1
    assert rte["setting"]["data.global_batch"] == 16, "as the command line says, not the protocol"
    assert "without WNLI" in done.stdout and "protocol quick" in done.stdout and f"{rte['median']:.1%}" in done.stdout
    assert not (pathlib.Path(rte["run"]) / "checkpoints").exists(), "a table of a large model has many"
    newest = max(int(path.name) for path in (trained_workdir.root / "checkpoints").iterdir() if path.name.isdecimal())
    kept = json.loads((trained_workdir.root / "glue.json").read_text())
    assert {step: table["average"] for step, table in kept.items()} == {str(newest): found["average"]}
    again = run(trained_workdir.root, tmp_path, *flags)
    assert again.returncode == 0 and json.loads((tmp_path / "glue.json").read_text()) == found, "nothing is done again"


@pytest.mark.slow
def test_what_fails_is_named_and_the_others_are_done(trained_workdir, data, tmp_path, monkeypatch):
    """MNLI's model is not there: what starts from it is not trained from another."""
    flags = ("--protocol=mosaic", f"--data={data}", "--tasks", "mnli", "rte", "wnli")
    done = run(trained_workdir.root, tmp_path, *flags, keys=[*KEYS, "classify.length=1000", "model.positions=1000"])
    assert done.returncode == 2 and "mlm glue: mnli, rte failed; run the same command" in done.stderr, done.stderr
    tasks = json.loads((tmp_path / "glue.json").read_text())["tasks"]
    assert "classify.length = 1000: the model reads 32 tokens" in tasks["mnli"]["failed"]
    assert tasks["rte"]["failed"] == "starts from MNLI's model, which failed" and "median" in tasks["wnli"]
    assert not (tmp_path / "runs" / "rte").exists()


@pytest.mark.slow
def test_all_tasks(trained_workdir, data, tmp_path):
    """By the protocol that starts from MNLI's model, then all of GLUE by the quick one, against the first table."""
    keys = [*KEYS, "optimizer.learning_rate=0.01"]
    flags = ("--protocol=mosaic", f"--data={data}", "--tasks", *GLUE[:4], "stsb", "cb", "boolq", "wnli")
    done = run(trained_workdir.root, tmp_path / "a", *flags, keys=keys)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "a" / "glue.json").read_text())
    assert {len(task["scores"]) for task in found["tasks"].values()} == {1, 5}
    start = json.loads((pathlib.Path(found["tasks"]["rte"]["run"]) / "config.json").read_text())["train"]["init_from"]
    assert start == f"{found['tasks']['mnli']['run']}/export"
    mnli = read_tsv(tmp_path / "a" / "submission" / "AX.tsv")
    assert len(mnli) == 11 and {row["prediction"] for row in mnli} <= set(TASKS["mnli"].labels)
    boolq = [json.loads(line) for line in (tmp_path / "a" / "submission" / "BoolQ.jsonl").read_text().splitlines()]
    assert [row["idx"] for row in boolq] == list(range(16)) and {row["label"] for row in boolq} <= {"true", "false"}
    flags = ("--protocol=quick", f"--data={data}", f"--against={tmp_path / 'a'}", "--json")
    done = run(trained_workdir.root, tmp_path / "b", *flags, keys=KEYS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert set(found["tasks"]) == set(GLUE) and not any("failed" in task for task in found["tasks"].values())
    assert {file.stem for file in (tmp_path / "b" / "submission").iterdir()} == FILES
    numbers = [float(row["prediction"]) for row in read_tsv(tmp_path / "b" / "submission" / "STS-B.tsv")]
    assert all(0 <= number <= 5 for number in numbers)
    assert set(found["against"]) == {"mnli", "qnli", "qqp", "rte", "stsb"}
    for difference in found["against"].values():
        assert difference["low"] <= difference["difference"] <= difference["high"]


def test_the_best_cell_is_that_of_the_best_median(tmp_path):
    """A seed that is better by luck does not choose it; the files are of its best run."""
    cases, outcomes = plan(load_protocol("roberta"), "rte", tmp_path, given={"optimizer.learning_rate": 1e-5}), []
    for case, score in zip(cases, [0.5, 0.5, 0.9, 0.5, 0.5, 0.6, 0.7, 0.6, 0.6, 0.2], strict=True):
        folder = pathlib.Path(case.run.folder)
        (folder / "predictions").mkdir(parents=True)
        content = {"scores": {"accuracy": score}, "sets": {}, "step": 1}
        (folder / "classification.json").write_text(json.dumps(content))
        (folder / "predictions" / "test.tsv").write_text(f"index\tprediction\tlabel\n0\t{int(score == 0.7)}\t\n")
        (folder / "timing.jsonl").write_text('{"step": 0, "kind": "start", "devices": 4}\n')
        outcomes.append(glue.Outcome(case.run, 0, 1800.0, ""))
    found = glue._choose("rte", cases, outcomes, tmp_path)
    assert (found["median"], found["low"], found["high"]) == (0.6, 0.2, 0.7)
    assert found["setting"]["data.global_batch"] == 32 and found["device_hours"] == 20
    assert (tmp_path / "submission" / "RTE.tsv").read_text() == "index\tprediction\n0\tnot_entailment\n"
    outcomes[3] = outcomes[3]._replace(code=2, last_line="no such file")
    assert glue._choose("rte", cases, outcomes, tmp_path)["failed"].endswith("seed=3: no such file")


# Bad input ------------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_anything_is_trained(trained_workdir, data, tmp_path, capsys):
    def refused(*more: str, words: str, data: str = data) -> None:
        line = ["glue", f"--model={trained_workdir.root}", f"--workdir={tmp_path / 'out'}", f"--data={data}", *more]
        refuse(line, 2, words, capsys=capsys)

    with pytest.raises(SystemExit, match="2"):
        main(["glue", f"--model={trained_workdir.root}", "--tasks", "ner"])
    assert "--tasks: invalid choice: ner (choose from mnli, " in capsys.readouterr().err.replace("'", "")
    refused(
        "--protocol=bert", words="--protocol=bert: is not known; name mosaic, quick, roberta, or a file like theirs."
    )
    (tmp_path / "odd.py").write_text("def get_protocol():\n    return 1 / 0\n")
    refused(f"--protocol={tmp_path / 'odd.py'}", words="odd.py: ZeroDivisionError while reading it: division by zero")
    (tmp_path / "odd.py").write_text("def get_protocol():\n    return {'epochs': 3}\n")
    refused(f"--protocol={tmp_path / 'odd.py'}", words="odd.py: get_protocol() must return the fields of Protocol")
    refused("--protocol=mosaic", "--tasks", "rte", words="rte starts from MNLI's model")
    own, copy = pathlib.Path(data.removeprefix("jsonl:")) / "rte" / "validation.jsonl", tmp_path / "copy" / "rte"
    copy.mkdir(parents=True)
    for old, new, words in (
        ("sentence2", "other", "line 1: its 'sentence2' is missing"),
        ('"label": 1', '"label": 7', "has the label '7'; rte has entailment, not_entailment, or their indices"),
    ):
        (copy / "validation.jsonl").write_text(own.read_text().replace(old, new))
        refused("--tasks", "rte", words=words, data=f"jsonl:{tmp_path / 'copy'}")
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    refused(f"--model={tmp_path / 'begun'}", words="/begun: there is no complete checkpoint; train first.")
    assert not (tmp_path / "out").exists()
