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
from mlm.paths import UPath
from tests import ROOT
from tests.support import glue_shaped
from tests.support.refusals import refuse
from tests.support.tiny import TINY

KEYS = [*(key for key in TINY if not key.startswith(("train.steps", "shards.", "data.global_batch", "model.")))]
KEYS += ["data.lanes=4", "data.global_batch=16", "train.epochs=1", "model.dtype=float32"]
FILES = {"CoLA", "SST-2", "MRPC", "STS-B", "MNLI-m", "MNLI-mm", "AX", "QNLI", "QQP", "RTE", "WNLI"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return glue_shaped.write(tmp_path_factory.mktemp("glue"))


def run(model: object, workdir: pathlib.Path, *flags: str, keys=KEYS) -> subprocess.CompletedProcess:
    line = ["glue", f"--model={model}", f"--workdir={workdir}", *flags, *(f"--config.{key}" for key in keys)]
    return subprocess.run([sys.executable, "-m", "mlm", *line], cwd=ROOT, capture_output=True, text=True)


def plan(protocol, name: str, root: pathlib.Path, *, data: str = "", given=()) -> list[glue.Trial]:
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
def test_settings_of_every_cell_are_keys_that_a_config_takes(protocol, data, tmp_path):
    counts = {"roberta": 30, "quick": 1, "mosaic": {"rte": 5, "stsb": 5, "mrpc": 5, "sst2": 3, "cola": 4}}[protocol]
    for name in sorted(TASKS.keys() - {MAJORITY}):
        trials = plan(load_protocol(protocol), name, tmp_path, data=data)
        count = counts if isinstance(counts, int) else counts.get(name, 1)
        assert len(trials) == len({trial.arguments for trial in trials}) == len({trial.folder for trial in trials})
        assert len(trials) == count
        for trial in (trials[0], trials[-1]):
            overrides = [flag.removeprefix("--config.") for flag in trial.arguments if flag.startswith("--config.")]
            config = configs.load("configs/base.py", overrides, task=configs.CLASSIFICATION)
            assert config.classify.length <= 128 and config.train.epochs > 0
            assert {key: configs.flatten(config)[key] for key in trial.values} == trial.values


@pytest.mark.slow
def test_a_protocol_that_starts_from_mnli(trained_workdir, data, tmp_path):
    """Tables, submissions and starts of some tasks; a second command does nothing again."""
    keys = [*KEYS, "optimizer.learning_rate=0.01"]
    flags = ("--protocol=mosaic", f"--data={data}", "--tasks", "mnli", "rte", "boolq", "wnli")
    done = run(trained_workdir.root, tmp_path / "a", *flags, keys=keys)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "a" / "glue.json").read_text())
    rte = found["tasks"]["rte"]
    config = json.loads((pathlib.Path(rte["run"]) / "config.json").read_text())
    assert config["train"]["init_from"] == f"{found['tasks']['mnli']['run']}/export"
    assert rte["setting"]["data.global_batch"] == 16, "as the command line says, not the protocol"
    held = read_tsv(pathlib.Path(rte["run"]) / "predictions" / "validation.tsv")
    assert max(rte["scores"]) == pytest.approx(np.mean([row["prediction"] == row["label"] for row in held]))
    assert not (pathlib.Path(rte["run"]) / "checkpoints").exists(), "a table of a large model has many"
    for file, labels in (("RTE", {"entailment", "not_entailment"}), ("WNLI", {"0", "1"}), ("AX", TASKS["mnli"].labels)):
        rows = read_tsv(tmp_path / "a" / "submission" / f"{file}.tsv")
        assert [row["index"] for row in rows] == [str(number) for number in range(11 if file == "AX" else 16)]
        assert {row["prediction"] for row in rows} <= set(labels)
    boolq = [json.loads(line) for line in (tmp_path / "a" / "submission" / "BoolQ.jsonl").read_text().splitlines()]
    assert [row["idx"] for row in boolq] == list(range(16)) and {row["label"] for row in boolq} <= {"true", "false"}
    kept = json.loads((trained_workdir.root / "glue.json").read_text())
    assert {step: table["average"] for step, table in kept.items()} == {"5": found["average"]}
    again = run(trained_workdir.root, tmp_path / "a", *flags, keys=keys)
    assert again.returncode == 0 and json.loads((tmp_path / "a" / "glue.json").read_text()) == found
    flags = ("--protocol=quick", f"--data={data}", "--json", "--tasks")
    done = run(trained_workdir.root, tmp_path / "b", *flags, "rte", "stsb", "wnli")
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = [float(row["prediction"]) for row in read_tsv(tmp_path / "b" / "submission" / "STS-B.tsv")]
    assert len(numbers) == 16 and all(0 <= number <= 5 for number in numbers)
    found = json.loads(done.stdout.splitlines()[0])
    medians = [found["tasks"][name]["median"] for name in ("rte", "stsb")]
    assert found["average"] == pytest.approx(np.mean(medians)), "WNLI is not in it"


