"""GLUE by a protocol, on tables of its shapes: what is run, chosen, shown and submitted."""

import json
import pathlib
import subprocess
import sys

import pytest

from mlm import config as configs
from mlm.glue import glue
from mlm.glue.tasks import GLUE, MAJORITY, TASKS, load_protocol
from mlm.paths import UPath
from tests import ROOT
from tests.support import glue_shaped
from tests.support.refusals import refuse
from tests.support.tiny import TINY, flags

KEYS = [key for key in TINY if not key.startswith(("train.steps", "shards.", "model."))]
KEYS += ["data.lanes=4", "train.epochs=1", "model.dtype=float32"]
PROTOCOL = """
def get_protocol():
    settings = {"classify.length": 32, "train.epochs": 1.0, "optimizer.learning_rate": 0.01, "data.global_batch": 8}
    return {"settings": settings, "seeds": {"": 1, "rte": 2}, "from_mnli": ("rte",)}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return glue_shaped.write(tmp_path_factory.mktemp("glue"))


def run(model: object, workdir: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    line = ["glue", f"--model={model}", f"--workdir={workdir}", *arguments, *flags(*KEYS)]
    return subprocess.run(
        [sys.executable, "-m", "mlm", *line], cwd=ROOT, capture_output=True, text=True
    )


def plan(protocol: str, name: str, root: pathlib.Path, **overrides) -> list[glue.Trial]:
    setup = glue.Setup(protocol, "", UPath(root), ["--config=configs/base.py"], overrides, 128)
    return glue.plan(load_protocol(protocol), name, setup)


def write_scores(
    trial: glue.Trial, first: dict[str, float], **others: dict[str, float]
) -> pathlib.Path:
    """Writes what a run leaves of its scores: on its validation rows, and on other sets."""
    folder = pathlib.Path(trial.folder)
    (folder / "predictions").mkdir(parents=True)
    (folder / "classification.json").write_text(
        json.dumps({"scores": first, "sets": others, "step": 1})
    )
    (folder / "timing.jsonl").write_text('{"step": 0, "kind": "start", "devices": 4}\n')
    return folder


def test_the_files_are_those_that_the_server_takes():
    files = [
        "AX",
        "CoLA",
        "MNLI-m",
        "MNLI-mm",
        "MRPC",
        "QNLI",
        "QQP",
        "RTE",
        "SST-2",
        "STS-B",
        "WNLI",
    ]
    named = [file.removesuffix(".tsv") for name in GLUE for _, file in TASKS[name].tests]
    assert sorted(named) == files


MOSAIC = {"": 1, "rte": 5, "stsb": 5, "mrpc": 5, "sst2": 3, "cola": 4}
SCORED = {  # task -> its score (Wang et al., 2019, table 1), and the scores of its validation sets
    "mnli": (0.7, {"accuracy": 0.8}, {"accuracy": 0.6}),  # matched and mismatched
    "rte": (0.8, {"accuracy": 0.8, "f1": 0.1}),
    "mrpc": (0.7, {"f1_positive": 0.8, "accuracy": 0.6, "f1": 0.1}),
    "qqp": (0.7, {"f1_positive": 0.8, "accuracy": 0.6, "f1_macro": 0.1}),
    "stsb": (0.7, {"pearson": 0.8, "spearman": 0.6, "mse": 0.1}),
    "cola": (0.5, {"matthews": 0.5, "accuracy": 0.9}),
    "cb": (0.7, {"accuracy": 0.8, "f1_macro": 0.6, "f1": 0.1}),
}


@pytest.mark.parametrize("name", SCORED)
def test_a_score_is_the_mean_of_all_its_metrics_and_sets(tmp_path, name):
    """Each of these sets is scored by the runs; the first chooses the checkpoint."""
    expected, first, *others = SCORED[name]
    (trial,) = plan("quick", name, tmp_path)
    sets = TASKS[name].validation
    write_scores(trial, first, **dict(zip(sets[1:], others, strict=True)))
    assert glue._score(name, trial) == pytest.approx(expected)
    arguments = dict(flag.partition("=")[::2] for flag in trial.arguments)
    assert arguments["--config.classify.validation"].endswith(f"#{sets[0]}")
    assert all(f"#{split}" in arguments["--config.classify.predict"] for split in sets[1:])


@pytest.mark.parametrize(
    ("protocol", "counts"), [("roberta", {"": 30}), ("quick", {"": 1}), ("mosaic", MOSAIC)]
)
def test_settings_of_every_cell_are_keys_that_a_config_takes(protocol, counts, tmp_path):
    for name in sorted(TASKS.keys() - {MAJORITY}):
        trials = plan(protocol, name, tmp_path)
        count = counts.get(name, counts[""])
        assert len(trials) == len({trial.folder for trial in trials}) == count
        _, overrides = configs.split_overrides(trials[-1].arguments)
        config = configs.load("configs/base.py", overrides, task="classification")
        assert config.classify.length <= 128 and config.train.epochs > 0
        assert trials[-1].values.items() <= configs.flatten(config).items()


def test_a_setting_that_is_given_is_no_choice_any_more():
    given = {"data.global_batch": 8, "train.epochs": 1.0}
    cells = list(load_protocol("roberta").cells("rte", given))
    assert [cell["optimizer.learning_rate"] for cell in cells] == [1e-5, 2e-5, 3e-5]
    assert all(given.items() <= cell.items() for cell in cells)


def test_the_best_cell_is_that_of_the_best_median(tmp_path):
    """A seed that is better by luck does not choose it; the files are of its best run."""
    outcomes = []
    scores = [0.5, 0.5, 0.9, 0.5, 0.5, 0.6, 0.7, 0.6, 0.6, 0.2]
    trials = plan("roberta", "rte", tmp_path, **{"optimizer.learning_rate": 1e-5})
    for trial, score in zip(trials, scores, strict=True):
        folder = write_scores(trial, {"accuracy": score})
        predicted = f"index\tprediction\tlabel\n0\t{int(score == 0.7)}\t\n"
        (folder / "predictions" / "test.tsv").write_text(predicted)
        outcomes.append(glue.Outcome(trial, 0, 1800.0, ""))
    entry = glue._choose("rte", outcomes, tmp_path)
    assert (entry["median"], entry["low"], entry["high"]) == (0.6, 0.2, 0.7)
    assert entry["setting"]["data.global_batch"] == 32 and entry["device_hours"] == 20
    submitted = (tmp_path / "submission" / "RTE.tsv").read_text()
    assert submitted == "index\tprediction\n0\tnot_entailment\n"
    outcomes[3] = outcomes[3]._replace(code=2, last_line="no such file")
    assert glue._choose("rte", outcomes, tmp_path)["failed"].endswith("seed=3: no such file")


@pytest.mark.parametrize(
    ("name", "predicted", "submitted"),
    [
        ("mnli", ["2", "neutral"], "index\tprediction\n0\tcontradiction\n1\tneutral\n"),
        ("wnli", ["entailment"], "index\tprediction\n0\t1\n"),
        ("stsb", ["-0.5", "2.25", "7"], "index\tprediction\n0\t0.000\n1\t2.250\n2\t5.000\n"),
        ("boolq", ["True"], '{"idx": 0, "label": "true"}\n'),
    ],
)
def test_predictions_as_the_server_takes_them(tmp_path, name, predicted, submitted):
    file = tmp_path / TASKS[name].tests[0][1]
    glue._submit(TASKS[name], predicted, UPath(file))
    assert file.read_text() == submitted


def test_a_later_table_of_some_tasks_keeps_the_others_of_its_protocol(tmp_path):
    def table(protocol: str, model: str, **medians: float) -> dict:
        tasks = {name: {"median": median, "device_hours": 1.0} for name, median in medians.items()}
        return {"protocol": protocol, "model": model, "tasks": tasks} | glue.means(tasks)

    joined = table("quick", "a", mnli=0.8, rte=0.6, cola=0.4, wnli=0.9)
    assert joined["average"] == pytest.approx(0.6), "without WNLI"
    glue.save(tmp_path, table("quick", "a", mnli=0.8, rte=0.5, wnli=0.9))
    assert glue.save(tmp_path, table("quick", "a", cola=0.4, rte=0.6)) == joined
    assert json.loads((tmp_path / "glue.json").read_text()) == joined
    for other in (table("quick", "b", rte=0.1), table("roberta", "b", rte=0.6)):
        assert glue.save(tmp_path, other) == other


def test_a_table_names_the_keys_that_are_not_as_its_protocol_says(data, tmp_path):
    """Of those that change a score: tasks that were trained in two ways are in no table together."""

    def named(**overrides) -> str:
        setup = glue.Setup("quick", data, UPath(tmp_path), [], overrides, 32)
        return glue.run(["wnli"], setup)["protocol"]

    assert named() == named(**{"log.every": 3}) == "quick"
    changed = {"optimizer.clip_norm": 1.0, "train.epochs": 1.0, "log.every": 3}
    assert named(**changed) == "quick (with train.epochs=1.0, optimizer.clip_norm=1.0)"


@pytest.mark.slow
def test_a_protocol_that_starts_from_mnli(trained_workdir, data, tmp_path):
    """Tables, submissions and starts of some tasks; a second command does nothing again."""
    (tmp_path / "mine.py").write_text(PROTOCOL)
    tasks = ("--tasks", "mnli", "rte", "wnli")
    line = (trained_workdir.root, root := tmp_path / "a", f"--protocol={tmp_path}/mine.py", *tasks)
    done = run(*line, f"--data={data}")
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((root / "glue.json").read_text())
    folder = pathlib.Path(table["tasks"]["rte"]["run"])
    config = json.loads((folder / "config.json").read_text())
    assert config["train"]["init_from"] == f"{table['tasks']['mnli']['run']}/export"
    assert config["data"]["global_batch"] == 16, "as the command line says, not the protocol"
    assert not (folder / "checkpoints").exists(), "a table of a large model has many"
    for file, count in (("RTE", 16), ("WNLI", 16), ("MNLI-mm", 16), ("AX", 11)):
        lines = (root / "submission" / f"{file}.tsv").read_text().splitlines()
        assert len(lines) == 1 + count
    kept = json.loads(trained_workdir.glue.read_text())
    assert kept["5"]["average"] == table["average"]
    again = run(*line, f"--data={data}", "--json")
    trained_workdir.glue.unlink()  # other tests have the workdir, too
    assert json.loads(again.stdout.splitlines()[0]) == table and "done, " not in again.stderr


@pytest.mark.standard
def test_what_fails_is_named_and_the_others_are_done(trained_workdir, data, tmp_path):
    """MNLI's model is not there: what starts from it is not trained from another."""
    tasks = ("--protocol=mosaic", f"--data={data}", "--tasks", "mnli", "rte", "wnli")
    too_long = flags("classify.length=1000", "model.positions=1000")
    done = run(trained_workdir.root, tmp_path, *tasks, *too_long)
    trained_workdir.glue.unlink()
    assert done.returncode == 2 and "mnli, rte failed" in done.stderr, done.stderr
    table = json.loads((tmp_path / "glue.json").read_text())
    tasks = table["tasks"]
    assert "classify.length = 1000: " in tasks["mnli"]["failed"]
    assert "MNLI's model" in tasks["rte"]["failed"] and "median" in tasks["wnli"]
    assert table["average"] is None and not (tmp_path / "runs" / "rte").exists()


