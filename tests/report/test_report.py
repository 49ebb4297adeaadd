"""The report: the numbers on the page are those of the logs, and time is counted once."""

import json
import math
import re
import time

import pytest

from mlm import config as configs
from mlm.errors import DamageError, InputError
from mlm.report import goodput, plots, report
from mlm.workdir import Workdir
from tests.support.reports import EVALS, TIMING, TRAIN, Cells, make_workdir, page_of


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Workdir:
    settings = ["train.steps=40", "optimizer.learning_rate=0.001", "corpus.sources=text:a*"]
    return make_workdir(tmp_path_factory.mktemp("report") / "run", overrides=settings)


@pytest.fixture(scope="module")
def page(workdir) -> Cells:
    return page_of(workdir)


def test_scores_are_those_of_the_logs(page):
    assert page.row("") == ["evaluation, last", "evaluation, best", "training, last"]
    assert page.row("steps") == ["40", "20", "40"]
    assert page.row("loss, nats") == ["4.2500", "4.1250", "4.0000"]
    assert page.row("perplexity") == ["70.11", "61.87", ""]
    assert page.row("accuracy") == ["28.75%", "31.25%", "40.00%"]
    assert page.row("bits per byte") == ["1.8125", "1.7188", ""]
    assert page.row("predictions") == ["12,345", "12,345", ""]
    assert "1.7500 nats under" in page.row("Unigram entropy of the validation split")[0]
    assert page.row("Tokens read") == [f"{40 * 256 * 384:,} in 40 steps"]
    assert page.row("Steps skipped (not finite)") == ["2"]
    assert page.row("Throughput, median") == ["800 tokens/s"], "of the kept stretches 900, 1000, 500 and 700"
    assert page.row("Device") == ["4 x cpu"]


def test_a_run_stopped_between_two_lines_of_its_log_has_made_the_steps_that_it_saved(tmp_path):
    overrides = ["train.steps=40"]
    page = page_of(make_workdir(tmp_path, metrics=TRAIN[:3], timing=TIMING[:11], overrides=overrides))
    assert "35 of 40 steps" in page.text and page.row("Tokens read") == [f"{35 * 256 * 384:,} in 35 steps"]
    page = page_of(make_workdir(tmp_path, metrics=TRAIN[:3], timing=TIMING[:7], overrides=overrides))
    assert "30 of 40 steps" in page.text, "logged, but not saved"


def test_goodput_and_every_start_on_the_page(page, workdir):
    """The page needs no network."""
    assert page.row("training steps that were kept") == ["1 min 49 s", "32.9%"]
    assert page.row("down, between a stop and the next start") == ["2 min 17 s", "41.4%"]
    assert ["40", "4.2500", "70.11", "28.75%", "1.8125", "12,345"] in page.rows
    assert ["0", "30", "10", "1 min 35 s", "8 x cpu", "a"] in page.rows
    assert ["35", "40", "0", "31.0 s", "4 x cpu", "b"] in page.rows
    assert len(page.images) == 5 and all(image.startswith("data:image/svg+xml;base64,") for image in page.images)
    assert not re.findall(r"""(?:href|src|url|@import)\s*[=(]?\s*["']?(https?:|//)""", workdir.report.read_text())


def test_a_regression_that_has_not_been_evaluated_has_a_squared_error(tmp_path):
    workdir = make_workdir(tmp_path / "run", overrides=["classify.kind=regression", "classify.train=csv:a"])
    workdir.metrics.write_text("".join(json.dumps(line) + "\n" for line in TRAIN))
    assert page_of(workdir).row("loss, squared error") == [f"{TRAIN[-1]['loss']:.4f}"]
    assert "training loss, squared error" in workdir.report.read_text()


def test_config_marks_what_differs_from_base(page, workdir):
    assert page.row("optimizer.learning_rate") == ["0.001", "base: 0.0006"]
    assert page.row("corpus.sources") == ['["text:a*"]', 'base: ["docstrings"]']
    assert page.row("optimizer.b2") == ["0.98", ""]
    marked = re.findall(r'<tr class="changed"><td>([^/]*)</td>', workdir.report.read_text().replace("<wbr>", ""))
    assert marked == ["corpus.sources", "optimizer.learning_rate", "train.steps"]
    assert all(page.row(key) for key in configs.flatten(configs.load("configs/base.py", [])))