@pytest.mark.standard
def test_what_fails_is_named_and_the_others_are_done(trained_workdir, data, tmp_path):
    """MNLI's model is not there: what starts from it is not trained from another."""
    flags = ("--protocol=mosaic", f"--data={data}", "--tasks", "mnli", "rte", "wnli")
    done = run(trained_workdir.root, tmp_path, *flags, keys=[*KEYS, "classify.length=1000", "model.positions=1000"])
    assert done.returncode == 2 and "mnli, rte failed" in done.stderr, done.stderr
    table = json.loads((tmp_path / "glue.json").read_text())
    tasks = table["tasks"]
    assert "classify.length = 1000: " in tasks["mnli"]["failed"]
    assert "MNLI's model" in tasks["rte"]["failed"] and "median" in tasks["wnli"]
    assert table["average"] is None and "train.epochs=1.0" in table["protocol"]
    assert not (tmp_path / "runs" / "rte").exists()


def test_the_best_cell_is_that_of_the_best_median(tmp_path):
    """A seed that is better by luck does not choose it; the files are of its best run."""
    trials = plan(load_protocol("roberta"), "rte", tmp_path, given={"optimizer.learning_rate": 1e-5})
    outcomes = []
    for trial, score in zip(trials, [0.5, 0.5, 0.9, 0.5, 0.5, 0.6, 0.7, 0.6, 0.6, 0.2], strict=True):
        folder = pathlib.Path(trial.folder)
        (folder / "predictions").mkdir(parents=True)
        content = {"scores": {"accuracy": score}, "sets": {}, "step": 1}
        (folder / "classification.json").write_text(json.dumps(content))
        (folder / "predictions" / "test.tsv").write_text(f"index\tprediction\tlabel\n0\t{int(score == 0.7)}\t\n")
        (folder / "timing.jsonl").write_text('{"step": 0, "kind": "start", "devices": 4}\n')
        outcomes.append(glue.Outcome(trial, 0, 1800.0, ""))
    found = glue._choose("rte", outcomes, tmp_path)
    assert (found["median"], found["low"], found["high"]) == (0.6, 0.2, 0.7)
    assert found["setting"]["data.global_batch"] == 32 and found["device_hours"] == 20
    assert (tmp_path / "submission" / "RTE.tsv").read_text() == "index\tprediction\n0\tnot_entailment\n"
    outcomes[3] = outcomes[3]._replace(code=2, last_line="no such file")
    assert glue._choose("rte", outcomes, tmp_path)["failed"].endswith("seed=3: no such file")