REFUSED = {  # flags -> what the sentence names
    "--protocol=bert": "--protocol=bert: ",
    "--protocol={}/odd.py": "odd.py: get_protocol()",
    "--protocol=mosaic --tasks rte": "rte ",
    "--config.train.seed=1": "config.train.seed: ",  # runs named seed=0 had seed 1
    "--config.train.init_from=a": "config.train.init_from: ",
    "--workdir={model}": "--workdir={model}: holds a",
    "--data=csv:a": "--data=csv:a: must be",
    "--data=jsonl:{}/classes": "the label '7'",
    "--model={}/begun": "/begun: ",
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused_before_anything_is_trained(trained_workdir, data, tmp_path, capsys, wrong):
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "odd.py").write_text("def get_protocol():\n    return {'epochs': 3}\n")
    rows = (pathlib.Path(data.removeprefix("jsonl:")) / "rte" / "validation.jsonl").read_text()
    classes = tmp_path / "classes" / "rte"
    classes.mkdir(parents=True)
    (classes / "validation.jsonl").write_text(rows.replace('"label": 1', '"label": 7'))
    model = trained_workdir.root
    line = ["glue", f"--model={model}", f"--workdir={tmp_path}/out", f"--data={data}"]
    line += ["--tasks", "rte", *wrong.format(tmp_path, model=model).split()]
    refuse(line, 2, REFUSED[wrong].format(model=model), capsys=capsys)
    assert not (tmp_path / "out").exists()