def test_the_tables_of_glue_and_of_a_classifier(tmp_path, page):
    """Of many classes, the worst pairs alone; of the others, nothing is shown."""
    assert "GLUE" not in page.text and "Confusion" not in page.text
    rte = {"metrics": ["accuracy"], "median": 0.61, "low": 0.58, "high": 0.65, "scores": [0.58, 0.61, 0.65]}
    rte |= {"device_hours": 1.5, "setting": {"optimizer.learning_rate": 1e-5}}
    content = {"protocol": "quick", "model": "runs/a", "device_hours": 1.5, "average": 0.61, "tasks": {"rte": rte}}
    few = {"split": "test", "step": 7, "scores": {"rows": 6}, "labels": ["a", "<b>"], "confusion": [[2, 1], [3, 0]]}
    workdir = make_workdir(tmp_path, metrics=TRAIN, timing=[], entropy=None)
    workdir.glue.write_text(json.dumps({"20": content | {"model": "runs/a@20", "average": 0.5}, "40": content}))
    workdir.classification.write_text(json.dumps(few))
    shown = page_of(workdir)
    assert ["rte", "accuracy", "61.0%", "58.0% to 65.0%", "3", "1.50", "learning_rate 1e-05"] in shown.rows
    assert shown.row("true, and predicted:") == ["a", "<b>"] and shown.row("<b>") == ["3", "0"]
    assert report.confused_pairs(few, 5) == [("<b>", "a", 3, 3), ("a", "<b>", 1, 3)]
    confused = [[n * (n == m + 1) for n in range(40)] for m in range(40)]
    many = few | {"labels": [f"l{n}" for n in range(40)], "confusion": confused}
    workdir.classification.write_text(json.dumps(many))
    rows = page_of(workdir).rows
    pairs = rows[rows.index(["true", "predicted", "rows", "of the true"]) + 1 :][: report.PAIRS + 1]
    assert pairs[0] == ["l38", "l39", "39", "100%"] and [len(row) for row in pairs] == [4] * report.PAIRS + [3]


def test_what_xla_did_since_the_last_start(tmp_path):
    """Its last line; what was not reported is left blank."""
    total = {"compilations": 2, "seconds": 3.5, "input_wait": 1.0, "host_wait": 0.5, "steps": 10.0, "cache_hits": 0}
    programs = {"all programs": total, "step": {"executions": 1500}, "f": {"seconds": 0.25, "compilations": 1}}
    stale = {"kind": "xla", "time": 431.0, "step": 20, "programs": {"all programs": total | {"compilations": 99}}}
    timing = [*TIMING[:7], stale, *TIMING[7:11], stale | {"programs": programs}, *TIMING[11:]]
    shown = page_of(make_workdir(tmp_path, timing=timing))
    waited = "10.0% of the steps' time for input, 5.0% for process 0, since the last start"
    assert shown.row("Devices waited") == [waited]
    assert shown.row("program") == [*total, "executions"]
    assert shown.row("all programs") == ["2", "3.5", "1", "0.5", "10", "0", ""]
    assert shown.row("step") == [*[""] * 6, "1,500"] and shown.row("f") == ["1", "0.25", *[""] * 5]


def test_norms_are_drawn_by_layer_and_by_kind(tmp_path):
    """Of several parameters, the root of the sum of squares; frozen ones at 0, and what is not finite, are gray."""
    names = ("m/embeddings/e", "m/layer/10/a/kernel", "m/layer/2/a/kernel", "m/layer/2/bias", "head/bias")
    rows = ([1.0, 2.0, 0.5], [None, 4.0, 0.25], [3.0, 3.0, 0.1], [4.0, 4.0, 0.2], [0.0, 0.0, None])
    lines = [{"step": step, "kind": "norms", "parameters": dict(zip(names, rows, strict=True))} for step in (10, 20)]
    figure = plots.draw_norms(lines)
    gradient, parameter, update = (axes.collections[0].get_array() for axes in figure.axes[::2])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:4] == ["m/embeddings", "layer 2", "layer 10", "head"]
    assert sorted(labels[4:]) == ["a/kernel", "bias", "head/bias", "m/embeddings/e"]
    assert gradient[1].tolist() == [5.0, 5.0] and parameter[labels.index("a/kernel"), 0] == 5.0
    assert update[1, 0] == pytest.approx(math.hypot(0.3, 0.8) / 5) and update[2, 0] == 0.25
    assert gradient.mask[2].all() and gradient.mask[3].all() and parameter.mask[3].all() and update.mask[3].all()
    workdir = make_workdir(tmp_path, timing=[])
    images = len(page_of(workdir).images)
    workdir.norms.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(page_of(workdir).images) == images + 1