SCORED = {  # task -> (its score, what classification.json says of its sets)
    "mnli": (0.7, [{"accuracy": 0.8}, {"accuracy": 0.6}]),  # matched and mismatched
    "qnli": (0.8, [{"accuracy": 0.8, "f1": 0.1}]),
    "sst2": (0.8, [{"accuracy": 0.8, "f1": 0.1}]),
    "rte": (0.8, [{"accuracy": 0.8, "f1": 0.1}]),
    "mrpc": (0.7, [{"f1_positive": 0.8, "accuracy": 0.6, "f1": 0.1}]),
    "qqp": (0.7, [{"f1_positive": 0.8, "accuracy": 0.6, "f1_macro": 0.1}]),
    "stsb": (0.7, [{"pearson": 0.8, "spearman": 0.6, "mse": 0.1}]),
    "cola": (0.5, [{"matthews": 0.5, "accuracy": 0.9}]),
    "boolq": (0.8, [{"accuracy": 0.8, "f1": 0.1}]),
    "cb": (0.7, [{"accuracy": 0.8, "f1_macro": 0.6, "f1": 0.1}]),
}


@pytest.mark.parametrize("name", SCORED)
def test_a_score_is_the_mean_of_all_its_metrics_and_sets(tmp_path, name):
    """The data of each of these sets are asked for by the runs."""
    expected, scores = SCORED[name]
    trial = plan(load_protocol("quick"), name, tmp_path)[0]
    first, *others = TASKS[name].validation
    content = {"scores": scores[0], "sets": dict(zip(others, scores[1:], strict=True)), "step": 1}
    pathlib.Path(trial.folder).mkdir(parents=True)
    (pathlib.Path(trial.folder) / "classification.json").write_text(json.dumps(content))
    assert glue._score(name, trial) == pytest.approx(expected)
    arguments = dict(flag.partition("=")[::2] for flag in trial.arguments)
    assert arguments["--config.classify.validation"].endswith(f"#{first}")
    assert all(f"#{split}" in arguments["--config.classify.predict"] for split in others)


def test_labels_of_the_server_are_those_of_the_data(data):
    """By the papers' indices; QNLI, RTE and WNLI have the same two, WNLI's in the other order."""
    assert TASKS["qnli"].labels == TASKS["rte"].labels == ("entailment", "not_entailment")
    assert TASKS["wnli"].labels == ("not_entailment", "entailment")
    assert TASKS["mnli"].labels == ("entailment", "neutral", "contradiction")
    assert [name for name in TASKS if TASKS[name].names] == ["mnli", "qnli", "rte"], "others get indices"
    assert [glue._index(TASKS["rte"], text) for text in ("1", "not_entailment", "Entailment", "2")] == [
        1,
        1,
        None,
        None,
    ]


def test_a_later_table_of_some_tasks_keeps_the_others_of_its_protocol(tmp_path):
    def table(protocol: str, **medians: float) -> dict:
        tasks = {name: {"median": median, "device_hours": 1.0} for name, median in medians.items()}
        return {"protocol": protocol, "model": "a", "tasks": tasks} | glue.means(tasks)

    old = table("quick", mnli=0.8, rte=0.5, wnli=0.9)
    joined = glue.join(old, table("quick", cola=0.4, rte=0.6))
    assert joined == table("quick", mnli=0.8, rte=0.6, cola=0.4, wnli=0.9)
    assert joined["average"] == pytest.approx(0.6) and list(joined["tasks"]) == ["mnli", "rte", "cola", "wnli"]
    for content in (old, table("quick", cola=0.4, rte=0.6), {**old, "model": "b"}):
        saved = glue.save(tmp_path, content)
        expected = joined if len(content["tasks"]) == 2 else content
        assert json.loads((tmp_path / "glue.json").read_text()) == saved == expected
    assert glue.join(old, other := table("roberta", rte=0.6)) == other == glue.join({}, other)


