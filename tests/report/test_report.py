"""The report: the numbers on the page are those of the logs, and nothing around it keeps it from being written."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from mlm.errors import DamageError, InputError
from mlm.report import plots, report
from mlm.report.sessions import split_sessions
from mlm.report.summary import RunSummary
from mlm.workdir import Workdir
from tests import ROOT
from tests.support.reports import EVALS, TIMING, TRAIN, Cells, logged, make_workdir, page_of


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Workdir:
    settings = ["train.steps=40", "optimizer.learning_rate=0.001", "corpus.sources=text:a*"]
    return make_workdir(tmp_path_factory.mktemp("report") / "run", overrides=settings)


@pytest.fixture(scope="module")
def page(workdir) -> Cells:
    return page_of(workdir)


def test_scores_are_those_of_the_logs(page, workdir):
    """The page needs no network."""
    expected = {
        "": ["evaluation, last", "evaluation, best", "training, last"],
        "steps": ["40", "20", "40"],
        "loss, nats": ["4.2500", "4.1250", "4.0000"],
        "perplexity": ["70.11", "61.87", ""],
        "accuracy": ["28.75%", "31.25%", "40.00%"],
        "bits per byte": ["1.8125", "1.7188", ""],
        "Tokens read": [f"{40 * 256 * 384:,} in 40 steps"],
        "Steps skipped (not finite)": ["2"],
        # of the kept stretches 900, 1000, 500 and 700
        "Throughput, median": ["800 tokens/s, 8.0 rows/s"],
        "Device": ["4 x cpu"],
        "optimizer.learning_rate": ["0.001", "base: 0.0006"],
    }
    assert {name: page.row(name) for name in expected} == expected
    assert "1.7500 nats under" in page.row("Unigram entropy of the validation split")[0]
    (seconds,) = page.row("Time")
    assert seconds.startswith("5 min 31 s in all, 3 starts")
    assert seconds.endswith(f"{TRAINING / 331:.1%}")
    assert len(page.images) == 5
    assert all(image.startswith("data:image/svg+xml;base64,") for image in page.images.values())
    text = workdir.report.read_text()
    assert not re.findall(r"""(?:href|src|url|@import)\s*[=(]?\s*["']?(https?:|//)""", text)
    changed = re.findall(r'<tr class="changed"><td>([^/]*)</td>', text.replace("<wbr>", ""))
    assert changed == ["corpus.sources", "optimizer.learning_rate", "train.steps"]


def test_a_run_stopped_between_two_lines_of_its_log_has_made_the_steps_that_it_saved(tmp_path):
    shown = page_of(
        make_workdir(tmp_path, metrics=TRAIN[:3], timing=TIMING[:11], overrides=["train.steps=40"])
    )
    assert "35 of 40 steps" in shown.text


def test_the_tables_of_glue_and_of_a_classifier(tmp_path):
    """Of many classes, all pairs that were confused."""
    rte = {"metrics": ["accuracy"], "median": 0.61, "low": 0.58, "high": 0.65, "scores": [0.61]}
    glue = {"protocol": "quick", "model": "a", "device_hours": 1.5, "tasks": {"rte": rte}}
    evals = [line | {"f1": 0.5, "epoch": 1.5} for line in EVALS]
    workdir = make_workdir(tmp_path, metrics=evals, timing=[], entropy=None)
    averages = {"20": 0.5, "40": 0.61}
    workdir.glue.write_text(
        json.dumps({step: glue | {"average": value} for step, value in averages.items()})
    )

    def with_confusion(labels: list[str], confusion: list[list[int]]) -> Cells:
        content = {"split": "test", "step": 7, "scores": {"rows": 6}, "labels": labels}
        workdir.classification.write_text(json.dumps(content | {"confusion": confusion}))
        return page_of(workdir)

    shown = with_confusion(["a", "<b>"], [[2, 1], [3, 0]])
    assert shown.row("average")[1] == "61.0%" and shown.row("rte")[2] == "58.0% to 65.0%"
    assert shown.row("true, and predicted:") == ["a", "<b>"] and shown.row("<b>") == ["3", "0"]
    assert shown.row("epochs")[0] == "1.50" and shown.row("F1, weighted")[0] == "50.00%"
    assert "F1 over steps" in shown.images
    confused = [[n * (n == m + 1) for n in range(40)] for m in range(40)]
    many = with_confusion([f"l{n}" for n in range(40)], confused)
    pairs = [row for row in many.rows if row[-1] == "100%"]
    assert pairs[0] == ["l38", "l39", "39", "100%"] and len(pairs) == 39


def test_a_regression_that_has_not_been_evaluated(tmp_path):
    overrides = ["classify.kind=regression", "classify.train=csv:a"]
    workdir = make_workdir(tmp_path, metrics=TRAIN, entropy=None, overrides=overrides)
    assert page_of(workdir).row("loss, squared error") == [f"{TRAIN[-1]['loss']:.4f}"]


# Time -----------------------------------------------------------------------------------------------------------------

# Of TIMING by hand: 10 steps took 9 x 2 s, as 1 was compiled, so 20; then 20. Of 30 the second start logged 9 in 36 s,
# and of 40 the third 4 in 16 s: each 40 s.
TRAINING = 20 + 20 + 40 + 40


def run_of(timing: list[dict]) -> RunSummary:
    return RunSummary("run", None, TRAIN, EVALS, split_sessions(timing), None)


def test_training_time_is_that_of_the_steps_that_were_kept():
    run = run_of(TIMING)
    assert run.training == ([0, 10, 20, 30, 40], [0, 20, 40, 80, TRAINING])
    assert run.seconds == 431 - 100 and run.goodput == pytest.approx(TRAINING / 331)
    assert [run.training_seconds(step) for step in (20, 35)] == [40, 100]
    assert run.device_hours == (95 * 8 + 68 * 4 + 31 * 4) / 3600
    # The second start goes back to 10, the third to 5: of the first one 5 steps were kept, of the second none.
    lines = []
    for begin, end in ((0, 20), (10, 30), (5, 30)):
        lines += [
            logged("start", begin, 0.0),
            logged("first_step", begin + 1, 1.0, 1.0),
            logged("train", end, 2.0, float(end - begin - 1)),
        ]
    assert run_of(lines).training == ([0, 30], [0, 30])


def test_a_clock_that_is_set_changes_no_time():
    clocks = (100, 101, 102, -7000, 9000, 9001)
    timing = [
        line | {"time": clock, "elapsed": float(n)}
        for n, (line, clock) in enumerate(zip(TIMING, clocks, strict=False))
    ]
    assert run_of(timing).seconds == 5 and run_of(timing).device_hours == 5 * 8 / 3600


def test_tokens_of_a_run_in_stages(tmp_path):
    """Half of its 60 steps read 4 rows in place of 8."""
    metrics = [{"kind": "eval", "step": 60, "loss": 4.0}]
    sizes = ("data.global_batch=8", "shards.length=64", "train.steps=60")
    stages = ("data.lanes=4", "data.batch_stages=((4, 30),)")
    settings = {"timing": [], "entropy": None, "overrides": (*sizes, *stages)}
    run = report.gather(make_workdir(tmp_path, metrics=metrics, **settings))
    assert [run.tokens(step) for step in (20, 40, 60)] == [n * 8 * 64 for n in (10, 25, 45)]


# Plots ----------------------------------------------------------------------------------------------------------------


def test_plots_show_the_points_of_the_logs(workdir):
    points = {
        title: [dict(line.get_xydata().tolist()) for line in figure.axes[0].get_lines()]
        for title, figure in plots.draw(report.gather(workdir), []).items()
    }

    def curve(key: str) -> dict[int, float]:
        return {line["step"]: line[key] for line in TRAIN}

    assert points["Loss"] == [curve("loss"), {20: 4.125, 40: 4.25}, {0: 6.0, 40: 6.0}]
    accuracy = ({10: 10, 20: 20, 30: 30, 40: 40}, {20: 31.25, 40: 28.75})
    assert points["Accuracy"] == list(map(pytest.approx, accuracy))
    assert points["Learning rate"] == [curve("learning_rate")]
    assert points["Gradient norm"] == [curve("grad_norm")]
    # of steps that no later start repeated
    assert points["Throughput"] == [{10: 900, 20: 1000, 30: 500, 40: 700}]


def test_norms_are_drawn_by_layer(tmp_path):
    """The root of the sum of squares; frozen parameters at 0, and what is not finite, are gray."""
    norms = {
        "m/embeddings/e": [1.0, 2.0, 0.5],
        "m/layer/10/a/kernel": [None, 4.0, 0.25],
        "m/layer/2/a/kernel": [3.0, 3.0, 0.1],
        "m/layer/2/bias": [4.0, 4.0, 0.2],
        "head/bias": [0.0, 0.0, None],
    }
    lines = [{"step": step, "kind": "norms", "parameters": norms} for step in (10, 20)]
    figure = plots.draw_norms(lines)
    gradient, parameter, update = (axes.collections[0].get_array() for axes in figure.axes[::2])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["m/embeddings", "layer 2", "layer 10", "head"]
    assert gradient[:, 0].tolist() == [1.0, 5.0, None, None]
    assert parameter[:, 0].tolist() == [2.0, 5.0, 4.0, None]
    assert update[:, 0].tolist() == [0.5, pytest.approx(math.hypot(0.3, 0.8) / 5), 0.25, None]
    workdir = make_workdir(tmp_path, timing=[])
    workdir.norms.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Norms by layer, over steps" in page_of(workdir).images


@pytest.mark.standard
def test_plots_are_drawn_with_settings_of_our_own(workdir, tmp_path):
    """A notebook's backend that is not here, a user's settings that need LaTeX: the page is the same to the byte."""
    report.write(workdir)
    (tmp_path / "matplotlibrc").write_text(
        "backend: module://nowhere\ntext.usetex: True\nfont.size: 40\n"
    )
    environment = os.environ | {"MPLBACKEND": "nowhere", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mlm", "report", f"--workdir={workdir.root}"]
    expected = workdir.report.read_text()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert workdir.report.read_text() == expected


@pytest.mark.parametrize("failing", ["draw_loss", "to_urls", "settings"])
def test_plots_that_fail_are_left_out_and_said(tmp_path, monkeypatch, capsys, failing):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(plots, failing, lambda *_: 1 // 0)
    shown = page_of(make_workdir(tmp_path))
    (said,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError" in said
    assert not shown.images and shown.row("Device") == ["4 x cpu"]
    assert os.environ["MPLBACKEND"] == "agg", "a notebook goes on drawing with it"


# Bad input ------------------------------------------------------------------------------------------------------------


def test_hostile_strings_are_text(tmp_path):
    hostile = '<script>alert("1")</script>&$name'
    timing = [TIMING[0] | {"device": hostile}, *TIMING[1:7]]
    sources = [f"corpus.sources=text:{hostile}"]
    workdir = make_workdir(tmp_path / "<script>x<b>", timing=timing, overrides=sources)
    shown = page_of(workdir)
    assert not {"script", "iframe", "link", "b>"} & set(shown.tags) and "<script>x<b>" in shown.text
    assert shown.row("Device") == [f"8 x {hostile}"]
    assert shown.row("corpus.sources")[0] == json.dumps([f"text:{hostile}"])


def test_what_may_be_missing_and_what_is_not_finite(tmp_path):
    lost = dict.fromkeys(("loss", "grad_norm", "perplexity", "accuracy"))
    metrics = [*TRAIN[:2], TRAIN[2] | lost, EVALS[0] | lost]
    workdir = make_workdir(tmp_path, metrics=metrics, timing=[], entropy=None)
    workdir.config.unlink()
    shown = page_of(workdir)
    assert shown.row("loss, nats") == ["not finite"] * 3
    assert "Tokens read" not in shown.text and "goodput" not in shown.text


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("timing.jsonl", '{"ste\n', DamageError, r"timing\.jsonl, line 1"),
        ("shards/manifest.json", "3", DamageError, "manifest"),
        ("config.json", "3", DamageError, "config"),
        # torn by a kill
        ("metrics.jsonl", '{"step": 10, "kind": "tr', InputError, r"run/metrics\.jsonl"),
    ],
)
def test_what_can_not_be_reported_is_named_and_the_old_report_stays(
    tmp_path, name, content, error, message
):
    workdir = make_workdir(tmp_path / "run")
    workdir.report.write_text("old")
    (workdir.root / name).write_text(content)
    with pytest.raises(error, match=message):
        report.write(workdir)
    assert workdir.report.read_text() == "old"