def test_plots_show_the_points_of_the_logs():
    found = goodput.split_sessions(TIMING)
    figures = plots.draw(TRAIN, EVALS, found, 6.0)
    lines = {title: figure.axes[0].get_lines() for title, figure in figures.items()}
    points = {title: [(list(line.get_xdata()), list(line.get_ydata())) for line in of] for title, of in lines.items()}
    steps = [10, 20, 30, 40]
    assert points["Loss"][:2] == [(steps, [line["loss"] for line in TRAIN]), ([20, 40], [4.125, 4.25])]
    assert points["Loss"][2][1] == [6.0, 6.0]
    assert points["Accuracy"][0] == (steps, pytest.approx([10, 20, 30, 40]))
    assert points["Accuracy"][1] == ([20, 40], pytest.approx([31.25, 28.75]))
    assert points["Learning rate"] == [(steps, [line["learning_rate"] for line in TRAIN])]
    assert points["Gradient norm"] == [(steps, [line["grad_norm"] for line in TRAIN])]
    assert points["Throughput"] == [(steps, [900, 1000, 500, 700])], "of steps that no later start repeated"
    assert {figure.axes[0].get_xlabel() for figure in figures.values()} == {"steps"}


def test_hostile_strings_are_text(tmp_path):
    hostile = '<script>alert("1")</script>&$name'
    timing = [TIMING[0] | {"host": hostile, "device": hostile}, *TIMING[1:7]]
    workdir = make_workdir(tmp_path / "<script>x<b>", timing=timing, overrides=[f"corpus.sources=text:{hostile}"])
    report.write(workdir)
    text = workdir.report.read_text()
    assert "<script" not in text
    page = Cells(text)
    assert not {"script", "iframe", "link"} & set(page.tags)
    assert "<script>x<b>" in page.text
    assert page.row("Device") == [f"8 x {hostile}"]
    assert page.row("corpus.sources")[0] == json.dumps([f"text:{hostile}"])


def test_one_point_is_enough_and_config_and_manifest_may_be_missing(tmp_path):
    page = page_of(make_workdir(tmp_path / "b", metrics=EVALS[:1], timing=[], entropy=None))
    assert page.row("loss, nats") == ["4.1250", "4.1250"]
    assert "Goodput" not in page.text
    workdir = make_workdir(tmp_path / "c", entropy=None)
    workdir.config.unlink()
    page = page_of(workdir)
    assert page.row("loss, nats") == ["4.2500", "4.1250", "4.0000"] and "Tokens read" not in page.text


def test_values_that_were_not_finite():
    """On storage without local files."""
    lost = dict.fromkeys(("loss", "grad_norm", "perplexity", "accuracy"))
    workdir = make_workdir(f"memory://bucket/{time.time_ns()}", metrics=[*TRAIN[:2], TRAIN[2] | lost, EVALS[0] | lost])
    page = page_of(workdir)
    assert page.row("loss, nats") == ["not finite"] * 3
    assert "the last evaluation loss" not in page.row("Unigram entropy of the validation split")[0]
    assert not list(workdir.root.glob("*.tmp"))


def test_nothing_to_report_is_refused(tmp_path):
    workdir = Workdir(str(tmp_path / "empty"))
    workdir.metrics.write_text('{"step": 10, "kind": "tr')  # torn by a kill
    with pytest.raises(InputError, match=r"empty/metrics\.jsonl"):
        report.write(workdir)
    assert not workdir.report.exists()


def test_damage_is_named_and_the_old_report_stays(tmp_path):
    workdir = make_workdir(tmp_path / "run", timing=TIMING[:3])
    workdir.report.write_text("old")
    lines = workdir.timing.read_text().splitlines()
    workdir.timing.write_text("\n".join([*lines[:2], lines[2][:9], *lines[:1]]) + "\n")
    with pytest.raises(DamageError, match=r"timing\.jsonl, line 3"):
        report.write(workdir)
    workdir.timing.write_text("")
    for name in ("shards/manifest.json", "config.json"):
        (workdir.root / name).write_text("3")
        with pytest.raises(DamageError, match=name):
            report.write(workdir)
    assert workdir.report.read_text() == "old"