def test_a_table_names_the_keys_that_are_not_as_its_protocol_says(data, tmp_path):
    """Of those that change a score: tasks that were trained in two ways are in no table together."""
    changed = {"optimizer.clip_norm": 1.0, "model.dtype": "float32", "log.every": 3, "train.epochs": 1.0}
    names = []
    for overrides in ({}, {"log.every": 3}, changed):
        table = glue.run(
            ["wnli"],
            protocol="quick",
            data=data,
            root=UPath(tmp_path),
            flags=[],
            overrides=overrides,
            longest=32,
        )
        names.append(table["protocol"])
    assert names[:2] == ["quick", "quick"]
    assert names[2] == "quick (with train.epochs=1.0, model.dtype=float32, optimizer.clip_norm=1.0)"


def test_a_workdir_is_scored_at_its_newest_step_by_name(trained_workdir, data, tmp_path, monkeypatch):
    """When it is trained on, the runs that are done are of another model, and not taken for those of the new step."""
    calls = []

    def run_none(names, *, flags, **rest):
        calls.append(flags)
        return {"protocol": "quick", "tasks": {name: {"median": 0.5} for name in names}, "average": 0.5}

    monkeypatch.setattr(glue, "run", run_none)
    monkeypatch.setattr(glue, "render", lambda table: ())
    flags = (f"--workdir={tmp_path}", "--protocol=quick", f"--data={data}", "--tasks", "rte")
    for name in (trained_workdir.root, f"{trained_workdir.root}@5"):
        assert main(["glue", f"--model={name}", *flags, *(f"--config.{key}" for key in KEYS)]) == 0
    assert calls[0] == calls[1] and f"--config.train.init_from={trained_workdir.root}@5" in calls[0]
    assert json.loads((tmp_path / "glue.json").read_text())["model"] == f"{trained_workdir.root}@5"
    trained_workdir.glue.unlink()  # other tests have the workdir, too


# Bad input ------------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_anything_is_trained(trained_workdir, data, tmp_path, capsys):
    def refused(*more: str, words: str, data: str = data) -> None:
        line = ["glue", f"--model={trained_workdir.root}", f"--workdir={tmp_path / 'out'}", f"--data={data}", *more]
        refuse(line, 2, words, capsys=capsys)

    with pytest.raises(SystemExit, match="2"):
        main(["glue", f"--model={trained_workdir.root}", "--tasks", "ner"])
    assert "--tasks: invalid choice: ner (choose from mnli, " in capsys.readouterr().err.replace("'", "")
    refused("--protocol=bert", words="--protocol=bert: ")
    (tmp_path / "odd.py").write_text("def get_protocol():\n    return {'epochs': 3}\n")
    refused(f"--protocol={tmp_path / 'odd.py'}", words="odd.py: get_protocol()")
    refused("--protocol=mosaic", "--tasks", "rte", words="rte ")
    for key in ("train.seed=1", "train.init_from=a", "classify.text=('a',)"):  # runs named seed=0 had seed 1
        refused("--tasks", "rte", f"--config.{key}", words=f"config.{key.partition('=')[0]}: ")
    refused("--tasks", "rte", f"--workdir={trained_workdir.root}", words=f"--workdir={trained_workdir.root}: holds a")
    for wrong in (str(tmp_path), f"csv:{tmp_path}", "jsonl"):
        refused("--tasks", "rte", words="--data: " if wrong == "jsonl" else f"--data={wrong}: must be", data=wrong)
    own, copy = pathlib.Path(data.removeprefix("jsonl:")) / "rte" / "validation.jsonl", tmp_path / "copy" / "rte"
    copy.mkdir(parents=True)
    for old, new, words in (
        ("sentence2", "other", "line 1: its 'sentence2' is missing"),
        ('"label": 1', '"label": 7', "the label '7'"),
    ):
        (copy / "validation.jsonl").write_text(own.read_text().replace(old, new))
        refused("--tasks", "rte", words=words, data=f"jsonl:{tmp_path / 'copy'}")
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    refused(f"--model={tmp_path / 'begun'}", words="/begun: ")
    assert not (tmp_path / "out").exists()
